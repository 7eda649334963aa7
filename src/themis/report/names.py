"""Names for what a run stores as numbers: classes, outcomes, features and the parts of a perturbation."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.reading import MAX_FEATURES, read_regular
from themis.runs.fault import gives_answers, name_outcome
from themis.runs.trust import why_not_ours

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader


def task_of(run: Reader) -> str:
    """The name of the oracle without its parameter: wrong, changed, regression, ..."""
    return str(run.record.get("start", {}).get("oracle", "")).partition(":")[0]


def class_names(run: Reader) -> list[str] | None:
    """Class names in the order of the class indices, if the data had them."""
    names: list[str] | None = run.record.get("start", {}).get("classes")
    return names


def outcome_names(task: str, outcomes: Iterable[int], classes: list[str] | None) -> dict[int, str]:
    """A name for each of the outcomes."""
    return {outcome: name_outcome(task, outcome, classes) for outcome in outcomes}


def answer_names(task: str, answers: Iterable[int], classes: list[str] | None) -> dict[int, str]:
    """A name for each of the answers to clean inputs, in tasks that have them."""
    return outcome_names(task if gives_answers(task) else "wrong", answers, classes)


def feature_names(run: Reader) -> list[str] | None:
    """The names of a table's columns, as recorded by the run or, if the run was made here, as in its features file."""
    recorded = run.record.get("feature_names")
    if recorded:  # unnamed columns are recorded by their number
        return [f"feature {name}" if str(name) == str(k) else str(name) for k, name in enumerate(recorded)]
    origin = run.record.get("origin") or {}
    if not origin.get("features") or why_not_ours(run.record):
        return None
    try:
        content = read_regular(Path(origin.get("folder") or "", origin["features"]), MAX_FEATURES).decode()
        return [row["name"] or "" for row in csv.DictReader(content.splitlines())] or None
    except (OSError, KeyError, ValueError, csv.Error):
        return None


def part_names(run: Reader) -> tuple[list[str], list[int]]:
    """The parts of a sum of perturbations, and for each dimension of theta the index of its part."""
    name, n = str(run.record["perturbation"]), len(run.theta)
    parts = name.split(" + ")
    undivided: tuple[list[str], list[int]] = ([name], [0] * n)
    if len(parts) == 1:
        return undivided
    from themis.errors import ThemisError
    from themis.perturb import choose_perturbation

    try:  # a report imports nothing, so a perturbation of the user's own is not divided
        owners = [k for k, part in enumerate(parts) for _ in choose_perturbation(part, imports=False).theta]
    except ThemisError:
        return undivided
    return (parts, owners) if len(owners) == n else undivided


def as_text(value: Any) -> str:
    """A setting or a version number as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)
