"""Everything that a report shows, as typed data, read from the run folder of a running or stopped campaign."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.judge.estimate import Estimate
from themis.judge.normality import Normality
from themis.report.gates.record import RecordedGates, read_gates
from themis.report.inputs import ShownInputs, read_inputs
from themis.report.names import answer_names, as_text, class_names, feature_names, outcome_names, task_of
from themis.report.rows import (
    AnswerMatrix,
    BreakingCurve,
    FaultRows,
    answer_matrix,
    breaking_curve,
    mean_signature,
    read_rows,
    rounded,
)
from themis.runs.display.text import CleanScores, Counts, RunVerdict, write_verdict
from themis.runs.estimates import (
    SensitivitySpread,
    ThetaRates,
    layer_sensitivity,
    phase_seconds,
    rates_by_theta,
    read_progress,
    stored_by_class,
    stored_by_strength,
    uniform_estimates,
)
from themis.runs.run import record_covers_neurons
from themis.version import __version__

if TYPE_CHECKING:
    from themis.runs.run import ClassRate, Round, Seconds, StrengthPart
    from themis.runs.store.reader import Reader

SCHEMA = 1
"""Version of the JSON form."""
MAX_PICTURES = 1000
MAX_ROUNDS = 400
"""Points of a curve over rounds."""


@dataclass(frozen=True)
class ThetaRow:
    """A dimension of theta."""

    name: str
    low: float
    high: float
    identity: float
    unit: str


@dataclass(frozen=True)
class CoverageRow:
    """The coverage after the last round; the interval and the uniform coverage are known when a campaign has ended."""

    sampled: float
    all: float
    interval: Estimate | None
    uniform: float | None
    forecast: int | None
    dead: int
    unseen: int
    caution: str | None = None
    """Why it says little, if it was reached with few tests."""


@dataclass(frozen=True)
class ReachRow:
    """Distinct faults and failing seeds: how many were found by the last round, and how many are within reach."""

    found: int
    faults: Estimate
    failing: int
    seeds: Estimate
    forecast: int | None
    """Tests still needed to find 95% of these faults."""


@dataclass(frozen=True)
class CriterionScore:
    """The score of the campaign's criterion, and how many tests raised it."""

    name: str
    score: float | None
    is_share: bool
    raised: int


@dataclass(frozen=True)
class RoundRow:
    """A round. Counts are totals since the start of the campaign."""

    number: int
    tests: int
    coverage: float
    coverage_all: float
    faults: int
    distinct_faults: int
    seconds: float
    criterion: float | None


@dataclass(frozen=True)
class LayerRow:
    """A layer, from the input on. `share` is its share of the sensitivity in faults."""

    name: str
    neurons: int
    coverage: float | None
    sensitivity: SensitivitySpread | None
    share: float | None


@dataclass(frozen=True)
class GroupRow:
    """A group of related faults: what they have in common, and how many faults and seeds it has."""

    text: str
    faults: int
    seeds: int


@dataclass(frozen=True)
class ShellCommand:
    """A command that a reader of the report can run, and what it does."""

    command: str
    purpose: str


