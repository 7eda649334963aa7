"""A fault: a test that the model failed, and its outcome in words.

The fields of `Fault` define `COLUMNS`. The schema of `run.sqlite`, its writer and its checks, DataFrames, exports, the
details that `themis faults` prints and those on the report page are all generated from this table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import inf, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from themis.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.replay import RunHandle

MAX_TESTS = 10**10
MAX_CHUNK = 1 << 24
"""Tests per forward pass."""
MAX_OUTCOME = 1 << 31
MAX_REAL = 1e308
"""Stands for the largest finite number in a database; a column with a wider range may hold infinities."""


@dataclass(frozen=True)
class Column:
    """A column of a fault: its meaning, and the values that it may have."""

    name: str
    type: str
    """int, float, str or bool."""
    is_optional: bool
    """Whether a missing value is None in a `Fault`."""
    help: str
    unit: str = ""
    low: float = -MAX_REAL
    high: float = MAX_REAL
    values: tuple[str, ...] = ()
    """The only texts allowed; empty if any text is."""
    missing: float | None = None
    """The number that stands for NULL in arrays; None if the column is never NULL."""
    title: str = ""
    """The label among a fault's details on the report page; empty if the column is not among them."""

    def is_missing(self, value: float) -> bool:
        """Whether a number of an array stands for a missing value."""
        return value < 0 if self.type == "int" else value != value

    @property
    def text(self) -> str:
        """The meaning of the column, with the unit."""
        return f"{self.help}, in the {self.unit}" if self.unit else self.help

    @property
    def sql_type(self) -> str:
        """The column's type in the database."""
        return {"int": "INTEGER", "bool": "INTEGER", "float": "REAL"}.get(self.type, "TEXT")

    @property
    def dtype(self) -> str:
        """The dtype of the column's array."""
        return {"int": "int64", "float": "float32"}.get(self.type, self.type)


def about(help: str, *, repr: bool = True, **details: Any) -> Any:
    """A field of `Fault` with the fields of its `Column` that do not follow from the annotation."""
    return field(repr=repr, metadata={"help": help, **details})


STREAMS = ("uniform", "search")
_CLASS: dict[str, Any] = {"low": 0, "high": MAX_OUTCOME}
_ANY_NUMBER: dict[str, Any] = {"low": -inf, "high": inf, "missing": nan}


@dataclass(frozen=True, kw_only=True)
class FaultInputs:
    """The clean and the disturbed input of a fault, for display."""

    clean_inputs: Tensor = field(repr=False)
    inputs: Tensor = field(repr=False)
    bounds: tuple[float, float]
    """The smallest and the largest value that an input may have."""
    boxes: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    """A detector's answers to the clean and to the disturbed input, `[n, 6]` each."""


@dataclass(frozen=True, kw_only=True)
class Replay(FaultInputs):
    """A fault run again: its input, what the model answered this time, and whether that matches the record."""

    outputs: Tensor = field(repr=False)
    answer: int
    value: float | None
    confidence: float
    is_fault: bool
    is_same: bool
    """Whether the answer is the recorded one, with outputs within 1e-5 (if not stored: confidence, or else margin)."""
    input_gap: float | None = None
    """Largest difference between the input and the stored one; 0 if equal to the bit, None if not stored."""
    output_gap: float | None = None
    """The same for the output."""
    changes: list[str] = field(default_factory=list)
    """What has changed since the run: weights, data, versions, device, threads."""


class Tested(NamedTuple):
    """What a run tested: the hashes of its model and data, and the code of its perturbation, which omits the ranges."""

    model: str
    data: str
    perturbation: str


