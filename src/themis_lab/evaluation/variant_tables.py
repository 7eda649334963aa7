"""Tables of variants: the paper's preset with one parameter changed at a time."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean, median

from themis.report.table import NONE, Table, format_number, format_spread
from themis.text import percent
from themis_lab.evaluation.summary import CELL, Evaluation, Record, average_campaigns, name_cell
from themis_lab.evaluation.variants import BASE, VARIANTS

JUDGES = {
    BASE: "preset",
    "sample-all": "no sampler",
    "judge-exact": "closed form",
    "exact-sample-all": "closed form, no sampler",
    "sample-50": "50 neurons",
    "pymc-sample-50": "50 neurons, PyMC",
}
"""Variants that differ in what judging costs, and what they are called there."""
PHASES = {"judge": "time to judge", "total": "time in all"}
"""The times that variants are compared by."""


def variant_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Every variant beside the preset in the same campaigns of the same cells."""
    variants = evaluation.content["variants"]
    preset = {(name_cell(record), record["campaign"]): record for record in variants if record["technique"] == BASE}
    rows: list[tuple[str, ...]] = []
    for name in VARIANTS:
        cells: dict[str, list[tuple[Record, Record]]] = {}
        for record in variants:
            cell, base = name_cell(record), preset.get((name_cell(record), record["campaign"]))
            if record["technique"] == name != BASE and base is not None:
                cells.setdefault(cell, []).append((record, base))
        if not cells:
            continue
        gains = [
            mean(100 * (record["first_coverage"] - base["first_coverage"]) for record, base in pairs)
            for pairs in cells.values()
        ]
        found = [
            [sum(one["distinct_faults"] for one in side) for side in zip(*own, strict=True)] for own in cells.values()
        ]
        pairs = [pair for own in cells.values() for pair in own]
        reached, of_preset = (
            sum(one["tests_to_coverage"] is not None for one in side) for side in zip(*pairs, strict=True)
        )
        costs = compare_seconds(variants, name, BASE)
        rows.append(
            (
                name,
                str(len(cells)),
                str(len(pairs)),
                format_spread(gains, median, 1, signed=True),
                f"{reached}, {of_preset}",
                format_spread([own / base for own, base in found if base], median),
                format_spread(costs.values(), median),
            )
        )
    notes = [
        "The preset with one change, beside the preset in the same campaigns, which have a random seed each: how many "
        "points its coverage after the first round is higher; in how many campaigns coverage reached 100%, which ends "
        "them, and in how many it did with the preset; distinct faults at the end, and seconds per test to judge on "
        "the same machine, relative to the preset. Medians over cells, with the lowest and the highest; a cell is the "
        "mean over its campaigns, or for times the median. The preset samples 1,000 neurons, or all if there are "
        "fewer; sample-all has no sampler."
    ]
    if rows:
        columns = ("variant", "cells", "campaigns", "first round", "reached 100%", "faults", "time to judge")
        yield Table("The preset's parameters", columns, rows, notes)


def compare_seconds(variants: list[Record], one: str, other: str, phase: str = "judge") -> dict[str, float]:
    """The seconds per test that a phase of one variant takes, relative to another, by cell.

    Medians over the campaigns that both had on the same machine.
    """
    seconds: dict[tuple[str, int, str], dict[str, float]] = {}
    for record in with_machine(variants):
        campaign = seconds.setdefault((name_cell(record), record["campaign"], record["machine"]), {})
        campaign[record["technique"]] = record[f"seconds_{phase}"] / record["tests"]
    ratios: dict[str, list[float]] = {}
    for (cell, *_), campaign in seconds.items():
        if one in campaign and campaign.get(other):
            ratios.setdefault(cell, []).append(campaign[one] / campaign[other])
    return {cell: median(own) for cell, own in ratios.items()}


def with_machine(variants: list[Record]) -> list[Record]:
    """Campaigns that can be compared by their time: not those at low priority."""
    return [record for record in variants if record.get("machine")]


def judging_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Time to judge with and without the sampler, by the closed form and by PyMC."""
    cells: dict[str, dict[str, dict[str, list[float]]]] = {}
    neurons: dict[str, int] = {}
    for record in with_machine(evaluation.content["variants"]):
        judges = cells.setdefault(name_cell(record), {}).setdefault(record["machine"], {})
        if record["technique"] in JUDGES:
            judges.setdefault(record["technique"], []).append(1000 * record["seconds_judge"] / record["tests"])
        if record["technique"] == BASE:
            neurons[name_cell(record)] = record["neurons"]
    rows = []
    for cell, machines in cells.items():
        times = max(machines.values(), key=lambda judges: (BASE in judges, len(judges)))
        if BASE in times and len(times) > 1:
            texts = [format_number(median(times[name]), 2) if name in times else NONE for name in JUDGES]
            rows.append((cell, f"{neurons[cell]:,}", *texts))
    notes = [
        "Milliseconds per test, medians over campaigns on the machine on which most columns were measured beside the "
        f"preset; {NONE}: not measured there. The preset samples 1,000 neurons, or all if there are fewer, and judges "
        "them by Markov chains; the closed form is the default of Themis. Machines differ between cells."
    ]
    if rows:
        yield Table("Time to judge, with and without the sampler", ("cell", "neurons", *JUDGES.values()), rows, notes)


def variant_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Every variant, cell by cell."""
    variants = evaluation.content["variants"]
    by_cell: dict[str, list[Record]] = {}
    for record in average_campaigns(variants, (*CELL, "technique")):
        by_cell.setdefault(name_cell(record), []).append(record)
    ratios = {(name, phase): compare_seconds(variants, name, BASE, phase) for name in VARIANTS for phase in PHASES}
    for cell, records in by_cell.items():
        records.sort(key=lambda record: (record["technique"] != BASE, record["technique"]))
        columns = (
            "variant",
            "campaigns",
            "first round",
            "of all",
            "tests to 100%",
            "at the end",
            "faults",
            *PHASES.values(),
        )
        rows: list[tuple[str, ...]] = [
            (
                record["technique"],
                str(record["campaigns"]),
                percent(record["first_coverage"]),
                percent(record["first_coverage_all"]),
                NONE if record["tests_to_coverage"] is None else f"{record['tests_to_coverage']:,}",
                percent(record["coverage"]),
                f"{record['distinct_faults']:,}",
                *(format_spread([ratios[record["technique"], phase].get(cell)], median) for phase in PHASES),
            )
            for record in records
        ]
        notes = [
            f"{records[0]['neurons']:,} neurons. Means over campaigns, which have a random seed each. First round: "
            f"coverage of the sampled neurons, and of all neurons, after {records[0]['first_tests']:,} tests. Tests to "
            "100%: over the campaigns that reached it, if at least half of them did. Times: seconds per test relative "
            f"to the preset, medians over campaigns on the same machine. {BASE} is the preset, with 1,000 sampled "
            "neurons; sample-all has no sampler."
        ]
        yield Table(f"The preset's parameters, {cell}", columns, rows, notes)
