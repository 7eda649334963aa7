"""Names for what a run knows by number: classes, outcomes, features, the parts of a perturbation."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

MOVED = {0: "smaller (left)", 1: "larger (right)"}


def task_of(run: Reader) -> str:
    """The oracle's name without its number: wrong, changed, regression, ..."""
    return str(run.record.get("start", {}).get("oracle", "")).partition(":")[0]


def class_names(run: Reader) -> list[str] | None:
    """The classes' names by their numbers, where the run's data knew them."""
    names: list[str] | None = run.record.get("start", {}).get("classes")
    return names


def outcome_names(task: str, outcomes: Iterable[int], classes: list[str] | None) -> dict[str, str]:
    """Each outcome that was seen, in words."""
    return {str(each): _outcome(task, each, classes) for each in outcomes}


def _outcome(task: str, outcome: int, classes: list[str] | None) -> str:
    if outcome < 0:
        return "not finite"
    if task in ("regression", "off"):
        return MOVED.get(outcome, str(outcome))
    name = classes[outcome] if classes is not None and outcome < len(classes) else str(outcome)
    if task == "multilabel":
        return f"label {name} flipped"
    if task == "segmentation":
        return f"class {name} lost"
    return name if task in ("wrong", "changed", "top5", "threshold") else f"outcome {outcome}"


def feature_names(run: Reader) -> list[str] | None:
    """Names of a table's columns: as the run recorded them, or as its file of features says."""
    recorded = run.record.get("feature_names")
    if recorded:  # columns that nobody named are numbered
        return [f"feature {each}" if str(each) == str(k) else str(each) for k, each in enumerate(recorded)]
    origin = run.record.get("origin") or {}
    if not origin.get("features"):
        return None
    try:
        with Path(origin.get("folder") or "", origin["features"]).open(newline="", encoding="utf-8") as file:
            return [row["name"] for row in csv.DictReader(file)] or None
    except (OSError, KeyError, UnicodeDecodeError, csv.Error):
        return None


def part_names(run: Reader) -> tuple[list[str], list[int]]:
    """The parts of a sum of perturbations, and which of them each dimension of theta belongs to."""
    name, n = str(run.record["perturbation"]), len(run.theta)
    words = name.split(" + ")
    whole: tuple[list[str], list[int]] = ([name], [0] * n)
    if len(words) == 1:
        return whole
    from themis.errors import ThemisError
    from themis.perturb import PERTURBATIONS, choose_perturbation

    if any(each.partition("(")[0].strip() not in PERTURBATIONS for each in words):
        return whole  # one of the user's own: a report does not run their code
    try:
        owner = [k for k, each in enumerate(words) for _ in choose_perturbation(each).theta]
    except ThemisError:
        return whole
    return (words, owner) if len(owner) == n else whole


def plain(value: Any) -> str:
    """A setting or a version as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(plain, value)) if isinstance(value, list | tuple) else str(value)
