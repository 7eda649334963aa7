"""The tables of an evaluation: faults, and the method: the theory, its parameters, and what retraining regains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import mean, median

import numpy as np
from scipy.stats import binom

from themis.report.table import NO_VALUE, Table, format_count, format_number
from themis.text import counted, percent
from themis_lab.comparison.plan import PAPER
from themis_lab.comparison.statistics import MIN_SPAN, format_estimate, format_spread
from themis_lab.comparison.summary import GRID_TITLES
from themis_lab.evaluation.cells import CHOOSERS
from themis_lab.evaluation.plan import UNVARIED, VARIANTS
from themis_lab.evaluation.plans import PAPER_FAULTS, PAPER_R, PAPER_TIME
from themis_lab.evaluation.summary import (
    OURS,
    STRONG_R,
    Evaluation,
    Record,
    name_cell,
    name_pair,
    themis_first,
    with_times,
)
from themis_lab.evaluation.theory import WAYS_TO_STOP, count_reached, list_shares

DEGENERATE = "degenerate"
BUDGET_TITLES = {"passes": "equal passes", "tests": "equal tests"}
DEFINITIONS = {"r": ("degenerate", "at full strength"), "r_box": ("box_degenerate", "over the whole range")}
"""The key of an r, the key that says why it is not scored, and which error rate it is with."""


def capability_tables(evaluation: Evaluation) -> Iterable[Table]:
    """The correlations of faults with the error rate at equal passes, counted over all cells."""
    for name, budget, cells in _grids(evaluation):
        if budget == "passes":
            yield _count_table(cells, name, budget)


def capability_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Error rates and correlations cell by cell."""
    for name in GRID_TITLES:
        if any(grid["name"] == name for pair in evaluation.content["pairs"] for grid in pair["grids"]):
            yield _rate_table(evaluation.content["pairs"], name)
    for name, budget, cells in _grids(evaluation):
        if budget != "passes":
            yield _count_table(cells, name, budget)
        for key in DEFINITIONS:
            if scored := [(pair, grid) for pair, grid in cells if grid[DEFINITIONS[key][0]] is None]:
                yield _r_table(scored, name, budget, key)


def _rate_table(pairs: list[Record], name: str) -> Table:
    cells = [(pair, grid) for pair in pairs for grid in pair["grids"] if grid["name"] == name]
    rows: list[tuple[str, ...]] = [
        (
            name_pair(pair),
            *(
                ", ".join(percent(rate, 0) for rate in grid[rates]) + ("" if grid[why] is None else f" ({DEGENERATE})")
                for rates, why in (("rates", "degenerate"), ("box_rates", "box_degenerate"))
            ),
        )
        for pair, grid in cells
    ]
    n_full, n_box = (sum(grid[why] is not None for _, grid in cells) for why, _ in DEFINITIONS.values())
    refused: dict[str, list[str]] = {}
    for pair in pairs:
        if pair["grid_refused"] and name == "grid":
            refused.setdefault(pair["grid_refused"], []).append(name_pair(pair))
    notes = [
        f"Error rates by magnitude. Degenerate are {n_full} of {counted(len(cells), 'cell')} at full strength and "
        f"{n_box} over the whole range: they span less than {MIN_SPAN:.2f}, or depend on one magnitude.",
        *(f"No grid for {', '.join(names)}: {reason}." for reason, names in refused.items()),
    ]
    columns = ("cell", "at full strength", "over the whole range")
    return Table(f"Error rates, {GRID_TITLES[name]}", columns, rows, notes)


def _grids(evaluation: Evaluation) -> Iterable[tuple[str, str, list[tuple[Record, Record]]]]:
    """The grids and budgets that have results, with the pairs that have them."""
    for name in GRID_TITLES:
        for budget in BUDGET_TITLES:
            cells = [
                (pair, grid)
                for pair in evaluation.content["pairs"]
                for grid in pair["budgets"].get(budget, [])
                if grid["name"] == name
            ]
            if cells:
                yield name, budget, cells


def _techniques(cells: list[tuple[Record, Record]]) -> list[str]:
    return themis_first({row["technique"] for _, grid in cells for row in grid["rows"]})


def _row(grid: Record, technique: str) -> Record:
    return next((row for row in grid["rows"] if row["technique"] == technique), {"r": {}, "r_box": {}, "total": {}})


