"""The table of what retraining regains."""

from __future__ import annotations

from collections.abc import Iterable

from themis.report.table import NONE, Table, format_estimate, format_number
from themis.text import percent
from themis_lab.evaluation.claims import CHOOSERS
from themis_lab.evaluation.summary import Evaluation, Record, name_cell


def retraining_tables(evaluation: Evaluation) -> Iterable[Table]:
    """The disturbed score that training on the inputs of each technique regains."""
    records = [record for record in evaluation.content["retraining"] if record["standings"]]
    if not records:
        return
    by_cell = [{standing["technique"]: standing for standing in record["standings"]} for record in records]
    names = sorted(dict.fromkeys(name for own in by_cell for name in own), key=lambda name: (name != "themis", name))
    rows: list[tuple[str, ...]] = []
    for record, own in zip(records, by_cell, strict=True):
        before = record["before"]
        gains = [_gain(own.get(name, {}), "disturbed") for name in names]
        scores = f"{percent(before['clean'])} / {percent(before['disturbed'])}"
        rows.append((name_cell(record), f"{record['inputs']:,}", scores, *gains))
        rows.append(("clean score", "", "", *(_gain(own.get(name, {}), "clean") for name in names)))
    columns = ("cell", "inputs", "before, clean / disturbed", *(CHOOSERS.get(name, name) for name in names))
    notes = [
        "Gain of the disturbed score on judge seeds that were neither searched nor trained on, in points, with 95% "
        "intervals; below it the change of the clean score, which the recipe keeps. Every technique of a cell searched "
        "for the same passes and trained on as many inputs, or on fewer if it ran fewer tests. The paper: 0.21 to "
        "11.56 points for Themis."
    ]
    yield Table("Accuracy regained by retraining", columns, rows, notes)


def _gain(standing: Record, column: str) -> str:
    """The change of a score in points, with its interval."""
    shift = standing.get("shifts", {}).get(column)
    if shift is None:
        return NONE
    interval, value = shift["combined"], 100 * (shift["after"] - shift["before"])
    if interval is None:
        return format_number(value, 2, signed=True)
    return format_estimate([value, 100 * interval["low"], 100 * interval["high"]], 2, signed=True)
