"""How many seeds still stand at each strength: by the robustness curve, by shrunk faults, or by faults as found."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import StoreError
from themis.runs.estimates import strengths

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

FILE = "shrunk.json"
POINTS = 120
"""Of a curve, at most."""
FOUND = (
    "Of each seed, the weakest fault as the campaign found it. Weaker disturbances may break seeds too; themis shrink "
    "looks for them."
)


def breaking_strengths(run: Reader, n_seeds: int) -> dict[str, Any] | None:
    """A curve of the seeds still right by strength, and where it is from; None where there is nothing to show."""
    shrunk = _read_shrunk(run)
    curve = shrunk.get("robustness")
    if curve:
        columns = (curve["strengths"], curve["share"], curve["low"], curve["high"])
        points = [[0.0, 1.0, 1.0, 1.0], *map(list, zip(*columns, strict=True))]
        text = (
            f"{curve['failed']:,} of {curve['seeds']:,} seeds broke, each at its smallest strength. {curve['caveat']}"
        )
        return {"source": text, "points": _thinned(points), "unit": curve["strength_1"], "median": curve["median"]}
    weakest = _weakest(run)
    if not weakest or not n_seeds:
        return None
    source, better = FOUND, 0
    for each in shrunk.get("faults", ()):
        seed, strength = int(each["seed_id"]), float(each["weakest"])
        if strength < weakest.get(seed, np.inf):
            weakest[seed], better = strength, better + 1
    if better:
        source = f"{better:,} of the faults shrunk by themis shrink; {FOUND[0].lower()}{FOUND[1:]}"
    steps = np.sort(np.array(list(weakest.values())))
    points = [[0.0, 1.0], *([float(s), 1 - (k + 1) / n_seeds] for k, s in enumerate(steps.tolist()))]
    points.append([1.0, points[-1][1]])
    half = next((s for s, share in points if share <= 0.5), None)
    return {"source": source, "points": _thinned(points), "unit": "", "median": half}


def _weakest(run: Reader) -> dict[int, float]:
    """The smallest strength among each seed's faults."""
    from themis.runs.store.schema import theta_column

    columns = ", ".join(["seed_id", *(theta_column(name) for name in run.theta)])
    found: dict[int, float] = {}
    for rows in run.batches(columns):
        table = np.array(rows, dtype=np.float64)
        for seed, strength in zip(table[:, 0].tolist(), strengths(table[:, 1:], run.record["theta"])[0], strict=True):
            found[int(seed)] = min(found.get(int(seed), np.inf), float(strength))
    return found


def _read_shrunk(run: Reader) -> dict[str, Any]:
    path = run.path / FILE
    try:
        shrunk = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise StoreError(f"{path} must be JSON, it is damaged: {error}; make it again with themis shrink") from error
    return shrunk if isinstance(shrunk, dict) else {}


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """At most `POINTS` of them, the first and the last included, with few digits."""
    at = np.unique(np.linspace(0, len(points) - 1, min(len(points), POINTS)).round().astype(int))
    return [[float(f"{each:.5g}") for each in points[k]] for k in at.tolist()]