def _count_table(cells: list[tuple[Record, Record]], name: str, budget: str) -> Table:
    """How often each technique has a strong correlation, by both definitions, for distinct and for raw faults."""
    rows = []
    for technique in _techniques(cells):
        texts = [technique]
        for count in ("distinct", "faults"):
            for key in DEFINITIONS:
                values = [(_row(grid, technique)[key].get(count) or [None])[0] for _, grid in cells]
                defined = [value for value in values if value is not None]
                strong = sum(value >= STRONG_R for value in defined)
                median = format_number(float(np.median(defined)), 2) if defined else NO_VALUE
                texts.append(f"{strong} of {len(defined)}, {median}" if defined else NO_VALUE)
        leads = sum(_row(grid, technique).get("r_lead", {}).get("over_rival") == "ahead" for _, grid in cells)
        rows.append((*texts, str(leads)))
    degenerate = [sum(grid[why] is not None for _, grid in cells) for why, _ in DEFINITIONS.values()]
    columns = ("technique", "full strength", "whole range", "raw, full strength", "raw, whole range", "ahead")
    notes = [
        f"Cells with r of at least {STRONG_R} among those that have one, and the median r; distinct faults, then all "
        "faults. Ahead: cells in which it is ahead of all others under both definitions. Degenerate, and not scored: "
        f"{degenerate[0]} of {counted(len(cells), 'cell')} by the error rate at full strength, {degenerate[1]} by that "
        f"over the whole range; their error rates span less than {MIN_SPAN:.2f}, or depend on one magnitude."
    ]
    return Table(f"Strong correlations, {GRID_TITLES[name]}, {BUDGET_TITLES[budget]}", columns, rows, notes)


def _r_table(cells: list[tuple[Record, Record]], name: str, budget: str, key: str) -> Table:
    techniques, rows = _techniques(cells), []
    for pair, grid in cells:
        spans = grid["rates"] if key == "r" else grid["box_rates"]
        published = PAPER_R.get(pair["model"], {}).get(pair["perturbation"])
        spread = f"{percent(min(spans), 0)}..{percent(max(spans), 0)}"
        values = [format_estimate(_row(grid, technique)[key].get("distinct"), 2) for technique in techniques]
        rows.append((name_pair(pair), spread, NO_VALUE if published is None else f"{published:.2f}", *values))
    title = f"r with the error rate {DEFINITIONS[key][1]}, {GRID_TITLES[name]}, {BUDGET_TITLES[budget]}"
    notes = [
        "Distinct faults, with 95% intervals; paper: its value for Themis. Degenerate cells are left out. "
        f"{NO_VALUE}: undefined, see themis compare."
    ]
    return Table(title, ("cell", "error rates", "paper", *techniques), rows, notes)


def fault_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Distinct faults at equal budgets, cell by cell."""
    for name, budget, cells in _grids(evaluation):
        techniques = _techniques(cells)
        rows = [
            (
                name_pair(pair),
                *(_found(_row(grid, technique)) for technique in techniques),
                *(_ratio(grid, technique, "over_best") for technique in OURS),
            )
            for pair, grid in cells
        ]
        columns = ("cell", *techniques, *(f"{technique} / best" for technique in OURS))
        budgets = sorted({pair["limits"][budget] for pair, _ in cells})
        notes = [
            f"Sums over magnitudes of distinct faults after {_any_of([f'{limit:,}' for limit in budgets])} {budget}: "
            "means over campaigns, with the lowest and the highest where they differ. Best: the best technique other "
            f"than {_any_of(OURS)}."
        ]
        yield Table(f"Distinct faults, {GRID_TITLES[name]}, {BUDGET_TITLES[budget]}", columns, rows, notes)


def _any_of(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _found(row: Record) -> str:
    """The mean over campaigns, with the lowest and the highest if they differ."""
    if not row["total"]:
        return NO_VALUE
    mean, low, high = row["total"]["distinct_faults"]
    return format_count(mean) + (f" ({format_count(low)}..{format_count(high)})" if low < high else "")


def _ratio(found: Record, technique: str, over: str) -> str:
    return format_estimate([found["ratios"].get(technique, {}).get(over), None, None], 2)


def done_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Every technique when it was done."""
    done = evaluation.content["done"]
    names, whole = _comparable(done)
    if not whole:
        return
    rows: list[tuple[str, ...]] = []
    for name in names:
        own = [pair["techniques"][name] for pair in whole]
        stops = Counter(reason for row in own for reason, count in row["stops"].items() for _ in range(count))
        texts = [f"{count} {STOP_TITLES.get(reason, reason)}" for reason, count in sorted(stops.items())]
        counts = [format_count(_mean(own, count)) for count in ("tests", "distinct_faults", "faults")]
        rows.append((name, *counts, percent(_mean(own, "scc")), ", ".join(texts)))
    columns = ("technique", "tests", "distinct faults", "raw", "coverage", "how campaigns ended")
    notes = [
        f"Means over {counted(len(whole), 'cell')} with all of these techniques. Coverage is that of Themis, the share "
        "of all neurons that have converged; a criterion ends a campaign by its own. The paper: 21,399 tests for "
        "Themis, 3,774 for NC, 18,501 for KMNC, 20,052 for IDC and 26,757 for LSA, and "
        f"{PAPER_FAULTS} times the faults of the four."
    ]
    yield Table("Faults when each technique was done", columns, rows, notes)


