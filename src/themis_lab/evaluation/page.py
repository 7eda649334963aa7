"""An evaluation as tables and two pages, one with the answers and one with single cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from themis.report.table import NO_VALUE, Table
from themis.text import counted
from themis_lab.evaluation import tables
from themis_lab.evaluation.claims import claims_table, list_verdicts, summarise_claims
from themis_lab.evaluation.plan import Kind
from themis_lab.evaluation.summary import Evaluation, Record, name_cell, name_pair
from themis_lab.zoo import ZOO

CELLS_PAGE = "evaluation-cells.md"
"""The file with the tables of single cells, in the folder of the page."""
CAPABILITY, AGAINST_RIVALS = "Fault detection capability", "Faults compared with rivals"
FAULTS_WHEN_DONE, REGAINED = "Faults when done", "Accuracy regained"
IN_THEORY, PARAMETERS = "The theory", "Parameters"
TIME, KNOWN_FAULTS, MEASURED = "Time", "Known faults", "What has been measured"
"""Titles of sections."""
QUESTION_TITLES: dict[str, str] = {
    Kind.DONE: FAULTS_WHEN_DONE,
    Kind.RETRAINING: REGAINED,
    Kind.THEORY: IN_THEORY,
    Kind.VARIANT: PARAMETERS,
}
"""The sections about questions that are not asked of all models, by their kinds of cells."""
FIGURES = {
    "correlations": (CAPABILITY, "Correlations of error rate and distinct faults by technique, at equal passes"),
    "faults-over-baselines": (AGAINST_RIVALS, "Distinct faults relative to the mean of the four baselines, by cell"),
    "shares-at-full-coverage": (
        IN_THEORY,
        "Share of a reference run's distinct faults found when a campaign could stop",
    ),
}
"""The sections that figures belong to, and what they show, by the names of their files."""


def evaluation_page(evaluation: Evaluation, figures: Mapping[str, str]) -> str:
    """The answers in Markdown, below the title of the page; `figures` are their paths by name."""
    summaries, cells = (list_tables(evaluation, makers) for makers in (SUMMARIES, CELL_TABLES))
    claims, parts = claims_table(evaluation), []
    if claims is not None:
        heading = "## What holds, and what does not"
        parts += [heading, list_verdicts(evaluation), claims.markdown(), *summarise_claims(evaluation)]
    for title in [title for title in SUMMARIES if title in {*summaries, *cells}]:
        parts += [f"## {title}", *(opening(evaluation) if title == MEASURED else [])]
        parts += [table.markdown() for table in summaries.get(title, [])]
        parts += [f"![{FIGURES[name][1]}]({path})" for name, path in figures.items() if FIGURES[name][0] == title]
        if title in cells:
            parts.append(f"[All cells]({CELLS_PAGE}#{title.lower().replace(' ', '-')})")
    if evaluation.content["failed"]:
        reasons = [f"- {name_pair(record)}: {record['error']}" for record in evaluation.content["failed"]]
        parts += ["### Failed cells", *dict.fromkeys(reasons)]
    return "\n\n".join(parts)


def cells_page(evaluation: Evaluation) -> str:
    """The tables of single cells as a Markdown document."""
    parts = ["# Evaluation: single cells", "The tables behind [the evaluation](evaluation.md)."]
    for title, own in list_tables(evaluation, CELL_TABLES).items():
        parts += [f"## {title}", *(table.markdown() for table in own)]
    return "\n\n".join(parts)


def opening(evaluation: Evaluation) -> list[str]:
    """What was run, and which models are missing."""
    content = evaluation.content
    n_models = len({pair["model"] for pair in content["pairs"]})
    n_run = sum(any(pair["budgets"].values()) for pair in content["pairs"])
    pairs = f"{counted(n_models, 'model')}, {counted(len(content['pairs']), 'pair')} of a model and a perturbation"
    if n_run < len(content["pairs"]):
        pairs += f", {n_run} of them with campaigns, the rest with error rates only"
    by = f", `{content['command']}`" if "command" in content else ""
    lines = [f"Themis {content['version']}{by}: {pairs if n_models else 'nothing has been measured'}."]
    lines += [_count_campaigns(content["pairs"])] if n_run else []
    lines += [_describe_origin(origin) for origin in content.get("merged", [])]
    lines += [f"Not measured: {name}, because {reason}." for name, reason in content["missing"].items()]
    lines += _list_untrained(content["retraining"])
    if content["unfinished"]:
        lines.append(f"Not run yet: {', '.join(content['unfinished'])}. The same command runs them.")
    if content["failed"]:
        lines.append(f"{counted(len(content['failed']), 'cell')} failed and will run again with the next call.")
    return lines


def _count_campaigns(pairs: list[Record]) -> str:
    """A sentence such as: Every technique had 3 campaigns per magnitude in 24 pairs, 2 in 12."""
    counts = Counter(pair["limits"]["campaigns"] for pair in pairs if any(pair["budgets"].values()))
    (most, n_pairs), *others = sorted(counts.items(), reverse=True)
    first = f"{counted(most, 'campaign')} per magnitude in {counted(n_pairs, 'pair')}"
    return f"Every technique had {', '.join([first, *(f'{n} in {own}' for n, own in others)])}."


def _list_untrained(retraining: list[Record]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for record in retraining:
        if "untrained" in record:
            by_reason.setdefault(record["untrained"], []).append(name_cell(record))
    return [f"Nothing to train on for {', '.join(names)}: {reason}." for reason, names in by_reason.items()]


def _describe_origin(origin: Record) -> str:
    """What was measured apart from the rest, and with what."""
    by_kind: dict[str, list[str]] = {}
    for cell in origin["cells"]:
        by_kind.setdefault(cell["kind"], []).append(name_pair(cell))
    devices = {"GPU" if str(cell["device"]).startswith("cuda") else "CPU" for cell in origin["cells"]}
    versions = f"Python {origin['environment']['python']} and torch {origin['environment']['torch']}"
    parts = [f"{QUESTION_TITLES.get(kind, 'Faults').lower()} on {', '.join(pairs)}" for kind, pairs in by_kind.items()]
    return f"Measured apart from the rest, on a {' and a '.join(sorted(devices))} with {versions}: {'; '.join(parts)}."


def progress_tables(evaluation: Evaluation) -> Iterable[Table]:
    """What has been measured for each model, and how to measure the rest."""
    content = evaluation.content
    pairs = {(pair["model"], pair["perturbation"]): pair for pair in content["pairs"]}
    perturbations = content["plan"]["perturbations"]
    asked = {record["kind"] for record in content["progress"]}
    questions = {kind: title for kind, title in QUESTION_TITLES.items() if kind in asked}
    rows: list[tuple[str, ...]] = []
    for model, row in content["rows"].items():
        own = [record for record in content["progress"] if record["model"] == model]
        begun = [name for name in perturbations if (model, name) in pairs]
        lacking = {record["perturbation"] for record in own if record["finished"] < record["planned"]}
        names = [name for name in perturbations if name in lacking or name not in begun]
        options = f"--models {model} --perturbations {','.join(names)}" if names else NO_VALUE
        campaigns = [_progress(pairs[model, name]) if name in begun else NO_VALUE for name in perturbations]
        counts = [_count([record for record in own if record["kind"] == kind]) for kind in questions]
        missing = f"weights or data; then --models {model}" if model in content["missing"] else options
        rows.append((row, model, _find_weights(content, model), *campaigns, *counts, missing))
    notes = [
        "Campaigns per technique and magnitude that all techniques have had, of those that are planned, and for the "
        f"other questions the cells that are finished; {NO_VALUE}: nothing, or the plan does not ask. The same command "
        "adds what is missing; the options in the last column restrict it to that."
    ]
    columns = ("row of the paper", "model", "weights", *perturbations, *questions.values(), "missing")
    yield Table("The paper's models", columns, rows, notes)


def _find_weights(content: Record, model: str) -> str:
    entry = ZOO.get(content["plan"]["models"][model].get("zoo"))
    return NO_VALUE if entry is None or model in content["missing"] else entry.source


def _progress(pair: Record) -> str:
    limits = pair["limits"]
    n_found = max((len(grid["rows"]) for grids in pair["budgets"].values() for grid in grids), default=0)
    if not n_found:
        return "error rates"
    techniques = "" if n_found == limits["techniques"] else f", {n_found} of {limits['techniques']} techniques"
    return f"{limits['campaigns']} of {limits['planned']}{techniques}"


def _count(records: list[Record]) -> str:
    finished, planned = (sum(record[name] for record in records) for name in ("finished", "planned"))
    return f"{finished} of {planned}" if planned else NO_VALUE


Tables = Callable[[Evaluation], Iterable[Table]]
SUMMARIES: dict[str, Tables] = {
    CAPABILITY: tables.capability_tables,
    AGAINST_RIVALS: tables.ratio_tables,
    FAULTS_WHEN_DONE: tables.done_tables,
    REGAINED: tables.retraining_tables,
    IN_THEORY: tables.theory_tables,
    TIME: lambda evaluation: [*tables.time_tables(evaluation), *tables.judging_tables(evaluation)],
    PARAMETERS: tables.variant_tables,
    KNOWN_FAULTS: tables.truth_tables,
    MEASURED: progress_tables,
}
"""The tables that answer each question, by the title of its section."""
CELL_TABLES: dict[str, Tables] = {
    CAPABILITY: tables.capability_cells,
    AGAINST_RIVALS: tables.fault_cells,
    FAULTS_WHEN_DONE: tables.done_cells,
    IN_THEORY: tables.theory_cells,
}
"""The tables of single cells behind them."""


def list_tables(evaluation: Evaluation, makers: Mapping[str, Tables]) -> dict[str, list[Table]]:
    """The tables of each section that has tables."""
    found = {title: [*make(evaluation)] for title, make in makers.items()}
    return {title: own for title, own in found.items() if own}
