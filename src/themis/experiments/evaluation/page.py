"""An evaluation as tables and as one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from themis.experiments.evaluation.budget_tables import capability_tables, fault_tables
from themis.experiments.evaluation.claims import CHOOSERS, claims_table, count_verdicts, summarise_claims
from themis.experiments.evaluation.done_tables import done_tables, time_tables
from themis.experiments.evaluation.plan import DONE, RETRAINING, THEORY, VARIANT
from themis.experiments.evaluation.summary import Evaluation, Record
from themis.experiments.evaluation.theory_tables import theory_tables
from themis.experiments.evaluation.truth_tables import KNOWN_FAULTS, truth_tables
from themis.experiments.evaluation.variants import BASE
from themis.experiments.table import NONE, Table, format_estimate, format_number, plural
from themis.runs.run import percent

VERDICTS, CAPABILITY = "What holds, and what does not", "Fault detection capability"
AT_BUDGETS, WHEN_ALL_ARE_DONE, REGAINED = "Faults at equal budgets", "Faults when done", "Accuracy regained"
IN_THEORY, PARAMETERS = "The theory", "Parameters"
"""Titles of sections."""
QUESTIONS = {DONE: WHEN_ALL_ARE_DONE, RETRAINING: REGAINED, THEORY: IN_THEORY, VARIANT: PARAMETERS}
"""The sections about questions that are not asked of all models, by their kinds of cells."""
FIGURES = {
    "correlations": (CAPABILITY, "Correlations of error rate and distinct faults by technique, at equal passes"),
    "faults-over-baselines": (AT_BUDGETS, "Distinct faults relative to the mean of the four baselines, by cell"),
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
    """The summary: how many claims hold, which ones in a table, and a paragraph on each."""
    claims = claims_table(evaluation)
    return [*([count_verdicts(evaluation), claims.markdown()] if claims else []), *summarise_claims(evaluation)]


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
    sections = {
        "What has been measured": [*progress_tables(evaluation)],
        CAPABILITY: [*capability_tables(evaluation, is_brief=is_brief)],
        AT_BUDGETS: [*fault_tables(evaluation)],
        WHEN_ALL_ARE_DONE: [*done_tables(evaluation)],
        REGAINED: [*retraining_tables(evaluation)],
        IN_THEORY: [*theory_tables(evaluation)],
        "Time": [*time_tables(evaluation)],
        PARAMETERS: [*variant_tables(evaluation)],
        KNOWN_FAULTS: [*truth_tables(evaluation)],
    }
    return {title: tables for title, tables in sections.items() if tables}


def progress_tables(evaluation: Evaluation) -> Iterable[Table]:
    """What has been measured of every model, and how the rest can be."""
    if evaluation.content["pairs"]:
        yield _model_table(evaluation.content)
    if any(record["kind"] in QUESTIONS for record in evaluation.content["progress"]):
        yield _question_table(evaluation.content)


def _model_table(content: Record) -> Table:
    pairs = {(pair["model"], pair["perturbation"]): pair for pair in content["pairs"]}
    perturbations = content["plan"]["perturbations"]
    rows: list[tuple[str, ...]] = []
    for model, row in content["rows"].items():
        known = {name: pairs.get((model, name)) for name in perturbations}
        lacking = [name for name, pair in known.items() if pair is None or not _is_complete(pair)]
        missing = content["missing"].get(model) or _fill(model, lacking)
        rows.append((row, model, *map(_progress, known.values()), missing))
    notes = [
        "Campaigns per technique and magnitude that all techniques have had, of those that are planned, and what would "
        "add the missing ones."
    ]
    return Table("The paper's models", ("row of the paper", "model", *perturbations, "missing"), rows, notes)


def _is_complete(pair: Record) -> bool:
    limits = pair["limits"]
    return bool(_count_techniques(pair) == limits["techniques"] and limits["campaigns"] == limits["planned"])


def _progress(pair: Record | None) -> str:
    if pair is None:
        return NONE
    limits, n_found = pair["limits"], _count_techniques(pair)
    if not n_found:
        return "error rates"
    n = limits["campaigns"]
    campaigns = plural(n, "campaign") if n == limits["planned"] else f"{n} of {plural(limits['planned'], 'campaign')}"
    return campaigns + ("" if n_found == limits["techniques"] else f", {n_found} of {limits['techniques']} techniques")


def _count_techniques(pair: Record) -> int:
    """The techniques that a pair has results of."""
    return max((len(grid["rows"]) for grids in pair["budgets"].values() for grid in grids), default=0)


def _fill(model: str, perturbations: Sequence[str]) -> str:
    """What would add the missing cells of a model; a dash if none is missing."""
    if not perturbations:
        return NONE
    return f"the same command with --models {model} --perturbations {','.join(perturbations)}"


def _question_table(content: Record) -> Table:
    """The cells of questions that are not asked of all models."""
    rows: list[tuple[str, ...]] = []
    for model in content["rows"]:
        own = [record for record in content["progress"] if record["model"] == model and record["kind"] in QUESTIONS]
        if own:
            lacking = dict.fromkeys(record["perturbation"] for record in own if record["finished"] < record["planned"])
            counts = [_count([record for record in own if record["kind"] == kind]) for kind in QUESTIONS]
            rows.append((model, *counts, _fill(model, list(lacking))))
    notes = [
        "Cells that are finished, of those that are planned, and what would add the missing ones. "
        f"{NONE}: the plan does not ask."
    ]
    return Table("The other questions", ("model", *QUESTIONS.values(), "missing"), rows, notes)


def _count(records: list[Record]) -> str:
    finished, planned = (sum(record[name] for record in records) for name in ("finished", "planned"))
    return f"{finished} of {planned}" if planned else NONE


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
