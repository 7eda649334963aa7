"""Tables of the theory: what coverage of 100% had found, and how stable and how normal sensitivities are."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from themis.report.table import NONE, Table, format_number, format_value
from themis.text import percent
from themis_lab.evaluation.summary import Evaluation, Record, name_cell, name_pair
from themis_lab.evaluation.theory import WAYS_TO_STOP, count_reached, list_shares

STOPS = (
    "Little is left to find if an estimated 90% of the distinct faults within reach were found, and the residual risk "
    "is at most 1%; the default rule stops then, if coverage is 100% as well. In a cell with several campaigns, shares "
    "are means over those that reached it, which at least half of them must."
)
"""What the ways to stop mean."""


def theory_tables(evaluation: Evaluation) -> Iterable[Table]:
    """What had been found when a campaign could stop, over all cells."""
    theory = evaluation.content["theory"]
    rows = [
        (title, f"{count_reached(theory, way)} of {len(theory)}", *(percent(of(shares)) for of in (median, min, max)))
        for way, title in WAYS_TO_STOP.items()
        if (shares := list_shares(theory, way))
    ]
    notes = [f"Shares of the distinct faults of a longer reference run that had been found by then. {STOPS}"]
    if rows:
        columns = ("way to stop", "cells that reached it", "median share", "lowest", "highest")
        yield Table("Faults found when a campaign could stop", columns, rows, notes)


def theory_cells(evaluation: Evaluation) -> Iterable[Table]:
    """What coverage of 100% means for the faults, how stable means are, and how normal sensitivities are, by cell."""
    theory = evaluation.content["theory"]
    if theory:
        yield _claim_table(theory)
        yield _stability_table(theory)
    sensitive = [
        pair
        for pair in evaluation.content["pairs"]
        if pair["sensitivity"] is not None and pair["sensitivity"]["degenerate"] is None
    ]
    if sensitive:
        yield _sensitivity_table(sensitive)


def _claim_table(theory: list[Record]) -> Table:
    rows = []
    for record in theory:
        reference = record["reference"]
        texts = [name_cell(record), str(record["campaigns"]), f"{reference['distinct_faults']:,}"]
        for way in WAYS_TO_STOP:
            found = record.get(way)
            if found is None:
                texts.append("not reached" if way in record else NONE)
            else:
                parts = [_share(found[of]) for of in ("of_faults", "of_seeds", "of_groups")]
                texts.append(f"{found['tests']:,}: {' / '.join(parts)}")
        rows.append(tuple(texts))
    notes = [
        "Tests until then, and the shares of a reference run's distinct faults / failing seeds / groups of faults that "
        f"had been found by then. The reference is a longer campaign of scheduled with other random numbers. {STOPS}"
    ]
    columns = ("cell", "campaigns", "faults of the reference", *WAYS_TO_STOP.values())
    return Table("Share of the faults found when a campaign could stop", columns, rows, notes)


def _share(value: float | None) -> str:
    return NONE if value is None else format_number(value, 2)


def _stability_table(theory: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for record in theory:
        stability, normality = record["stability"], record["normality"] or {}
        rows.append(
            (
                name_cell(record),
                f"{stability['sets']} x {stability['tests']:,}",
                _percent(stability["model_deviation"]),
                _percent(stability["median_deviation"]),
                _percent(stability["within_10_percent"]),
                _share(normality.get("skewness_absolute")),
                _share(normality.get("kurtosis_absolute")),
                _percent(normality.get("compatible_absolute")),
                _percent(normality.get("compatible_signed")),
            )
        )
    columns = (
        "cell",
        "sets x tests",
        "model",
        "median neuron",
        "neurons within 10%",
        "skewness",
        "kurtosis",
        "normal",
        "signed, normal",
    )
    notes = [
        "Deviation of inferred means between disjoint sets of seeds, the largest over sets: of the model's mean over "
        "neurons, and of single neurons. Skewness and excess kurtosis of the sensitivities, medians over neurons; "
        "normal: share of neurons compatible with a normal distribution, for sensitivities and for signed differences. "
        "The paper: means deviate by less than 10%, and differences are often normal."
    ]
    return Table("Stability of the inferred means, and normality", columns, rows, notes)


def _percent(value: float | None) -> str:
    return NONE if value is None else percent(value)


def _sensitivity_table(pairs: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for pair in pairs:
        found = pair["sensitivity"]
        rates = found["error_rates"]
        value = format_value([found["r"]])
        rows.append((name_pair(pair), f"{percent(min(rates), 0)}..{percent(max(rates), 0)}", value))
    notes = [
        "Pearson's r over all magnitudes of the error rate over the whole range and the mean sensitivity of all "
        "neurons under random. Degenerate cells are left out."
    ]
    return Table("Sensitivity and error rate", ("cell", "error rates", "r"), rows, notes)
