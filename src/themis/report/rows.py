"""The faults of a run as columns that a page can filter, sort and show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.report.names import part_names
from themis.runs.estimates import strengths

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

MOST_ROWS = 20_000
"""Faults that a page lists, the most telling first."""
MOST_ANSWERS = 24
"""Rows and columns of the matrix; what is rarer is put together."""
_PLAIN = ("id", "seed_id", "round", "label", "clean_answer", "answer")
_REAL = ("clean_value", "value", "confidence", "margin", "distance", "linf", "ssim")


def read_rows(run: Reader, most: int = MOST_ROWS) -> dict[str, Any]:
    """Columns of the most telling faults; numbers with as many digits as a person reads."""
    from themis.runs.store.schema import theta_column
    from themis.runs.store.selection import PLACE, SCORE

    theta = [theta_column(name) for name in run.theta]
    names = [*_PLAIN, *_REAL, "stream", "kind", "signature", "tensors", *theta]
    found = run.select(", ".join(names), order=f"{PLACE}, {SCORE}, id", limit=most)
    by_name = dict(zip(names, map(list, zip(*found, strict=True)), strict=False)) if found else {n: [] for n in names}
    columns: dict[str, Any] = {name: by_name[name] for name in _PLAIN}
    columns |= {name: [short(each) for each in by_name[name]] for name in _REAL}
    columns["theta"] = [[short(each) for each in by_name[name]] for name in theta]
    columns["uniform"] = [int(each == "uniform") for each in by_name["stream"]]
    columns["kind"] = by_name["kind"]
    columns["layer"] = [_largest(each) for each in by_name["signature"]]
    columns["kept"] = [int(each is not None) for each in by_name["tensors"]]
    parts, owner = part_names(run)
    if found:
        values = np.array([by_name[name] for name in theta], dtype=np.float64).T
        strength, furthest = strengths(values, run.record["theta"])
        columns["strength"] = [short(each) for each in strength.tolist()]
        columns["part"] = [owner[k] for k in furthest.tolist()]
    else:
        columns["strength"], columns["part"] = [], []
    return {"columns": columns, "n_listed": len(found), "parts": parts}


def mean_signature(run: Reader, most: int = MOST_ROWS) -> list[float]:
    """The mean share of sensitivity by layer, over faults."""
    rows = run.select("signature", "1", (), "id", most)
    if not rows:
        return []
    shares = np.array([json.loads(each) for (each,) in rows], dtype=np.float64)
    return [float(f"{each:.4g}") for each in (shares.mean(0) / 10_000).tolist()]


def answer_matrix(run: Reader) -> dict[str, Any]:
    """Which answers turn into which: distinct faults, over all of the run's; the most frequent answers by name."""
    found = run.select(
        "clean_answer, answer, count(DISTINCT seed_id), count(*)", "1 GROUP BY clean_answer, answer", order="1, 2"
    )
    rows = _frequent([(clean, n) for clean, _, n, _ in found])
    columns = _frequent([(answer, n) for _, answer, n, _ in found])
    counts = [[0] * len(columns) for _ in rows]
    raw = [[0] * len(columns) for _ in rows]
    for clean, answer, distinct, n in found:
        r = rows.index(clean) if clean in rows else rows.index("other")
        c = columns.index(answer) if answer in columns else columns.index("other")
        counts[r][c] += distinct
        raw[r][c] += n
    return {"rows": rows, "columns": columns, "distinct": counts, "faults": raw}


def _frequent(pairs: Sequence[tuple[int | None, int]]) -> list[Any]:
    totals: dict[int | None, int] = {}
    for answer, n in pairs:
        totals[answer] = totals.get(answer, 0) + n
    most = sorted(totals, key=lambda each: -totals[each])[:MOST_ANSWERS]
    known = sorted(most, key=lambda each: -2 if each is None else each)
    return [*known, "other"] if len(totals) > len(most) else [*known]


def _largest(signature: str) -> int:
    shares = json.loads(signature)
    return int(max(range(len(shares)), key=shares.__getitem__)) if shares else 0


def short(value: float | None) -> float | None:
    """Five digits; None for what JSON cannot hold."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.5g}")
