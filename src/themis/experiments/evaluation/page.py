"""An evaluation as tables and as one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from themis.experiments.comparison.statistics import LEAST_SPAN
from themis.experiments.comparison.table import TITLES
from themis.experiments.evaluation.claims import (
    CHOOSERS,
    PAPER_FAULTS,
    PAPER_TIME,
    claims_table,
    describe_ratios,
    list_ratios,
    summarise_claims,
)
from themis.experiments.evaluation.paper import PAPER_R
from themis.experiments.evaluation.summary import STRONG, THEMIS, Evaluation, Record, with_times
from themis.experiments.evaluation.theory import WAYS_TO_STOP, describe_shares
from themis.experiments.evaluation.truth_tables import KNOWN_FAULTS, truth_tables
from themis.experiments.evaluation.variants import BASE
from themis.experiments.table import NONE, Table, format_count, format_estimate, format_number, format_value, plural
from themis.runs.run import percent

DEGENERATE = "degenerate"
BUDGETS = {"passes": "equal passes", "tests": "equal tests"}
DEFINITIONS = {"r": ("degenerate", "at full strength"), "r_box": ("box_degenerate", "over the whole range")}
"""The key of an r, the key that says why it is not scored, and which error rate it is with."""


VERDICTS, CAPABILITY, IN_THEORY = "What holds, and what does not", "Fault detection capability", "The theory"
"""Titles of sections."""
FIGURES = {
    "correlations": (CAPABILITY, "Correlations of error rate and distinct faults by technique, at equal passes"),
    "shares-at-full-coverage": (
        IN_THEORY,
        "Share of a reference run's distinct faults found when a campaign could stop",
    ),
}
"""The sections that figures belong to, and what they show, by the names of their files."""


def evaluation_page(evaluation: Evaluation, figures: Sequence[Path] = ()) -> str:
    """The whole evaluation as a Markdown document."""
    content = evaluation.content
    parts = ["# Evaluation", *opening(evaluation)]
    if summary := verdicts(evaluation):
        parts += [f"## {VERDICTS}", *summary]
    for title, tables in evaluation_tables(evaluation).items():
        parts += [f"## {title}", *(table.markdown() for table in tables)]
        parts += [f"![{FIGURES[path.stem][1]}]({path.name})" for path in figures if FIGURES[path.stem][0] == title]
    if content["failed"]:
        reasons = dict.fromkeys(
            f"{record['model']} {record['perturbation']}: {record['error']}" for record in content["failed"]
        )
        parts += ["## Failed cells", *(f"- {reason}" for reason in reasons)]
    return "\n\n".join(parts)


def verdicts(evaluation: Evaluation) -> list[str]:
    """The summary: which claims hold in one table, and a paragraph on each."""
    claims = claims_table(evaluation)
    return [*([claims.markdown()] if claims else []), *summarise_claims(evaluation)]


def opening(evaluation: Evaluation) -> list[str]:
    """What was run, and which models are missing."""
    content = evaluation.content
    n_models = len({pair["model"] for pair in content["pairs"]})
    n_run = sum(any(pair["budgets"].values()) for pair in content["pairs"])
    pairs = f"{plural(n_models, 'model')}, {plural(len(content['pairs']), 'pair')} of a model and a perturbation"
    if n_run < len(content["pairs"]):
        pairs += f", {n_run} of them with campaigns and the others with error rates only"
    lines = [f"Themis {content['version']}: {pairs if n_models else 'nothing has been measured'}."]
    n_gpu = sum(pair["device"].startswith("cuda") for pair in content["pairs"])
    if n_gpu:
        n_cpu = len(content["pairs"]) - n_gpu
        lines.append(f"The error rates of {plural(n_gpu, 'pair')} were measured on a GPU, those of {n_cpu} on a CPU.")
    lines += [f"Not measured: {name}, because {reason}." for name, reason in content["missing"].items()]
    if content["unfinished"]:
        lines.append(f"Not run yet: {', '.join(content['unfinished'])}. The same command runs them.")
    if content["failed"]:
        lines.append(f"{plural(len(content['failed']), 'cell')} failed and will run again with the next call.")
    return lines


def evaluation_tables(evaluation: Evaluation, *, is_brief: bool = False) -> dict[str, list[Table]]:
    """The tables of every question that has results; brief ones leave out the correlations of single cells."""
    models = model_table(evaluation)
    sections = {
        "What has been measured": [models] if models else [],
        CAPABILITY: [*capability_tables(evaluation, is_brief=is_brief)],
        "Faults at equal budgets": [*fault_tables(evaluation)],
        "Faults when done": [*done_tables(evaluation)],
        "Accuracy regained": [*retraining_tables(evaluation)],
        IN_THEORY: [*theory_tables(evaluation)],
        "Time": [*time_tables(evaluation)],
        "Parameters": [*variant_tables(evaluation)],
        KNOWN_FAULTS: [*truth_tables(evaluation)],
    }
    return {title: tables for title, tables in sections.items() if tables}


def model_table(evaluation: Evaluation) -> Table | None:
    """What has been measured of every model, and how the rest can be."""
    content = evaluation.content
    pairs = {(pair["model"], pair["perturbation"]): pair for pair in content["pairs"]}
    perturbations = content["plan"]["perturbations"]
    rows: list[tuple[str, ...]] = []
    for model, row in content["rows"].items():
        known = [pairs.get((model, perturbation)) for perturbation in perturbations]
        lacking = [
            name
            for name, pair in zip(perturbations, known, strict=True)
            if pair is None or _count_techniques(pair) < pair["limits"]["techniques"]
        ]
        missing = content["missing"].get(model)
        if missing is None and lacking:
            missing = f"the same command with --models {model} --perturbations {','.join(lacking)}"
        rows.append((row, model, *map(_progress, known), missing or NONE))
    notes = ["Campaigns per technique and magnitude that all techniques have had, and what would add the missing ones."]
    columns = ("row of the paper", "model", *perturbations, "missing")
    return Table("The paper's models", columns, rows, notes) if content["pairs"] else None


def _progress(pair: Record | None) -> str:
    if pair is None:
        return NONE
    planned, campaigns = pair["limits"]["techniques"], plural(pair["limits"]["campaigns"], "campaign")
    n_found = _count_techniques(pair)
    if not n_found:
        return "error rates"
    return campaigns if n_found == planned else f"{campaigns}, {n_found} of {planned} techniques"


def _count_techniques(pair: Record) -> int:
    """The techniques that a pair has results of."""
    return max((len(grid["rows"]) for grids in pair["budgets"].values() for grid in grids), default=0)


def capability_tables(evaluation: Evaluation, *, is_brief: bool = False) -> Iterable[Table]:
    """The correlation of faults with the error rate: counted over all cells, and cell by cell."""
    for name in TITLES:
        if any(grid["name"] == name for pair in evaluation.content["pairs"] for grid in pair["grids"]):
            yield _rate_table(evaluation.content["pairs"], name)
    for name, budget in _grids(evaluation):
        cells = _cells(evaluation, name, budget)
        yield _count_table(cells, name, budget)
        for key in () if is_brief else DEFINITIONS:
            if scored := [(pair, grid) for pair, grid in cells if grid[DEFINITIONS[key][0]] is None]:
                yield _r_table(scored, name, budget, key)


def _rate_table(pairs: list[Record], name: str) -> Table:
    """Error rates on a grid under both definitions, and which cells are degenerate."""
    cells = [(pair, grid) for pair in pairs for grid in pair["grids"] if grid["name"] == name]
    rows: list[tuple[str, ...]] = [
        (
            _pair(pair),
            *(
                ", ".join(percent(rate, 0) for rate in grid[rates]) + ("" if grid[why] is None else f" ({DEGENERATE})")
                for rates, why in (("rates", "degenerate"), ("box_rates", "box_degenerate"))
            ),
        )
        for pair, grid in cells
    ]
    n_full, n_box = (sum(grid[why] is not None for _, grid in cells) for why, _ in DEFINITIONS.values())
    refused = [f"{_pair(pair)}: {pair['grid_refused']}" for pair in pairs if pair["grid_refused"] and name == "grid"]
    notes = [
        f"Error rates by magnitude. Degenerate are {n_full} of {plural(len(cells), 'cell')} at full strength and "
        f"{n_box} over the whole range: they span less than {LEAST_SPAN:.2f}, or depend on one magnitude.",
        *(f"No grid for {text}." for text in refused),
    ]
    columns = ("cell", "at full strength", "over the whole range")
    return Table(f"Error rates, {TITLES[name]}", columns, rows, notes)


def _grids(evaluation: Evaluation) -> list[tuple[str, str]]:
    """The grids and budgets that have results."""
    pairs = evaluation.content["pairs"]
    return [
        (name, budget)
        for name in TITLES
        for budget in BUDGETS
        if any(grid["name"] == name for pair in pairs for grid in pair["budgets"].get(budget, []))
    ]


def _cells(evaluation: Evaluation, name: str, budget: str) -> list[tuple[Record, Record]]:
    """The pairs that have results on a grid at a budget, each with them."""
    return [
        (pair, grid)
        for pair in evaluation.content["pairs"]
        for grid in pair["budgets"].get(budget, [])
        if grid["name"] == name
    ]


def _techniques(grids: Iterable[Record]) -> list[str]:
    """All techniques, Themis first."""
    names = dict.fromkeys(row["technique"] for grid in grids for row in grid["rows"])
    return sorted(names, key=lambda name: (THEMIS.index(name) if name in THEMIS else len(THEMIS), name))


def _common_techniques(cells: list[tuple[Record, Record]]) -> tuple[list[str], list[str]]:
    """The techniques that have results in most cells, and the others."""
    names = _techniques(grid for _, grid in cells)
    counts = Counter(row["technique"] for _, grid in cells for row in grid["rows"])
    common = [name for name in names if 2 * counts[name] > len(cells)]
    return common, [name for name in names if name not in common]


def _rare_notes(
    cells: list[tuple[Record, Record]], techniques: list[str], value: Callable[[Record, str], str]
) -> list[str]:
    """The values of techniques that have results in few cells only."""
    notes = []
    for technique in techniques:
        own = [(pair, grid) for pair, grid in cells if any(row["technique"] == technique for row in grid["rows"])]
        notes.append(f"{technique}: {', '.join(f'{_pair(pair)} {value(grid, technique)}' for pair, grid in own)}.")
    return notes


def _row(grid: Record, technique: str) -> Record:
    return next((row for row in grid["rows"] if row["technique"] == technique), {"r": {}, "r_box": {}, "total": {}})


def _count_table(cells: list[tuple[Record, Record]], name: str, budget: str) -> Table:
    """How often each technique has a strong correlation, by both definitions, for distinct and for raw faults."""
    rows = []
    for technique in _techniques(grid for _, grid in cells):
        texts = [technique]
        for count in ("distinct", "faults"):
            for key in DEFINITIONS:
                values = [(_row(grid, technique)[key].get(count) or [None])[0] for _, grid in cells]
                defined = [value for value in values if value is not None]
                strong = sum(value >= STRONG for value in defined)
                median = format_number(float(np.median(defined)), 2) if defined else NONE
                texts.append(f"{strong} of {len(defined)}, {median}" if defined else NONE)
        leads = sum(_row(grid, technique).get("r_lead", {}).get("over_rival") == "ahead" for _, grid in cells)
        rows.append((*texts, str(leads)))
    degenerate = [sum(grid[why] is not None for _, grid in cells) for why, _ in DEFINITIONS.values()]
    columns = ("technique", "full strength", "whole range", "raw, full strength", "raw, whole range", "ahead")
    notes = [
        f"Cells with r of at least {STRONG} among those that have one, and the median r; distinct faults, then all "
        "faults. Ahead: cells in which it is ahead of all others under both definitions. Degenerate, and not scored: "
        f"{degenerate[0]} of {plural(len(cells), 'cell')} by the error rate at full strength, {degenerate[1]} by that "
        f"over the whole range; their error rates span less than {LEAST_SPAN:.2f}, or depend on one magnitude."
    ]
    return Table(f"Strong correlations, {TITLES[name]}, {BUDGETS[budget]}", columns, rows, notes)


def _r_table(cells: list[tuple[Record, Record]], name: str, budget: str, key: str) -> Table:
    """Pearson's r of distinct faults in every cell, with its interval."""
    techniques, rare = _common_techniques(cells)

    def value(grid: Record, technique: str) -> str:
        return format_estimate(_row(grid, technique)[key].get("distinct"), 2)

    rows = []
    for pair, grid in cells:
        spans = grid["rates"] if key == "r" else grid["box_rates"]
        published = PAPER_R.get(pair["model"], {}).get(pair["perturbation"])
        spread = f"{percent(min(spans), 0)}..{percent(max(spans), 0)}"
        values = [value(grid, technique) for technique in techniques]
        rows.append((_pair(pair), spread, NONE if published is None else f"{published:.2f}", *values))
    title = f"r with the error rate {DEFINITIONS[key][1]}, {TITLES[name]}, {BUDGETS[budget]}"
    notes = [
        "Distinct faults, with 95% intervals; paper: its value for Themis. Degenerate cells are left out. "
        f"{NONE}: undefined, see themis compare.",
        *_rare_notes(cells, rare, value),
    ]
    return Table(title, ("cell", "error rates", "paper", *techniques), rows, notes)


