"""The share of seeds that the search could not break, by strength of the disturbance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import StoreError
from themis.reading import check_form, items, number, optional, parse_json, read_regular, record, text, whole
from themis.runs.estimates import strengths
from themis.runs.store.validation import MAX_JSON

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

FILE = "shrunk.json"
MAX_POINTS = 120
_POINTS = items(number())
_CURVE = record(
    {
        **dict.fromkeys(("strengths", "share", "low", "high"), _POINTS),
        **dict.fromkeys(("failed", "seeds"), whole()),
        **dict.fromkeys(("caveat", "strength_1"), text()),
        "median": optional(number()),
    }
)
_SHRUNK = record(
    {}, {"robustness": optional(_CURVE), "faults": items(record({"seed_id": whole(), "weakest": number()}))}
)
AS_FOUND = (
    "The curve uses the weakest fault of each seed as the campaign found it. Weaker disturbances may break seeds too; "
    "themis shrink searches for them."
)


@dataclass(frozen=True)
class BreakingCurve:
    """Points (strength, share of seeds not broken up to it), with the ends of the 95% interval if it is known."""

    source: str
    """What the curve was made from, in words."""
    points: list[list[float]]
    unit: str
    """What strength 1 is."""
    median: float | None
    """The strength at which half of the seeds have broken."""


def breaking_curve(run: Reader, n_seeds: int) -> BreakingCurve | None:
    """The curve from the best source: a robustness curve, shrunk faults or faults as found. None without faults."""
    shrunk = _read_shrunk(run)
    curve = shrunk.get("robustness")
    if curve:
        columns = (curve["strengths"], curve["share"], curve["low"], curve["high"])
        points = [[0.0, 1.0, 1.0, 1.0], *map(list, zip(*columns, strict=True))]
        source = (
            f"{curve['failed']:,} of {curve['seeds']:,} seeds broke, each at its smallest strength. {curve['caveat']}"
        )
        return BreakingCurve(source, _thinned(points), curve["strength_1"], curve["median"])
    weakest = _weakest(run)
    if not weakest or not n_seeds:
        return None
    improved = set()
    for fault in shrunk.get("faults", ()):
        seed_id, strength = int(fault["seed_id"]), float(fault["weakest"])
        if strength < weakest.get(seed_id, np.inf):
            weakest[seed_id] = strength
            improved.add(seed_id)
    n = len(improved)
    source = f"{AS_FOUND} For {n:,} seed{'s' * (n != 1)} it has found one." if improved else AS_FOUND
    steps = np.sort(np.array(list(weakest.values())))
    points = [[0.0, 1.0], *([float(s), 1 - (k + 1) / n_seeds] for k, s in enumerate(steps.tolist()))]
    points.append([1.0, points[-1][1]])
    median = next((strength for strength, share in points if share <= 0.5), None)
    return BreakingCurve(source, _thinned(points), "", median)


def _weakest(run: Reader) -> dict[int, float]:
    """The smallest strength among the faults of each seed."""
    from themis.runs.store.schema import theta_column

    columns = ", ".join(["seed_id", *(theta_column(name) for name in run.theta)])
    weakest: dict[int, float] = {}
    for rows in run.batches(columns):
        table = np.array(rows, dtype=np.float64)
        for seed, strength in zip(table[:, 0].tolist(), strengths(table[:, 1:], run.record["theta"])[0], strict=True):
            weakest[int(seed)] = min(weakest.get(int(seed), np.inf), float(strength))
    return weakest


def _read_shrunk(run: Reader) -> dict[str, Any]:
    """What `themis shrink` wrote; empty if it was not run."""
    path = run.path / FILE
    try:
        shrunk: dict[str, Any] = check_form(parse_json(read_regular(path, MAX_JSON)), _SHRUNK)
        curve = shrunk.get("robustness")
        if curve and len({len(curve[name]) for name in ("strengths", "share", "low", "high")}) > 1:
            raise ValueError("the columns of its curve must have one length")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(
            f"{path} must hold shrunk faults as JSON, but it is damaged ({reason}): remove it, and write it again with "
            "themis shrink"
        ) from error
    return shrunk


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """At most `MAX_POINTS` of the points, with the first and the last, rounded."""
    kept = np.unique(np.linspace(0, len(points) - 1, min(len(points), MAX_POINTS)).round().astype(int))
    return [[float(f"{value:.5g}") for value in points[k]] for k in kept.tolist()]
