"""What a report shows of the inputs that a run has kept: pictures, or which features changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from themis.runs.display.png import data_uri, is_picture, to_pixels

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader
    from themis.runs.store.tensors import Tensors

MOST_BYTES = 4 << 20
"""Of all pictures together; those of the most telling faults come first."""
MOST_CHANGES = 24
"""Features that are listed of a fault, those that changed most."""
STEP = 250
"""Faults whose inputs are read at once."""


def read_inputs(
    run: Reader, ids: Sequence[int], seeds: Sequence[int], most: int, names: Sequence[str] | None
) -> dict[str, Any]:
    """Pictures of the first `most` of these faults, by fault and by seed; or the features that changed, by fault."""
    shown: dict[str, Any] = {"kind": "none", "clean": {}, "disturbed": {}, "changes": {}, "shape": None}
    size = 0
    for first in range(0, min(len(ids), most), STEP):
        part = slice(first, min(first + STEP, most))
        kept = run.tensors(ids[part])
        for id, seed in zip(ids[part], seeds[part], strict=True):
            if id not in kept:
                continue
            shown["shape"] = list(kept[id].inputs.shape[1:])
            if not is_picture(tuple(shown["shape"])):
                shown["kind"] = "features"
                shown["changes"][str(id)] = _changes(kept[id], names, run.record.get("feature_axes") or {})
                continue
            shown["kind"] = "pictures"
            size += _draw(run, id, seed, kept[id], shown)
            if size > MOST_BYTES:
                return shown
    return shown


def _draw(run: Reader, id: int, seed: int, kept: Tensors, shown: dict[str, Any]) -> int:
    """Add a fault's pictures; how much text they are. A seed's own picture is there once."""
    bounds = tuple(run.record["start"]["bounds"])
    added = shown["disturbed"][str(id)] = data_uri(to_pixels(kept.inputs, bounds)[0])
    if str(seed) in shown["clean"]:
        return len(added)
    clean = shown["clean"][str(seed)] = data_uri(to_pixels(kept.clean_inputs, bounds)[0])
    return len(added) + len(clean)


def _changes(kept: Tensors, names: Sequence[str] | None, axes: dict[str, list[float]]) -> dict[str, Any]:
    """How many values changed, and those that changed most: name, before, after; raw values, where axes are known."""
    before, after = kept.clean_inputs[0].flatten().double(), kept.inputs[0].flatten().double()
    gap = (after - before).abs().nan_to_num(float("inf"))
    n = int((gap > 0).sum())
    at = gap.argsort(descending=True, stable=True)[: min(n, MOST_CHANGES)].tolist()
    known = names if names is not None and len(names) == len(before) else None
    if axes:
        low, reach = (before.new_tensor(axes[name]) for name in ("low", "reach"))
        before, after = (low + (each * reach).expm1() for each in (before, after))
    rows = [[known[k] if known else f"feature {k}", _number(before[k]), _number(after[k])] for k in at]
    return {"n": n, "of": len(before), "rows": rows}


def _number(value: Any) -> float | str:
    number = float(value)
    return float(f"{number:.6g}") if abs(number) < float("inf") else str(number)
