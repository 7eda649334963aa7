"""Tables of variants: the paper's preset with one parameter changed at a time."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from themis.experiments.evaluation.summary import Evaluation, Record, name_cell
from themis.experiments.evaluation.variants import BASE, VARIANTS
from themis.experiments.table import NONE, Table, format_number, format_spread
from themis.runs.run import percent

JUDGES = {
    BASE: "preset",
    "sample-all": "no sampler",
    "judge-exact": "closed form",
    "exact-sample-all": "closed form, no sampler",
    "sample-50": "50 neurons",
    "pymc-sample-50": "50 neurons, PyMC",
}
"""Variants that differ in what judging costs, and what they are called there."""


def variant_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Every variant beside the preset in the same cells."""
    variants = evaluation.content["variants"]
    preset = {name_cell(record): record for record in variants if record["technique"] == BASE}
    rows: list[tuple[str, ...]] = []
    for name in VARIANTS:
        own = [record for record in variants if record["technique"] == name and name_cell(record) in preset]
        if not own or name == BASE:
            continue
        bases = [preset[name_cell(record)] for record in own]
        pairs = list(zip(own, bases, strict=True))
        gains = [100 * (record["first_coverage"] - base["first_coverage"]) for record, base in pairs]
        faults = [
            record["distinct_faults"] / base["distinct_faults"] for record, base in pairs if base["distinct_faults"]
        ]
        reached, of_preset = (sum(one["tests_to_coverage"] is not None for one in side) for side in (own, bases))
        costs = compare_judging(variants, name, BASE)
        rows.append(
            (
                name,
                str(len(own)),
                format_spread(gains, median, 1, signed=True),
                f"{reached}, {of_preset}",
                format_spread(faults, median),
                format_spread(costs, median),
            )
        )
    notes = [
        "The preset with one change, beside the preset in the same cells: how many points its coverage after the first "
        "round is higher; in how many cells coverage reached 100%, which ends a campaign, and in how many it did with "
        "the preset; distinct faults at the end, and seconds per test to judge on the same machine, relative to the "
        "preset. Medians over cells, with the lowest and the highest. The preset samples 1,000 neurons, or all if "
        "there are fewer; sample-all has no sampler."
    ]
    if rows:
        columns = ("variant", "cells", "first round", "reached 100%", "faults", "time to judge")
        yield Table("The preset's parameters", columns, rows, notes)


def compare_judging(variants: list[Record], one: str, other: str) -> list[float]:
    """The seconds per test that one variant takes to judge, relative to another on the same machine, by cell."""
    seconds: dict[tuple[str, str | None], dict[str, float]] = {}
    for record in variants:
        cell = seconds.setdefault((name_cell(record), record.get("machine")), {})
        cell[record["technique"]] = record["seconds_judge"] / record["tests"]
    return [cell[one] / cell[other] for cell in seconds.values() if {one, other} <= set(cell)]


def judging_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Time to judge with and without the sampler, by the closed form and by PyMC."""
    by_cell: dict[str, dict[str, Record]] = {}
    for record in evaluation.content["variants"]:
        by_cell.setdefault(name_cell(record), {})[record["technique"]] = record
    rows = []
    for cell, records in by_cell.items():
        machine = records[BASE].get("machine") if BASE in records else None
        own = {name: record for name, record in records.items() if record.get("machine") == machine}
        if len(own.keys() & set(JUDGES)) > 1:
            times = (1000 * own[name]["seconds_judge"] / own[name]["tests"] if name in own else None for name in JUDGES)
            texts = [NONE if time is None else format_number(time, 2) for time in times]
            rows.append((cell, f"{own[BASE]['neurons']:,}", *texts))
    notes = [
        "Milliseconds per test, on the machine on which the preset was measured; -: not measured there. The preset "
        "samples 1,000 neurons, or all if there are fewer, and judges them by Markov chains; the closed form is the "
        "default of Themis."
    ]
    if rows:
        yield Table("Time to judge, with and without the sampler", ("cell", "neurons", *JUDGES.values()), rows, notes)


def variant_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Every variant, cell by cell."""
    by_cell: dict[str, list[Record]] = {}
    for record in evaluation.content["variants"]:
        by_cell.setdefault(name_cell(record), []).append(record)
    for cell, records in by_cell.items():
        columns = ("variant", "first round", "of all", "tests to 100%", "at the end", "faults", "judge s", "total s")
        rows: list[tuple[str, ...]] = [
            (
                record["technique"],
                percent(record["first_coverage"]),
                percent(record["first_coverage_all"]),
                NONE if record["tests_to_coverage"] is None else f"{record['tests_to_coverage']:,}",
                percent(record["coverage"]),
                f"{record['distinct_faults']:,}",
                format_number(record["seconds_judge"], 2),
                format_number(record["seconds_total"], 2),
            )
            for record in sorted(records, key=lambda record: (record["technique"] != BASE, record["technique"]))
        ]
        notes = [
            f"{records[0]['neurons']:,} neurons. First round: coverage of the sampled neurons, and of all neurons, "
            f"after {records[0]['first_tests']:,} tests. {BASE} is the preset, with 1,000 sampled neurons; sample-all "
            "has no sampler."
        ]
        yield Table(f"The preset's parameters, {cell}", columns, rows, notes)