def done_cells(evaluation: Evaluation) -> Iterable[Table]:
    """Every technique when it was done, cell by cell."""
    done = evaluation.content["done"]
    names = themis_first({name for pair in done for name in pair["techniques"]})
    rows = [
        (
            f"{name_pair(pair)} {', '.join(f'{magnitude:.3g}' for magnitude in pair['magnitudes'])}",
            *(_count_done(pair["techniques"].get(name)) for name in names),
            *(_ratio(pair, name, "over_four") for name in OURS),
        )
        for pair in done
    ]
    notes = [
        "Distinct faults and tests when each technique was done, means over campaigns, and faults relative to the mean "
        "of the four baselines; +: no campaign was done by then."
    ]
    columns = ("cell", *names, *(f"{name} / four" for name in OURS))
    if rows:
        yield Table("Faults and tests when each technique was done", columns, rows, notes)


def _count_done(row: Record | None) -> str:
    """A text such as 247 in 5,348, or 181 in 8,000+ if no campaign was done."""
    if row is None:
        return NO_VALUE
    mark = "+" if set(row["stops"]) == {"tests"} else ""
    return f"{format_count(row['distinct_faults'])} in {format_count(row['tests'])}{mark}"


def _comparable(done: list[Record]) -> tuple[list[str], list[Record]]:
    """The techniques in more than half of the cells, Themis first, and the cells with all of these."""
    counts = Counter(name for pair in done for name in pair["techniques"])
    names = [name for name in counts if 2 * counts[name] > len(done)]
    return themis_first(names), [pair for pair in done if set(names) <= set(pair["techniques"])]


STOP_TITLES = {"coverage": "by coverage", "plateau": "on a plateau", "tests": "not done", "found": "by what was found"}
"""How campaigns end, in words."""


