"""Names for what a run stores: a table's features and their changes, the model, settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from themis.runs.store.reader import Reader
    from themis.runs.store.tensors import Tensors


def feature_names(run: Reader) -> list[str] | None:
    """The recorded names of a table's columns; None for runs on other data."""
    recorded = run.record.get("feature_names") or ()  # unnamed columns are recorded by their number
    return [f"feature {name}" if str(name) == str(k) else str(name) for k, name in enumerate(recorded)] or None


def subject_of(record: dict[str, Any]) -> str:
    """The model under test, by the name that the user gave."""
    origin = record["origin"] or {}
    subject = str(origin.get("zoo") or origin.get("model") or "a model built in Python")
    if "reference_sha256" not in record["environment"]:
        return subject
    return f"{subject} against {origin.get('against') or 'a reference built in Python'}"


def describe_settings(origin: dict[str, Any] | None, settings: dict[str, Any]) -> list[tuple[str, str]]:
    """The recorded origin of a campaign, if there is one, and its settings, as (name, text)."""
    given = {name: value for name, value in (origin or {}).items() if value not in (None, "", [])}
    return [(name, as_text(value)) for name, value in {**given, **settings}.items()]


def as_text(value: Any) -> str:
    """A setting or a version number as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)


MAX_LISTED_CHANGES = 24
"""Features listed per fault, starting with those that changed most."""


@dataclass(frozen=True)
class FeatureChanges:
    """How many of an input's features changed, and those that changed most as (name, before, after)."""

    n: int
    of: int
    rows: list[tuple[str, float | str, float | str]]


def feature_changes(tensors: Tensors, names: Sequence[str] | None, record: dict[str, Any]) -> FeatureChanges:
    """The changes of a table row, with names of categories and values in their original unit if these are recorded."""
    axes = record.get("feature_axes") or {}
    categories = [column["values"] for column in (record.get("coding") or {}).get("columns", ())]
    before, after = tensors.clean_inputs[0].flatten().double(), tensors.inputs[0].flatten().double()
    distance = (after - before).abs().nan_to_num(float("inf"))
    n = int((distance > 0).sum())
    largest = distance.argsort(descending=True, stable=True)[: min(n, MAX_LISTED_CHANGES)].tolist()
    known = names if names is not None and len(names) == len(before) else None
    if axes:
        low, reach = (before.new_tensor(axes[name]) for name in ("low", "reach"))
        before, after = (low + (values * reach).expm1() for values in (before, after))

    def value(k: int, number: Tensor) -> float | str:
        if k >= len(categories) or categories[k] is None:
            return _number(number)
        name = categories[k][min(max(round(float(number)), 0), len(categories[k]) - 1)]
        return "missing" if name is None else str(name)

    rows = [(known[k] if known else f"feature {k}", value(k, before[k]), value(k, after[k])) for k in largest]
    return FeatureChanges(n, len(before), rows)


def _number(value: Tensor) -> float | str:
    """A value with six digits; as text if it is not finite, because JSON cannot represent it."""
    number = float(value)
    return float(f"{number:.6g}") if abs(number) < float("inf") else str(number)