@dataclass(frozen=True)
class Fault:
    """A test that the model failed. `(seed_id, perturbation, theta, noise_seed)` reproduce its input."""

    id: int = about("number of the test in its campaign", low=0, high=MAX_TESTS)
    seed_id: int = about("the seed: index of the clean input in the data", low=0)
    perturbation: str = about("name of the perturbation")
    theta: dict[str, float] = about("parameter of the perturbation")
    noise_seed: int = about("with the seed and theta, reproduces the input")
    round: int = about("round of the campaign", low=0, high=MAX_TESTS)
    stream: str = about("uniform: drawn at random; search: chosen by the policy", values=STREAMS)
    kind: str = about("kind of proposal")
    label: int | None = about(
        "class of the seed; none if the data has no labels, or if its label is not a class number", **_CLASS, missing=-1
    )
    clean_answer: int | None = about(
        "answer to the clean input; none in tasks whose outcomes say what changed",
        **_CLASS,
        missing=-2,  # the outcome KEPT_ANSWER of an oracle
    )
    answer: int = about("the wrong outcome; -1 if the output was not finite", low=-1, high=MAX_OUTCOME)
    clean_value: float | None = about("answer to the clean input as a number, in tasks that have one", **_ANY_NUMBER)
    value: float | None = about(
        "the wrong answer as a number: a regression value, a binary score, a mean IoU; none if not finite; for a "
        "model tested against a reference, the answer of the reference",
        **_ANY_NUMBER,
    )
    confidence: float = about(
        "confidence of the wrong answer; none in tasks without one, and if the output was not finite", **_ANY_NUMBER
    )
    """NaN if there is none."""
    margin: float = about(
        "distance to a correct answer (negative; -inf if the output was not finite)",
        unit="unit of the outputs",
        low=-inf,
        title="margin",
    )
    distance: float = about("L2 distance from the clean input", unit="unit of the inputs", low=0)
    linf: float = about(
        "largest change of a value of the input", unit="unit of the inputs", low=0, title="largest change"
    )
    ssim: float | None = about("structural similarity to the clean picture; 1 is identical", missing=nan)
    # At this row of a chunk of the same shape, outputs are equal to the bit.
    position: int = about("row of the test in its forward pass", repr=False, low=0, high=MAX_CHUNK)
    chunk: int = about("rows of that forward pass", repr=False, low=1, high=MAX_CHUNK)
    raised: bool = about("whether the test raised the campaign's criterion", repr=False)
    signature: dict[str, float] = about("share of the test's sensitivity by layer", repr=False)
    _task: str = field(default="", repr=False, compare=False)
    _classes: Sequence[str] | None = field(default=None, repr=False, compare=False)
    _handle: RunHandle | None = field(default=None, repr=False, compare=False)

    def replay(self) -> Replay:
        """Run the test again."""
        if self._handle is None:
            raise UsageError("a replayed fault must belong to a run, but this one does not: take it from run.faults")
        return self._handle.replay(self)

    def shown(self) -> FaultInputs | None:
        """The inputs of the test; None if a run folder did not store them, since showing a fault never runs a model."""
        return None if self._handle is None else self._handle.show(self)

    @property
    def outcome(self) -> str | None:
        """The outcome in words, such as `dog lost`; None in tasks whose outcomes are answers of the model."""
        if self._task == "keypoints" and self.answer >= 0 and self.value is not None:
            return f"{name_point(self.answer, self._classes)} off by {self.value:.3g} pixels"
        if not self._task or gives_answers(self._task) or self.answer < 0:
            return None
        return name_outcome(self._task, self.answer, self._classes)

    @property
    def is_number(self) -> bool:
        """Whether the answers are numbers, `clean_value` and `value`, as in a regression."""
        return self._task in NUMBER_TASKS and self.clean_value is not None and self.value is not None

    @property
    def reference_answer(self) -> int | None:
        """The answer of the reference that the model was tested against, -1 if it was not finite; None without one."""
        if self._task != "against":
            return None
        return -1 if self.value is None else int(self.value)

    def name(self, answer: int) -> str:
        """The class name of an answer if it is known, otherwise its number."""
        return name_answer(self._task, answer, self._classes)

    def as_dict(self) -> dict[str, Any]:
        """The fault as plain data."""
        return {column.name: getattr(self, column.name) for column in COLUMNS}

    def _repr_html_(self) -> str:
        from themis.runs.display.fault import show_fault

        return show_fault(self)


COLUMNS = tuple(
    Column(each.name, str(each.type).removesuffix(" | None"), str(each.type).endswith(" | None"), **each.metadata)
    for each in fields(Fault)
    if each.metadata
)
"""The columns of a fault, in the order of the database."""
PLAIN_COLUMNS = tuple(each for each in COLUMNS if each.name not in ("perturbation", "theta", "signature"))
"""The columns with one number or text per fault, except for the perturbation, which all faults of a run share."""


ANSWER_TASKS = ("wrong", "changed", "top", "threshold", "against")
"""Tasks whose outcome is an answer of the model; `top` stands for `top5` and all others."""
NUMBER_TASKS = ("regression", "euclidean", "off")
"""Tasks whose answer is one or more numbers, and whose outcome is the direction in which a number moved."""
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
        names = list(classes or ())[number - 1 : number]  # with several numbers, the first has outcomes 2 and 3
        return f"{names[0] if names else f'output {number - 1}'} {DIRECTIONS[direction]}"
    name = classes[outcome] if classes is not None and outcome < len(classes) else str(outcome)
    if task == "multilabel":
        return f"label {name} flipped"
    if task == "segmentation":
        return f"class {name} lost"
    if task == "keypoints":
        return f"{name_point(outcome, classes)} off"
    return name if gives_answers(task) else f"outcome {outcome}"


def name_answer(task: str, answer: int, classes: Sequence[str] | None) -> str:
    """The name of a label or of the answer to a clean input."""
    return name_outcome(task if gives_answers(task) else "wrong", answer, classes)


def name_point(number: int, names: Sequence[str] | None) -> str:
    """The name of a key point, or its number in words."""
    return names[number] if names is not None and number < len(names) else f"point {number}"


def show_outcome(task: str, outcome: int, classes: Sequence[str] | None) -> str:
    """The outcome as lists of faults show it: the number of an answer, for use in conditions, otherwise words."""
    return str(outcome) if outcome >= 0 and gives_answers(task) else name_outcome(task, outcome, classes)