def _pair(pair: Record) -> str:
    return f"{pair['model']} {pair['perturbation']}"


def fault_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Distinct faults at equal budgets, and how they compare."""
    for name, budget in _grids(evaluation):
        cells = _cells(evaluation, name, budget)
        techniques, rare = _common_techniques(cells)
        rows = [
            (
                _pair(pair),
                *(_found(_row(grid, technique)) for technique in techniques),
                *(_ratio(grid["ratios"].get(technique, {}).get("over_best")) for technique in THEMIS),
            )
            for pair, grid in cells
        ]
        columns = ("cell", *techniques, *(f"{technique} / best" for technique in THEMIS))
        budgets = sorted({pair["limits"][budget] for pair, _ in cells})
        notes = [
            f"Sums over magnitudes of distinct faults after {_any_of([f'{limit:,}' for limit in budgets])} {budget}: "
            "means over campaigns, with the lowest and the highest where they differ. Best: the best technique other "
            f"than {_any_of(THEMIS)}.",
            *_rare_notes(cells, rare, lambda grid, technique: _found(_row(grid, technique))),
            *_ratio_notes([grid["ratios"] for _, grid in cells]),
        ]
        yield Table(f"Distinct faults, {TITLES[name]}, {BUDGETS[budget]}", columns, rows, notes)


def _any_of(words: Iterable[str]) -> str:
    """Such as: a, b or c."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _found(row: Record) -> str:
    """The mean over campaigns, with the lowest and the highest if they differ."""
    if not row["total"]:
        return NONE
    mean, low, high = row["total"]["distinct_faults"]
    return format_count(mean) + (f" ({format_count(low)}..{format_count(high)})" if low < high else "")


