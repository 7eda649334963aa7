"""All that a report shows, as plain data, from the run folder alone: while a campaign runs, and however it ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.report.breaking import breaking_strengths
from themis.report.inputs import read_inputs
from themis.report.names import class_names, feature_names, outcome_names, plain, task_of
from themis.report.rows import answer_matrix, mean_signature, read_rows, short
from themis.report.verdict import verdict
from themis.runs.estimates import (
    layer_sensitivity,
    phase_seconds,
    rates_by_theta,
    read_checkpoint,
    uniform_estimates,
)
from themis.version import __version__

if TYPE_CHECKING:
    from themis.runs.run import Round
    from themis.runs.store.reader import Reader

VIEW = 1
"""Version of this data."""
MOST_PICTURES = 1000
MOST_ROUNDS = 400
"""Rounds that a curve has points for."""


def read_view(
    run: Reader | str | Path, *, most_pictures: int = MOST_PICTURES, has_groups: bool | None = None
) -> dict[str, Any]:
    """Everything a page shows of a run, as data that JSON can hold.

    most_pictures: faults shown with their inputs. has_groups: whether faults are put into groups, by default once the
    campaign has ended.
    """
    if isinstance(run, str | Path):
        from themis.runs.store.reader import Reader

        with closing(Reader(run, is_brief=True)) as opened:
            return read_view(opened, most_pictures=most_pictures, has_groups=has_groups)
    summary = run.summary()
    state = run.state(summary)
    checkpoint, rounds = read_checkpoint(run), run.rounds()
    start, task = run.record.get("start", {}), task_of(run)
    last = rounds[-1] if rounds else None
    n_faults = run.count()  # before the rows: a campaign that runs adds to them
    listed = read_rows(run)
    columns = listed["columns"]
    classes = class_names(run)
    kept = [k for k, is_kept in enumerate(columns["kept"]) if is_kept]
    at = {name: [columns[name][k] for k in kept] for name in ("id", "seed_id")}
    matrix = answer_matrix(run)
    seen = {each for names in (matrix["rows"], matrix["columns"]) for each in names if isinstance(each, int)}
    seen |= {each for name in ("answer", "clean_answer", "label") for each in columns[name] if each is not None}
    estimates = uniform_estimates(checkpoint) if summary is None else summary
    groups = _groups(run) if (state != "running" if has_groups is None else has_groups) else []
    columns["group"] = _group_of(columns["id"], groups)
    view = {
        "view": VIEW,
        "version": __version__,
        "run": str(run.path),
        "state": state,
        "task": task,
        "fault": start.get("fault"),
        "perturbation": run.record["perturbation"],
        "subject": _subject(run),
        "theta": run.record["theta"],
        "counts": _counts(run, last, start),
        "stop": run.stop_sentence(summary, state),
        "stop_reason": None if summary is None else summary["stop_reason"],
        "fault_rate": estimates["fault_rate"],
        "residual_risk": estimates["residual_risk"],
        "coverage": _coverage(summary, last),
        "clean": {name: start.get(f"clean_{name}") for name in ("accuracy", "error", "iou")},
        "outcomes": outcome_names(task, sorted(seen), classes),
        "answers": _answers(task, sorted(seen), classes),
        "faults": {**listed, "n": max(n_faults, listed["n_listed"])},
        "groups": [{key: each[key] for key in ("text", "faults", "seeds")} for each in groups],
        "inputs": read_inputs(run, at["id"], at["seed_id"], most_pictures, feature_names(run)),
        "matrix": matrix,
        "rates": rates_by_theta(run, checkpoint),
        "has_dropped": bool(last and last.dropped),
        "breaking": breaking_strengths(run, start.get("n_usable", 0)),
        "rounds": _rounds(rounds),
        "goal": run.record["settings"].get("coverage"),
        "layers": _layers(run, last, layer_sensitivity(run, checkpoint), mean_signature(run)),
        "normality": None if summary is None else summary["normality"],
        "seconds": phase_seconds(summary, checkpoint),
        "kinds": {} if summary is None else summary["kinds"],
        "criterion": None if summary is None else summary["criterion"],
        "config": _config(run),
        "environment": [[name, plain(value)] for name, value in run.record["environment"].items()],
        "reproduce": _commands(run, state, last),
    }
    return {**view, "verdict": verdict(view)}


def _subject(run: Reader) -> str:
    """What was tested, by the name it was given."""
    origin = run.record["origin"] or {}
    return str(origin.get("zoo") or origin.get("model") or "a model made in Python")


def _counts(run: Reader, last: Round | None, start: dict[str, Any]) -> dict[str, int]:
    names = ("tests", "dropped", "passes", "faults", "distinct_faults", "failing_seeds")
    counts = {name: 0 if last is None else int(getattr(last, name)) for name in names}
    if last is None or run.count() > last.faults:  # of a round that is not over
        distinct = "count(*), count(DISTINCT seed_id || ':' || answer), count(DISTINCT seed_id)"
        [(faults, n_distinct, seeds)] = run.select(distinct, order="1")
        counts |= {"faults": faults, "distinct_faults": n_distinct, "failing_seeds": seeds}
    counts |= {"seeds": start.get("n_usable", 0), "seeds_given": start.get("n_seeds", 0)}
    return counts | {"neurons": start.get("n_neurons", 0), "layers": len(start.get("layers", ()))}


def _coverage(summary: dict[str, Any] | None, last: Round | None) -> dict[str, Any] | None:
    if last is None:
        return None
    judged = last.coverage
    return {
        "sampled": judged.sampled,
        "all": judged.all,
        "interval": None if summary is None else summary["coverage_interval"],
        "uniform": None if summary is None else summary["coverage_uniform"],
        "forecast": judged.forecast,
        "dead": judged.n_dead,
        "unseen": judged.n_unseen,
    }


def _rounds(rounds: list[Round]) -> list[dict[str, Any]]:
    """Points of the curves; of very many rounds every so-manieth, and the last."""
    step = -(-len(rounds) // MOST_ROUNDS) or 1
    chosen = [each for k, each in enumerate(rounds) if k % step == 0 or k == len(rounds) - 1]
    return [
        {
            "number": each.number,
            "tests": each.tests,
            "coverage": each.coverage.sampled,
            "coverage_all": each.coverage.all,
            "faults": each.faults,
            "distinct_faults": each.distinct_faults,
            "seconds": round(each.seconds, 3),
            "criterion": short(each.criterion_score),
        }
        for each in chosen
    ]


def _layers(
    run: Reader, last: Round | None, sensitivity: dict[str, list[float]], shares: list[float]
) -> list[dict[str, Any]]:
    found = []
    for k, each in enumerate(run.record.get("start", {}).get("layers", ())):
        coverage = None if last is None else last.coverage.by_layer.get(each["name"])
        share = shares[k] if k < len(shares) else None
        moved = sensitivity.get(each["name"])
        row = {"name": each["name"], "neurons": each["n_neurons"], "coverage": coverage}
        found.append({**row, "sensitivity": moved, "share": share})
    return found


def _groups(run: Reader) -> list[dict[str, Any]]:
    from themis.runs.analysis.group import group

    faults = run.faults()
    return [each.as_dict() for each in group(faults)] if len(faults) else []


def _group_of(ids: list[int], groups: list[dict[str, Any]]) -> list[int]:
    of = {id: k for k, each in enumerate(groups) for id in each["ids"]}
    return [of.get(id, -1) for id in ids]


def _answers(task: str, seen: list[int], classes: list[str] | None) -> dict[str, str]:
    """Answers to clean inputs, in tasks whose outcome is an answer."""
    return outcome_names(task if task in ("wrong", "changed", "top5", "threshold") else "wrong", seen, classes)


def _config(run: Reader) -> list[list[str]]:
    origin = {name: value for name, value in (run.record["origin"] or {}).items() if value not in (None, "", [])}
    values = {**origin, "perturb": run.record["perturbation"], **run.record["settings"]}
    return [[name, plain(value)] for name, value in values.items()]


def _commands(run: Reader, state: str, last: Round | None) -> list[list[str]]:
    """What to type, and what it does."""
    folder, commands = quote(str(run.path)), []
    if run.record["origin"] is not None:
        commands.append([f"themis run --config {folder}/config.yaml --out again", "The same campaign once more"])
    if state in ("interrupted", "killed", "failed"):
        commands.append([f"themis resume {folder}", "Go on where it stopped"])
    if last is not None and last.faults:
        commands.append([f"themis faults {folder}", "List, sort and export the faults"])
        commands.append([f"themis shrink {folder} --curve", "The smallest disturbances that still break the model"])
    return commands