@dataclass(frozen=True)
class ReportView:
    """All contents of a report."""

    run: str
    state: str
    """running, ended, interrupted, failed or killed."""
    task: str
    fault: str | None
    """What counts as a fault, in words."""
    slight: str | None
    """That the perturbation hardly changes the inputs, if so."""
    perturbation: str
    subject: str
    """The name of the model."""
    theta: list[ThetaRow]
    counts: Counts
    verdict: RunVerdict
    stop: str
    stop_reason: str | None
    fault_rate: Estimate | None
    residual_risk: Estimate | None
    reach: ReachRow | None
    """None in runs of earlier versions."""
    coverage: CoverageRow | None
    covers_neurons: bool
    """Whether there is anything to cover: a model without hidden layers has no coverage goal."""
    goal: float | None
    """The coverage at which the campaign stops."""
    clean: CleanScores
    left_out: str | None
    """Why some seeds are not tested, in words."""
    outcomes: dict[int, str]
    """Names of the outcomes of disturbed inputs."""
    answers: dict[int, str]
    """Names of the answers to clean inputs."""
    faults: FaultRows
    gates: RecordedGates | None
    """The limits that the run was checked against; None if there were none, or if it has run more tests since."""
    next: ShellCommand | None
    """What to run next."""
    groups: list[GroupRow]
    inputs: ShownInputs
    matrix: AnswerMatrix
    rates: list[ThetaRates]
    strengths: list[StrengthPart]
    """What random disturbances do, by strength; empty before the campaign has ended."""
    by_class: list[ClassRate]
    """The fault rate by class; empty in tasks without classes, and before the campaign has ended."""
    has_dropped: bool
    breaking: BreakingCurve | None
    rounds: list[RoundRow]
    layers: list[LayerRow]
    normality: Normality | None
    seconds: Seconds | None
    kinds: dict[str, dict[str, int]]
    """Tests and faults by kind of proposal."""
    criterion: CriterionScore | None
    config: list[tuple[str, str]]
    environment: list[tuple[str, str]]
    reproduce: list[ShellCommand]
    version: str = __version__
    schema: int = SCHEMA

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`, as the script of the page reads it."""
        plain: dict[str, Any] = plain_view(self)
        return plain


def plain_view(value: Any) -> Any:
    """Dataclasses, lists and dicts as plain data for JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [plain_view(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_view(item) for key, item in value.items()}
    if not is_dataclass(value):
        raise TypeError(f"a view must be made of plain data and dataclasses, got {type(value).__name__}")
    return {field.name: plain_view(getattr(value, field.name)) for field in fields(value)}


def read_view(
    run: Reader | str | Path, *, most_pictures: int = MAX_PICTURES, has_groups: bool | None = None
) -> ReportView:
    """Read everything that a report shows from an open run or a run folder.

    most_pictures: the number of faults that are shown with their inputs. has_groups: whether to group related faults;
    by default this is done when the campaign has stopped.
    """
    if isinstance(run, str | Path):
        from themis.runs.store.reader import Reader

        with closing(Reader(run, is_brief=True)) as opened:
            return read_view(opened, most_pictures=most_pictures, has_groups=has_groups)
    summary = run.summary()
    ended = summary or {}
    state = run.state(summary)
    progress, rounds = read_progress(run), run.rounds()
    start, task = run.record.get("start", {}), task_of(run)
    last = rounds[-1] if rounds else None
    groups, group_of = _read_groups(run) if (state != "running" if has_groups is None else has_groups) else ([], {})
    faults = read_rows(run, group_of)
    kept = [k for k, is_kept in enumerate(faults.columns["kept"]) if is_kept]
    kept_ids, kept_seeds = ([column[k] for k in kept] for column in (faults.columns["id"], faults.columns["seed_id"]))
    matrix = answer_matrix(run)
    classes_seen = stored_by_class(summary)
    answers = sorted({*_known_answers(matrix, faults.columns), *(rate.number for rate in classes_seen)})
    classes = class_names(run)
    counts, estimates = _counts(run, last, start), uniform_estimates(summary, progress, rounds)
    clean = CleanScores(*(start.get(f"clean_{field.name}") for field in fields(CleanScores)))
    perturbation = run.record["perturbation"]
    gates = read_gates(run.path, counts.tests)
    return ReportView(
        run=str(run.path),
        state=state,
        task=task,
        fault=start.get("fault"),
        slight=start.get("slight"),
        perturbation=perturbation,
        subject=_subject(run),
        theta=[ThetaRow(*(theta[field.name] for field in fields(ThetaRow))) for theta in run.record["theta"]],
        counts=counts,
        verdict=write_verdict(
            perturbation,
            task,
            counts,
            clean,
            estimates.fault_rate,
            constant=start.get("constant"),
            is_running=state == "running",
        ),
        stop=run.stop_sentence(summary, state),
        stop_reason=ended.get("stop_reason"),
        fault_rate=estimates.fault_rate,
        residual_risk=estimates.residual_risk,
        reach=_reach(last),
        coverage=_coverage(ended, last),
        covers_neurons=record_covers_neurons(run.record),
        goal=run.record["settings"].get("coverage"),
        clean=clean,
        left_out=start.get("left_out"),
        outcomes=outcome_names(task, answers, classes),
        answers=answer_names(task, answers, classes),
        faults=faults,
        gates=gates,
        next=_next_step(run, state, last, gates),
        groups=groups,
        inputs=read_inputs(run, kept_ids, kept_seeds, most_pictures, feature_names(run)),
        matrix=matrix,
        rates=rates_by_theta(run, progress),
        strengths=list(stored_by_strength(summary)),
        by_class=list(classes_seen),
        has_dropped=bool(last and last.dropped),
        breaking=breaking_curve(run, counts.seeds),
        rounds=_rounds(rounds),
        layers=_layers(run, last, layer_sensitivity(run, progress), mean_signature(run)),
        normality=None if ended.get("normality") is None else Normality(**ended["normality"]),
        seconds=phase_seconds(summary, progress),
        kinds=ended.get("kinds", {}),
        criterion=_criterion(ended),
        config=_config(run),
        environment=[(name, as_text(value)) for name, value in run.record["environment"].items()],
        reproduce=_commands(run, state, last),
    )


def _subject(run: Reader) -> str:
    """The model under test, by the name that the user gave."""
    origin = run.record["origin"] or {}
    return str(origin.get("zoo") or origin.get("model") or "a model built in Python")


def _counts(run: Reader, last: Round | None, start: dict[str, Any]) -> Counts:
    faults, distinct_faults, failing_seeds = (
        (0, 0, 0) if last is None else (last.faults, last.distinct_faults, last.failing_seeds)
    )
    if last is None or run.count() > last.faults:  # the current round has found more
        totals = "count(*), count(DISTINCT seed_id || ':' || answer), count(DISTINCT seed_id)"
        [(faults, distinct_faults, failing_seeds)] = run.select(totals, order="1")
    return Counts(
        tests=0 if last is None else last.tests,
        dropped=0 if last is None else last.dropped,
        passes=0 if last is None else last.passes,
        faults=faults,
        distinct_faults=distinct_faults,
        failing_seeds=failing_seeds,
        seeds=start.get("n_usable", 0),
        seeds_given=start.get("n_seeds", 0),
        neurons=start.get("n_neurons", 0),
        layers=len(start.get("layers", ())),
    )


def _coverage(summary: dict[str, Any], last: Round | None) -> CoverageRow | None:
    if last is None:
        return None
    coverage, interval = last.coverage, summary.get("coverage_interval")
    return CoverageRow(
        sampled=coverage.sampled,
        all=coverage.all,
        interval=None if interval is None else Estimate(**interval),
        uniform=summary.get("coverage_uniform"),
        forecast=coverage.forecast,
        dead=coverage.n_dead,
        unseen=coverage.n_unseen,
        caution=summary.get("coverage_caution"),
    )


def _reach(last: Round | None) -> ReachRow | None:
    if last is None or last.reachable_faults is None or last.reachable_seeds is None:
        return None
    faults, seeds, forecast = last.reachable_faults, last.reachable_seeds, last.forecast_faults_tests
    return ReachRow(last.distinct_faults, faults, last.failing_seeds, seeds, forecast)


def _criterion(summary: dict[str, Any]) -> CriterionScore | None:
    criterion = summary.get("criterion")
    if criterion is None:
        return None
    return CriterionScore(*(criterion[field.name] for field in fields(CriterionScore)))


def _known_answers(matrix: AnswerMatrix, columns: dict[str, list[Any]]) -> list[int]:
    """Every answer, outcome and label that the page may have to name."""
    known = {answer for answer in (*matrix.rows, *matrix.columns) if isinstance(answer, int)}
    for column in (columns[name] for name in ("answer", "clean_answer", "label")):
        known |= {answer for answer in column if answer is not None}
    return sorted(known)


def _rounds(rounds: Sequence[Round]) -> list[RoundRow]:
    """The points of the curves: all rounds, or every n-th and the last if there are more than `MAX_ROUNDS`."""
    step = -(-len(rounds) // MAX_ROUNDS) or 1
    points = [point for k, point in enumerate(rounds) if k % step == 0 or k == len(rounds) - 1]
    return [
        RoundRow(
            number=point.number,
            tests=point.tests,
            coverage=point.coverage.sampled,
            coverage_all=point.coverage.all,
            faults=point.faults,
            distinct_faults=point.distinct_faults,
            seconds=round(point.seconds, 3),
            criterion=rounded(point.criterion_score),
        )
        for point in points
    ]


def _layers(
    run: Reader, last: Round | None, sensitivity: dict[str, SensitivitySpread], shares: Sequence[float]
) -> list[LayerRow]:
    layers = run.record.get("start", {}).get("layers", ())
    return [
        LayerRow(
            name=layer["name"],
            neurons=layer["n_neurons"],
            coverage=None if last is None else last.coverage.by_layer.get(layer["name"]),
            sensitivity=sensitivity.get(layer["name"]),
            share=shares[k] if k < len(shares) else None,
        )
        for k, layer in enumerate(layers)
    ]


def _read_groups(run: Reader) -> tuple[list[GroupRow], dict[int, int]]:
    """The groups of related faults, and the group of each fault by its id."""
    from themis.runs.analysis.groups import group

    faults = run.faults()
    groups = [entry.as_dict() for entry in group(faults)] if len(faults) else []
    rows = [GroupRow(entry["text"], entry["faults"], entry["seeds"]) for entry in groups]
    return rows, {id: k for k, entry in enumerate(groups) for id in entry["ids"]}


def _config(run: Reader) -> list[tuple[str, str]]:
    origin = {name: value for name, value in (run.record["origin"] or {}).items() if value not in (None, "", [])}
    values = {**origin, "perturb": run.record["perturbation"], **run.record["settings"]}
    if "bounds" in values and "start" in run.record:
        values["bounds"] = run.record["start"]["bounds"]  # the model may have bounds of its own
    return [(name, as_text(value)) for name, value in values.items()]


def _next_step(run: Reader, state: str, last: Round | None, gates: RecordedGates | None) -> ShellCommand | None:
    """The command that pays off most, judging by what the campaign has shown."""
    folder = quote(str(run.path))
    if state in ("interrupted", "killed", "failed"):
        return ShellCommand(f"themis resume {folder}", "Resume the campaign where it stopped")
    if state == "running" or last is None:
        return None
    if not last.faults and gates is None:
        return ShellCommand(f"themis gate {folder} --max-fault-rate 0.05", "Check the run against a limit of yours")
    if not last.faults or run.record["origin"] is None:
        return ShellCommand(f"themis faults {folder} --distinct", "List the faults") if last.faults else None
    if (more := last.forecast_faults_tests) and last.recall is not None and last.recall < 0.9:
        n = int(float(f"{last.tests + more:.2g}"))
        purpose = "Find 95% of the distinct faults within reach"
        return ShellCommand(f"themis resume {folder} --max-tests {n}", purpose)
    return ShellCommand(f"themis shrink {folder} --curve", "Find the smallest disturbances that still break the model")


def _commands(run: Reader, state: str, last: Round | None) -> list[ShellCommand]:
    folder, commands = quote(str(run.path)), []
    if run.record["origin"] is not None:
        commands.append(
            ShellCommand(f"themis run --config {folder}/config.yaml --out again", "Run the same campaign again")
        )
    if state in ("interrupted", "killed", "failed"):
        commands.append(ShellCommand(f"themis resume {folder}", "Resume the campaign where it stopped"))
    if last is not None and last.faults:
        commands.append(ShellCommand(f"themis faults {folder}", "List, sort and export the faults"))
        commands.append(
            ShellCommand(f"themis shrink {folder} --curve", "Find the smallest disturbances that still break the model")
        )
    return commands
