"""The faults of a run as columns that the report page filters, sorts and shows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import StoreError
from themis.reading import check_form, items, number, optional, parse_json, read_regular, record, text, whole
from themis.report.names import part_names
from themis.runs.estimates import strengths
from themis.runs.fault import PLAIN
from themis.runs.store.schema import MAX_JSON

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

MAX_ROWS = 20_000
"""Faults that a page lists, the most telling first."""
MAX_ANSWERS = 24
"""Rows and columns of the answer matrix; rarer answers are combined in one more."""
OTHER = "other"
_INTEGERS = ("id", "seed_id", "round", "label", "clean_answer", "answer")
_REALS = tuple(column.name for column in PLAIN if column.type == "float")
DETAILS = [(column.name, column.title) for column in PLAIN if column.title]
"""The columns among the details of a fault, and how the page calls them."""


@dataclass(frozen=True)
class FaultRows:
    """The faults that a page lists."""

    columns: dict[str, list[Any]]
    """One value per listed fault and column; None if unknown or not finite.

    Besides columns of a fault, and `theta` with one column per dimension: `uniform`, 1 for faults of the uniform
    stream; `layer`, the index of the layer with the largest share of the sensitivity; `kept`, 1 if the input was kept;
    `strength`; `part`, the index of the part of the perturbation that is furthest from its identity; `group`, the index
    of the group of related faults, -1 without one."""
    n: int
    """All faults of the run."""
    n_listed: int
    parts: list[str]
    """The parts of a sum of perturbations."""
    details: list[tuple[str, str]] = field(default_factory=lambda: DETAILS)


@dataclass(frozen=True)
class AnswerMatrix:
    """How many faults turn which answer (row) into which (column); None stands for faults without a clean answer."""

    rows: list[int | str | None]
    columns: list[int | str | None]
    distinct: list[list[int]]
    faults: list[list[int]]


def read_rows(run: Reader, groups: Mapping[int, int], max_rows: int = MAX_ROWS) -> FaultRows:
    """The columns of the most telling faults, with rounded numbers. `groups` maps fault ids to groups."""
    from themis.runs.store.reader import PLACE, SCORE
    from themis.runs.store.schema import theta_column

    theta = [theta_column(name) for name in run.theta]
    names = [*_INTEGERS, *_REALS, "stream", "kind", "signature", "tensors", *theta]
    n = run.count()  # before the rows: a running campaign adds to them
    rows = run.select(", ".join(names), order=f"{PLACE}, {SCORE}, id", limit=max_rows)
    stored = dict(zip(names, map(list, zip(*rows, strict=True)), strict=False)) if rows else {n: [] for n in names}
    parts, owners = part_names(run)
    strength, furthest = np.zeros(0), np.zeros(0, dtype=np.int64)
    if rows:
        values = np.array([stored[name] for name in theta], dtype=np.float64).T
        strength, furthest = strengths(values, run.record["theta"])
    columns: dict[str, list[Any]] = {
        **{name: stored[name] for name in (*_INTEGERS, "kind")},
        **{name: [rounded(value) for value in stored[name]] for name in _REALS},
        "theta": [[rounded(value) for value in stored[name]] for name in theta],
        "uniform": [int(stream == "uniform") for stream in stored["stream"]],
        "layer": [_largest(signature) for signature in stored["signature"]],
        "kept": [int(tensors is not None) for tensors in stored["tensors"]],
        "strength": [rounded(value) for value in strength.tolist()],
        "part": [owners[k] for k in furthest.tolist()],
        "group": [groups.get(id, -1) for id in stored["id"]],
    }
    return FaultRows(columns, max(n, len(rows)), len(rows), parts)


def mean_signature(run: Reader, max_rows: int = MAX_ROWS) -> list[float]:
    """The share of the sensitivity in each layer, averaged over faults."""
    from themis.runs.store.schema import SHARES

    rows = run.select("signature", "1", (), "id", max_rows)
    if not rows:
        return []
    shares = np.array([json.loads(signature) for (signature,) in rows], dtype=np.float64)
    return [float(f"{share:.4g}") for share in (shares.mean(0) / SHARES).tolist()]


def answer_matrix(run: Reader) -> AnswerMatrix:
    """Distinct faults and faults by clean and wrong answer, over all faults of the run."""
    counts = run.select(
        "clean_answer, answer, count(DISTINCT seed_id), count(*)", "1 GROUP BY clean_answer, answer", order="1, 2"
    )
    rows = _frequent([(clean, n) for clean, _, n, _ in counts])
    columns = _frequent([(answer, n) for _, answer, n, _ in counts])
    distinct = [[0] * len(columns) for _ in rows]
    faults = [[0] * len(columns) for _ in rows]
    for clean, answer, n_distinct, n in counts:
        r = rows.index(clean) if clean in rows else rows.index(OTHER)
        c = columns.index(answer) if answer in columns else columns.index(OTHER)
        distinct[r][c] += n_distinct
        faults[r][c] += n
    return AnswerMatrix(rows, columns, distinct, faults)


def _frequent(pairs: Sequence[tuple[int | None, int]]) -> list[Any]:
    """The most frequent answers in ascending order, followed by `OTHER` if there are more."""
    totals: dict[int | None, int] = {}
    for answer, n in pairs:
        totals[answer] = totals.get(answer, 0) + n
    most = sorted(totals, key=lambda answer: -totals[answer])[:MAX_ANSWERS]
    ordered = sorted(most, key=lambda answer: -2 if answer is None else answer)
    return [*ordered, OTHER] if len(totals) > len(most) else [*ordered]


def _largest(signature: str) -> int:
    shares = json.loads(signature)
    return int(max(range(len(shares)), key=shares.__getitem__)) if shares else 0


def rounded(value: float | None) -> float | None:
    """The value with five digits; None if it is not finite, which JSON cannot hold."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.5g}")


SHRUNK_FILE = "shrunk.json"
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
    path = run.path / SHRUNK_FILE
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