def _ratio(value: float | None) -> str:
    return NONE if value is None else format_number(value, 2)


def _ratio_notes(ratios: list[Record]) -> list[str]:
    """How the faults of Themis compare with those of its rivals, over cells in which these found some."""
    rivals = {"over_best": "the best rival", "over_four": "the mean of the four baselines", "over_random": "random"}
    notes = []
    for technique in THEMIS:
        found = {rival: list_ratios(ratios, technique, over) for over, rival in rivals.items()}
        texts = [f"{rival} {describe_ratios(values)}" for rival, values in found.items() if values]
        if texts:
            notes.append(f"{technique} relative to rivals, medians over cells: {'; '.join(texts)}.")
    return notes


def done_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Every technique when it was done."""
    done = evaluation.content["done"]
    names, whole = _comparable(done)
    if not whole:
        return
    rows: list[tuple[str, ...]] = []
    for name in names:
        own = [pair["techniques"][name] for pair in whole]
        stops: dict[str, int] = {}
        for row in own:
            for reason, count in row["stops"].items():
                stops[reason] = stops.get(reason, 0) + count
        texts = [f"{count} {WHY.get(reason, reason)}" for reason, count in sorted(stops.items())]
        rows.append(
            (
                name,
                format_count(_mean(own, "tests")),
                format_count(_mean(own, "distinct_faults")),
                format_count(_mean(own, "faults")),
                percent(_mean(own, "scc")),
                ", ".join(texts),
            )
        )
    columns = ("technique", "tests", "distinct faults", "raw", "SCC", "how campaigns ended")
    notes = [
        f"Means over {plural(len(whole), 'cell')} that have all of these. The paper: 21,399 tests for Themis, "
        f"3,774 for NC, 18,501 for KMNC, 20,052 for IDC and 26,757 for LSA, and {PAPER_FAULTS} times the faults of "
        "the four.",
        *_ratio_notes([pair["ratios"] for pair in whole]),
    ]
    yield Table("Faults when each technique was done", columns, rows, notes)


def _comparable(done: list[Record]) -> tuple[list[str], list[Record]]:
    """The techniques that more than half of the cells have, Themis first, and the cells that have all of them."""
    counts = Counter(name for pair in done for name in pair["techniques"])
    names = [name for name in counts if 2 * counts[name] > len(done)]
    whole = [pair for pair in done if set(names) <= set(pair["techniques"])]
    return sorted(names, key=lambda name: (THEMIS.index(name) if name in THEMIS else len(THEMIS), name)), whole


WHY = {"coverage": "by coverage", "plateau": "on a plateau", "tests": "not done", "found": "by what was found"}
"""How campaigns end, in words."""


def _mean(records: list[Record], name: str) -> float:
    return float(np.mean([record[name] for record in records]))


def retraining_tables(evaluation: Evaluation) -> Iterable[Table]:
    """The disturbed score that training on the inputs of each technique regains."""
    records = evaluation.content["retraining"]
    if not records:
        return
    by_cell = [{standing["technique"]: standing for standing in record["standings"]} for record in records]
    names = sorted(dict.fromkeys(name for own in by_cell for name in own), key=lambda name: (name != "themis", name))
    rows: list[tuple[str, ...]] = []
    for record, own in zip(records, by_cell, strict=True):
        before = record["before"]
        gains = [_gain(own.get(name, {}), "disturbed") for name in names]
        scores = f"{percent(before['clean'])} / {percent(before['disturbed'])}"
        rows.append((f"{record['model']} {record['perturbation']} {record['magnitude']:.3g}", scores, *gains))
        rows.append(("clean score", "", *(_gain(own.get(name, {}), "clean") for name in names)))
    columns = ("cell", "before, clean / disturbed", *(CHOOSERS.get(name, name) for name in names))
    notes = [
        "Gain of the disturbed score on judge seeds that were neither searched nor trained on, in points, with 95% "
        "intervals; below it the change of the clean score, which the recipe keeps. Every technique searched for the "
        "same passes and chose as many inputs. The paper: 0.21 to 11.56 points for Themis."
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


def theory_tables(evaluation: Evaluation) -> Iterable[Table]:
    """What coverage of 100% means for the faults, how stable means are, and how normal sensitivities are."""
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
        texts = [f"{record['model']} {record['perturbation']} {record['magnitude']:.3g}"]
        texts.append(f"{reference['distinct_faults']:,}")
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
        "had been found by then. The reference is a longer campaign of scheduled with other random numbers. Little is "
        "left to find if an estimated 90% of the distinct faults within reach were found, and the residual risk is at "
        "most 1%; the default rule stops then, if coverage is 100% as well.",
        f"Median shares of the distinct faults: {'; '.join(describe_shares(theory))}.",
    ]
    columns = ("cell", "faults of the reference", *WAYS_TO_STOP.values())
    return Table("Share of the faults found when a campaign could stop", columns, rows, notes)


def _share(value: float | None) -> str:
    return NONE if value is None else format_number(value, 2)


def _stability_table(theory: list[Record]) -> Table:
    rows: list[tuple[str, ...]] = []
    for record in theory:
        stability, normality = record["stability"], record["normality"] or {}
        rows.append(
            (
                f"{record['model']} {record['perturbation']} {record['magnitude']:.3g}",
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
        rows.append((_pair(pair), f"{percent(min(rates), 0)}..{percent(max(rates), 0)}", value))
    notes = [
        "Pearson's r over all magnitudes of the error rate over the whole range and the mean sensitivity of all "
        "neurons under random. Degenerate cells are left out."
    ]
    return Table("Sensitivity and error rate", ("cell", "error rates", "r"), rows, notes)


def time_tables(evaluation: Evaluation) -> Iterable[Table]:
    """Seconds by phase: techniques when done, and the preset with and without its sampler."""
    names, whole = _comparable(with_times(evaluation.content["done"]))
    if whole:
        rows = []
        for name in names:
            own = [pair["techniques"][name] for pair in whole]
            tests = sum(row["timed_tests"] for row in own)
            rows.append(
                (
                    name,
                    *(
                        format_number(_mean(own, f"seconds_{phase}"), 2)
                        for phase in ("measure", "judge", "search", "total")
                    ),
                    format_number(_mean(own, "fit_seconds"), 2),
                    format_number(1000 * sum(row["seconds_total"] for row in own) / max(tests, 1), 2),
                )
            )
        notes = [
            f"Means over {plural(len(whole), 'cell')}, in seconds, until each technique was done, in campaigns that "
            "all techniques had on one machine; fit: fitting the criterion, which is done before. The paper: "
            f"{PAPER_TIME - 1:.0%} more time than the baselines."
        ]
        columns = ("technique", "measure", "judge", "search", "total", "fit", "ms per test")
        yield Table("Time until done", columns, rows, notes)


def variant_tables(evaluation: Evaluation) -> Iterable[Table]:
    """The paper's preset with one parameter changed at a time, by cell."""
    by_cell: dict[tuple[str, str, float], list[Record]] = {}
    for record in evaluation.content["variants"]:
        by_cell.setdefault((record["model"], record["perturbation"], record["magnitude"]), []).append(record)
    for (model, perturbation, magnitude), records in by_cell.items():
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
        yield Table(f"The preset's parameters, {model} {perturbation} {magnitude:.3g}", columns, rows, notes)