def _mean(records: list[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


def time_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Seconds by phase, of every technique when it was done."""
    names, whole = _comparable(with_times(evaluation.content["done"]))
    if whole:
        rows = []
        for name in names:
            own = [pair["techniques"][name] for pair in whole]
            phases = ("seconds_measure", "seconds_judge", "seconds_search", "seconds_total", "fit_seconds")
            seconds = [*(_mean(own, phase) for phase in phases), 1000 * _mean(own, "seconds_per_test")]
            rows.append((name, *(format_number(value, 2) for value in seconds)))
        notes = [
            f"Means over {counted(len(whole), 'cell')}, in seconds, until each technique was done, in campaigns that "
            "all techniques had on one machine; fit: fitting the criterion, which is done before. The paper: "
            f"{PAPER_TIME - 1:.0%} more time than the baselines."
        ]
        columns = ("technique", "measure", "judge", "search", "total", "fit", "ms per test")
        yield Table("Time until done", columns, rows, notes)


WHEN_DONE, AT_EQUAL_PASSES, AT_EQUAL_TESTS = "when done", "at equal passes", "at equal tests"
"""When faults are compared."""
RIVALS = {"over_best": "best rival", "over_four": "mean of the four baselines", "over_random": "random"}
"""What faults are compared with, by the key of the ratio."""
MIN_CELLS = 6
"""The cells that a 95% interval of a median needs."""


def fault_ratios(content: Record) -> dict[str, list[Record]]:
    """The ratios of faults of every cell when done and at equal budgets."""
    ratios = {WHEN_DONE: [pair["ratios"] for pair in content["done"]]}
    for budget, when in (("passes", AT_EQUAL_PASSES), ("tests", AT_EQUAL_TESTS)):
        found = [choose_grid(pair["budgets"].get(budget, [])) for pair in content["pairs"]]
        ratios[when] = [grid["ratios"] for grid in found if grid]
    return ratios


def choose_grid(grids: list[Record]) -> Record | None:
    """The results of a cell at magnitudes chosen in advance, or else at the paper's; None without results.

    Where the error rate hardly changes with the paper's magnitudes, they say little: under CW, every test is a fault.
    """
    telling = [grid for grid in grids if grid["name"] != PAPER or grid["degenerate"] is None]
    return min(telling, key=lambda grid: grid["name"] == PAPER, default=None)


def list_ratios(ratios: list[Record], technique: str, over: str) -> list[float]:
    """The ratios of a technique in all cells in which its rivals found something."""
    found = [own[technique][over] for own in ratios if technique in own]
    return [ratio for ratio in found if ratio is not None]


def ratio_tables(evaluation: Evaluation) -> Iterable[Table]:
    """How the faults of Themis compare with those of its rivals, over cells."""
    rows = []
    for technique in OURS:
        for when, ratios in fault_ratios(evaluation.content).items():
            found = [list_ratios(ratios, technique, over) for over in RIVALS]
            if any(found):
                rows.append((technique, when, *map(describe_ratios, found)))
    notes = [
        "Medians over cells, with 95% intervals, and the number of cells: those in which the rivals found faults. At "
        "equal budgets, faults are summed over magnitudes chosen in advance, or else over the paper's, unless these "
        f"are degenerate. Best rival: the best technique other than {' and '.join(OURS)}, where all have run."
    ]
    if rows:
        yield Table("Distinct faults relative to those of rivals", ("technique", "when", *RIVALS.values()), rows, notes)


def describe_ratios(ratios: list[float]) -> str:
    """The median with its 95% interval, if it has one, and the number of cells."""
    if not ratios:
        return NO_VALUE
    low, high = median_interval(ratios) or (None, None)
    return f"{format_estimate([median(ratios), low, high], 2)} in {counted(len(ratios), 'cell')}"


def median_interval(values: list[float]) -> tuple[float, float] | None:
    """A 95% interval of the median by the sign test, whatever the distribution; None for fewer than MIN_CELLS."""
    ordered, n_below = sorted(values), int(binom.ppf(0.025, len(values), 0.5)) if values else 0
    return (ordered[n_below - 1], ordered[-n_below]) if n_below else None


KINDS_OF_FAULTS = (
    "A region is a set of neighbouring cells of theta that fail; a fault in any of them finds it. Planted: seeds that "
    "fail in cells in which the model itself does not, found by a fault in one of these."
)
KNOWN_SHARES = {"seeds": "failing seeds", "regions": "regions", "cells": "cells", "planted": "planted"}


def truth_tables(evaluation: Evaluation) -> Iterable[Table]:
    """The known faults that each technique finds, and its mutation score, over all cells."""
    known = evaluation.content.get("truth", [])
    rows: list[tuple[str, ...]] = []
    for name in themis_first({name for truth in known for name in truth["techniques"]}):
        own = [truth["techniques"][name] for truth in known if name in truth["techniques"]]
        recalls = [recall for row in own for recall in row.get("recall", [])]
        scores = [score["score"] for row in own for score in row.get("scores", [])]
        found = ([recall[share] for recall in recalls] for share in KNOWN_SHARES)
        rows.append((name, *(format_spread(values, mean) for values in (*found, scores))))
    clean = [truth["mutants"]["clean_score"] for truth in known if truth["mutants"]]
    rows += [("the clean seeds", *[NO_VALUE] * len(KNOWN_SHARES), format_spread(clean, mean))] if clean else []
    notes = [
        "Shares of a mutant's known faults that techniques find at equal passes, and mutation scores: means over "
        f"mutants and campaigns of all cells, with the lowest and the highest. {KINDS_OF_FAULTS} The score is the "
        "share of pairs of a mutant and a class that the tests tell from the model; a test that is a fault of the "
        "model itself kills no mutant, so that a search for faults is not rewarded."
    ]
    if rows:
        yield Table(
            "Known faults found, and mutation score", ("technique", *KNOWN_SHARES.values(), "score"), rows, notes
        )


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


def _claim_table(theory: list[Record]) -> Table:
    rows = []
    for record in theory:
        reference = record["reference"]
        texts = [name_cell(record), str(record["campaigns"]), f"{reference['distinct_faults']:,}"]
        for way in WAYS_TO_STOP:
            found = record.get(way)
            if found is None:
                texts.append("not reached" if way in record else NO_VALUE)
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
    return NO_VALUE if value is None else format_number(value, 2)


def _stability_table(theory: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for record in theory:
        stability, normality = record["stability"], record["normality"] or {}
        deviations = [stability[name] for name in ("model_deviation", "median_deviation", "within_10_percent")]
        shape = [normality.get(f"{name}_absolute") for name in ("skewness", "kurtosis")]
        normal = [normality.get(f"compatible_{kind}") for kind in ("absolute", "signed")]
        sets = f"{stability['sets']} x {stability['tests']:,}"
        texts = (*map(_percent, deviations), *map(_share, shape), *map(_percent, normal))
        rows.append((name_cell(record), sets, *texts))
    notes = [
        "Deviation of inferred means between disjoint sets of seeds, the largest over sets: of the model's mean over "
        "neurons, and of single neurons. Skewness and excess kurtosis of the sensitivities, medians over neurons; "
        "normal: share of neurons compatible with a normal distribution, for sensitivities and for signed differences. "
        "The paper: means deviate by less than 10%, and differences are often normal."
    ]
    of_means = ("sets x tests", "model", "median neuron", "neurons within 10%")
    columns = ("cell", *of_means, "skewness", "kurtosis", "normal", "signed, normal")
    return Table("Stability of the inferred means, and normality", columns, rows, notes)


def _percent(value: float | None) -> str:
    return NO_VALUE if value is None else percent(value)


JUDGE_VARIANTS = {
    UNVARIED: "preset",
    "sample-all": "no sampler",
    "judge-exact": "closed form",
    "exact-sample-all": "closed form, no sampler",
    "sample-50": "50 neurons",
    "pymc-sample-50": "50 neurons, PyMC",
}
"""Variants that differ in what judging costs, and what they are called there."""


def variant_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Each variant and the preset in the same campaigns of the same cells."""
    variants = evaluation.content["variants"]
    preset = {(name_cell(record), record["campaign"]): record for record in variants if record["technique"] == UNVARIED}
    rows: list[tuple[str, ...]] = []
    for name in VARIANTS:
        cells: dict[str, list[tuple[Record, Record]]] = {}
        for record in variants:
            cell, base = name_cell(record), preset.get((name_cell(record), record["campaign"]))
            if record["technique"] == name != UNVARIED and base is not None:
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
        costs = compare_seconds(variants, name, UNVARIED)
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


def compare_seconds(variants: list[Record], one: str, other: str) -> dict[str, float]:
    """The seconds per test that one variant takes to judge, relative to another, by cell.

    Medians over the campaigns that both had on the same machine.
    """
    seconds: dict[tuple[str, int, str], dict[str, float]] = {}
    for record in with_machine(variants):
        campaign = seconds.setdefault((name_cell(record), record["campaign"], record["machine"]), {})
        campaign[record["technique"]] = record["seconds_judge"] / record["tests"]
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
        if record["technique"] in JUDGE_VARIANTS:
            judges.setdefault(record["technique"], []).append(1000 * record["seconds_judge"] / record["tests"])
        if record["technique"] == UNVARIED:
            neurons[name_cell(record)] = record["neurons"]
    rows = []
    for cell, machines in cells.items():
        times = max(machines.values(), key=lambda judges: (UNVARIED in judges, len(judges)))
        if UNVARIED in times and len(times) > 1:
            texts = [format_number(median(times[name]), 2) if name in times else NO_VALUE for name in JUDGE_VARIANTS]
            rows.append((cell, f"{neurons[cell]:,}", *texts))
    notes = [
        "Milliseconds per test, medians over campaigns on the machine on which most columns were measured beside the "
        f"preset; {NO_VALUE}: not measured there. The preset samples 1,000 neurons, or all if there are fewer, and "
        "judges them by Markov chains; the closed form is the default of Themis. Machines differ between cells."
    ]
    if rows:
        yield Table(
            "Time to judge, with and without the sampler", ("cell", "neurons", *JUDGE_VARIANTS.values()), rows, notes
        )


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
    shift = standing.get("shifts", {}).get(column)
    if shift is None:
        return NO_VALUE
    interval, value = shift["combined"], 100 * (shift["after"] - shift["before"])
    if interval is None:
        return format_number(value, 2, signed=True)
    return format_estimate([value, 100 * interval["low"], 100 * interval["high"]], 2, signed=True)
