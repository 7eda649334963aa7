"""What happened in a fault, in words: a run stores it as a number whose meaning depends on the task."""

from __future__ import annotations

from collections.abc import Sequence

ANSWER_TASKS = ("wrong", "changed", "top", "threshold")
"""Tasks whose outcome is an answer of the model; `top` stands for `top5` and all others."""
NUMBER_TASKS = ("regression", "euclidean", "off")
"""Tasks whose answer is a number, or several, and whose outcome is the direction in which it moved."""
DIRECTIONS = {0: "smaller", 1: "larger"}


def gives_answers(task: str) -> bool:
    """Whether the outcomes of a task are answers of the model."""
    return task.rstrip("0123456789") in ANSWER_TASKS


def name_outcome(task: str, outcome: int, classes: Sequence[str] | None) -> str:
    """The outcome in words, such as `dog`, `larger` or `class road lost`."""
    if outcome < 0:
        return "not finite"
    if task == "detection":
        from themis.oracle.detection import describe_outcome

        return describe_outcome(outcome, classes)
    if task in NUMBER_TASKS:
        number, direction = divmod(outcome, 2)
        if number == 0:
            return DIRECTIONS[direction]
        names = list(classes or ())[number - 1 : number]  # of several numbers, the first has outcomes 2 and 3
        return f"{names[0] if names else f'output {number - 1}'} {DIRECTIONS[direction]}"
    name = classes[outcome] if classes is not None and outcome < len(classes) else str(outcome)
    if task == "multilabel":
        return f"label {name} flipped"
    if task == "segmentation":
        return f"class {name} lost"
    if task == "keypoints":
        return f"{name_point(outcome, classes)} off"
    return name if gives_answers(task) else f"outcome {outcome}"


def name_point(number: int, names: Sequence[str] | None) -> str:
    """The name of a key point, or its number in words."""
    return names[number] if names is not None and number < len(names) else f"point {number}"


def show_outcome(task: str, outcome: int, classes: Sequence[str] | None) -> str:
    """The outcome in a list of faults: the number of an answer, by which faults are selected, and words otherwise."""
    return str(outcome) if outcome >= 0 and gives_answers(task) else name_outcome(task, outcome, classes)


def describe_change(clean: object, outcome: int, answer: str | None = None) -> str:
    """How an input was answered, such as `1 answered as 7`; clean: the answer to the clean input, or None.

    answer: the outcome as it is shown, by default its number.
    """
    if outcome < 0:
        return "no finite output" if clean is None else f"{clean} without a finite output"
    answered = f"answered as {outcome if answer is None else answer}"
    return answered if clean is None else f"{clean} {answered}"
