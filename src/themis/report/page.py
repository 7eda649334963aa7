"""The report of a run: its contents, and the page as one HTML file that needs no network connection."""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from itertools import chain
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from themis.reading import items, number, optional, read_json, record, text, whole
from themis.report.gates.results import read_gates
from themis.report.names import FeatureChanges, as_text, describe_settings, feature_changes, feature_names, subject_of
from themis.runs import estimates
from themis.runs.analysis.groups import group
from themis.runs.analysis.review import read_review
from themis.runs.display.fault import (
    MAX_PICTURE_SIDE,
    MAX_SIDE_WITH_BOXES,
    curves,
    data_uri,
    is_clip,
    is_picture,
    is_signal,
    side_by_side,
    stored_boxes,
    to_pixels,
    with_boxes,
)
from themis.runs.display.text import CleanScores, Counts, describe_calibration, write_verdict
from themis.runs.fault import PLAIN_COLUMNS, name_answer, name_outcome
from themis.runs.run import Round, describe_profile, record_covers_neurons, worst_slices
from themis.runs.store.files import REPLACE_REMEDY, check_free, json_safe, write_fresh
from themis.runs.store.reader import TELLING_PLACE, TELLING_SCORE, Reader
from themis.runs.store.schema import SIGNATURE_UNITS, theta_column
from themis.runs.store.tensors import Tensors
from themis.version import __version__

MAX_PICTURES = 1000
MAX_ROUNDS = 400
"""Points of a curve over rounds."""
MAX_ROWS = 20_000
"""Faults that a page lists, the most telling first."""
MAX_LISTED_ANSWERS = 24
"""Rows and columns of the answer matrix; rarer answers share one further row or column."""
OTHER_ANSWERS = "other"
_INTEGERS = ("id", "seed_id", "round", "label", "clean_answer", "answer")
_REALS = tuple(column.name for column in PLAIN_COLUMNS if column.type == "float")
DETAIL_COLUMNS = [(column.name, column.title) for column in PLAIN_COLUMNS if column.title]
"""The columns among the details of a fault, with their labels on the page."""


@dataclass(frozen=True)
class ShellCommand:
    """A command that a reader of the report can run, and its purpose."""

    command: str
    purpose: str


class ReportView(SimpleNamespace):
    """The contents of a report, by the names that the script of the page uses; `read_view` explains them."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`, as the script of the page reads it."""
        return dict(json_safe(vars(self)))


def read_view(run: Reader | str | Path, *, most_pictures: int = MAX_PICTURES) -> ReportView:
    """Read the contents of a run's report, with the inputs of the first `most_pictures` faults."""
    if isinstance(run, str | Path):
        with closing(Reader(run, is_brief=True)) as opened:
            return read_view(opened, most_pictures=most_pictures)
    summary = run.summary()
    ended = summary or {}
    state = run.state(summary)
    progress, rounds = estimates.read_progress(run), run.rounds()
    start, task, classes = run.start, run.task, run.classes
    last = rounds[-1] if rounds else None
    related = group(run.faults()) if state != "running" and run.count() else []
    faults = read_rows(run, {id: k for k, entry in enumerate(related) for id in entry.ids})
    kept = [k for k, is_kept in enumerate(faults.columns["kept"]) if is_kept]
    kept_ids, kept_seeds = ([column[k] for k in kept] for column in (faults.columns["id"], faults.columns["seed_id"]))
    matrix = answer_matrix(run)
    known = estimates.known_figures(run.record, summary, progress, rounds)
    slices, decision, rate = known["slices"], known["decision"], known["fault_rate"]
    named = chain(
        matrix["rows"], matrix["columns"], *(faults.columns[name] for name in ("answer", "clean_answer", "label"))
    )
    answers = sorted({answer for answer in named if isinstance(answer, int)})  # that the page may have to name
    counts = _counts(run, last)
    clean = CleanScores(*(start.get(f"clean_{field.name}") for field in fields(CleanScores)))
    perturbation, origin = run.record["perturbation"], run.record["origin"]
    if origin is not None and start:
        origin = {**origin, "bounds": start["bounds"]}  # the model may have bounds of its own
    gates = read_gates(run.path, counts.tests)
    review = read_review(run)
    advice, commands = _commands(run, state, last, gates)
    return ReportView(
        run=str(run.path),
        state=state,  # running, ended, interrupted, failed or killed
        task=task,
        fault=start.get("fault"),  # what counts as one, in words
        slight=start.get("slight"),  # that the perturbation hardly changes the inputs, if so
        perturbation=perturbation,
        subject=subject_of(run.record),  # the name of the model
        theta=run.record["theta"],
        counts=counts,
        verdict=write_verdict(
            perturbation, task, counts, clean, rate, constant=start.get("constant"), is_running=state == "running"
        ),
        stop=run.stop_sentence(summary, state),
        decision=decision and decision.clause,  # with --decide
        fault_rate=rate,
        profile=describe_profile(run.record["theta"], run.record["settings"].get("seed_weights")),
        review=review and {"text": review.text, "counts": review.counts, **review.as_dict()},  # None without marks
        agreements=[str(agreement) for agreement in review.agreements] if review else [],
        residual_risk=known["residual_risk"],
        reach=_reach(last),
        coverage=_coverage(ended, last),
        covers_neurons=record_covers_neurons(run.record),
        goal=run.record["settings"].get("coverage"),  # at which the campaign stops
        clean=clean,
        left_out=start.get("left_out"),  # why some seeds are not tested, in words
        outcomes={answer: name_outcome(task, answer, classes) for answer in answers},  # of disturbed inputs
        answers={answer: name_answer(task, answer, classes) for answer in answers},  # to clean inputs
        faults=faults,
        gates=gates,  # None if there were none, or if the run has run more tests since
        next=advice,
        groups=[{"text": entry.text, "faults": len(entry), "seeds": entry.n_seeds} for entry in related],
        inputs=read_inputs(run, kept_ids, kept_seeds, most_pictures, feature_names(run)),
        matrix=matrix,
        rates=estimates.rates_by_theta(run, progress),
        strengths=known["correct_by_strength"],
        calibration=describe_calibration(known["calibration"]),
        slices=slices,
        worst_slices=[rate.name for rate in worst_slices(slices, rate)],
        has_dropped=bool(last and last.dropped),
        breaking=breaking_curve(run, counts.seeds),
        rounds=_rounds(rounds),
        layers=_layers(run, last, estimates.layer_sensitivity(run, progress), faults.shares),
        normality=ended.get("normality"),
        seconds=known["seconds"],
        kinds=ended.get("kinds", {}),  # tests and faults by kind of proposal
        criterion=ended.get("criterion"),
        config=describe_settings(origin, {"perturb": perturbation, **run.record["settings"]}),
        environment=[(name, as_text(value)) for name, value in run.record["environment"].items()],
        reproduce=commands,
        version=__version__,
    )


def _counts(run: Reader, last: Round | None) -> Counts:
    counts = Counts.of(last, run.start)
    if run.count() <= counts.faults:
        return counts
    counted = "count(*), count(DISTINCT seed_id || ':' || answer), count(DISTINCT seed_id)"
    [totals] = run.select(counted, order="1")  # the current round has found more
    return replace(counts, **dict(zip(("faults", "distinct_faults", "failing_seeds"), totals, strict=True)))


def _coverage(summary: dict[str, Any], last: Round | None) -> dict[str, Any] | None:
    if last is None:
        return None
    known, counts = last.coverage, {"dead": last.coverage.n_dead, "unseen": last.coverage.n_unseen}
    at_end = {name: summary.get(f"coverage_{name}") for name in ("interval", "uniform", "caution")}
    return {"sampled": known.sampled, "all": known.all, "forecast": known.forecast, **counts, **at_end}


def _reach(last: Round | None) -> dict[str, Any] | None:
    if last is None or last.reachable_faults is None or last.reachable_seeds is None:
        return None
    return {
        "found": last.distinct_faults,
        "faults": last.reachable_faults,
        "seeds": last.reachable_seeds,
        "forecast": last.forecast_faults_tests,
    }


def _rounds(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """The points of the curves: all rounds, or every n-th round and the last if there are more than `MAX_ROUNDS`."""
    step = -(-len(rounds) // MAX_ROUNDS) or 1
    return [
        {
            **{name: getattr(point, name) for name in ("number", "tests", "distinct_faults")},
            "coverage": point.coverage.sampled,
            "coverage_all": point.coverage.all,
            "seconds": round(point.seconds, 3),
        }
        for k, point in enumerate(rounds)
        if k % step == 0 or k == len(rounds) - 1
    ]


def _layers(
    run: Reader, last: Round | None, sensitivity: dict[str, estimates.SensitivitySpread], shares: Sequence[float]
) -> list[dict[str, Any]]:
    return [
        {
            "name": layer["name"],
            "neurons": layer["n_neurons"],
            "coverage": None if last is None else last.coverage.by_layer.get(layer["name"]),
            "sensitivity": sensitivity.get(layer["name"]),
            "share": shares[k] if k < len(shares) else None,
        }
        for k, layer in enumerate(run.start.get("layers", ()))
    ]


def _commands(
    run: Reader, state: str, last: Round | None, gates: dict[str, Any] | None
) -> tuple[ShellCommand | None, list[ShellCommand]]:
    """The most useful next command, given the result of the campaign, and all commands that a reader may want."""
    folder, has_faults, has_origin = quote(str(run.path)), bool(last and last.faults), run.record["origin"] is not None
    again = ShellCommand(f"themis run --config {folder}/config.yaml --out again", "Run the same campaign again")
    resume = ShellCommand(f"themis resume {folder}", "Resume the campaign where it stopped")
    faults = ShellCommand(f"themis faults {folder}", "List, sort and export the faults")
    shrink = ShellCommand(f"themis shrink {folder} --curve", "Find the smallest disturbances that break the model")
    is_cut_short = state in ("interrupted", "killed", "failed")
    commands = [*([again] if has_origin else []), *([resume] if is_cut_short else [])]
    commands += [faults, shrink] if has_faults else []
    if is_cut_short:
        return resume, commands
    if state == "running" or last is None:
        return None, commands
    if not has_faults:
        limit = ShellCommand(f"themis gate {folder} --max-fault-rate 0.05", "Check the run against a limit of yours")
        return limit if gates is None else None, commands
    if not has_origin:
        return ShellCommand(f"themis faults {folder} --distinct", "List the faults"), commands
    if (more := last.forecast_faults_tests) and last.recall is not None and last.recall < 0.9:
        n = int(float(f"{last.tests + more:.2g}"))
        purpose = "Find 95% of the distinct faults within reach"
        return ShellCommand(f"themis resume {folder} --max-tests {n}", purpose), commands
    return shrink, commands


# The faults as columns that the page filters, sorts and shows


@dataclass(frozen=True)
class FaultRows:
    """The faults that a page lists."""

    columns: dict[str, list[Any]]
    """One value per column and listed fault; None if it is unknown or not finite.

    These are columns of a fault, `theta` with one column per dimension, and `strength`; `uniform`, 1 for faults of the
    uniform stream; `layer`, the index of the layer with the largest share of the sensitivity; `kept`, 1 if the input
    was stored; `group`, the index of the group of related faults, or -1."""
    n: int
    """The number of faults of the run."""
    n_listed: int
    shares: list[float]
    """The share of the sensitivity in each layer, averaged over the listed faults."""
    details: list[tuple[str, str]] = field(default_factory=lambda: DETAIL_COLUMNS)


def read_rows(run: Reader, groups: Mapping[int, int], max_rows: int = MAX_ROWS) -> FaultRows:
    """The columns of the most telling faults, with rounded numbers. `groups` maps fault ids to groups."""
    theta = [theta_column(name) for name in run.theta]
    names = [*_INTEGERS, *_REALS, "stream", "kind", "signature", "tensors", *theta]
    n = run.count()  # before the rows: a running campaign adds to them
    rows = run.select(", ".join(names), order=f"{TELLING_PLACE}, {TELLING_SCORE}, id", limit=max_rows)
    stored = {name: [row[k] for row in rows] for k, name in enumerate(names)}
    strength, shares = np.zeros(0), np.zeros((0, 0))
    if rows:
        values = np.array([stored[name] for name in theta], dtype=np.float64).T
        strength, _ = estimates.strengths(values, run.record["theta"])
        shares = np.array([json.loads(signature) for signature in stored["signature"]]) / SIGNATURE_UNITS
    columns: dict[str, list[Any]] = {
        **{name: stored[name] for name in (*_INTEGERS, "kind")},
        **{name: [rounded(value) for value in stored[name]] for name in _REALS},
        "theta": [[rounded(value) for value in stored[name]] for name in theta],
        "uniform": [int(stream == "uniform") for stream in stored["stream"]],
        "layer": shares.argmax(1).tolist() if shares.size else [0] * len(rows),
        "kept": [int(tensors is not None) for tensors in stored["tensors"]],
        "strength": [rounded(value) for value in strength.tolist()],
        "group": [groups.get(id, -1) for id in stored["id"]],
    }
    mean = [float(f"{share:.4g}") for share in shares.mean(0).tolist()] if rows else []
    return FaultRows(columns, max(n, len(rows)), len(rows), mean)


def answer_matrix(run: Reader) -> dict[str, list[Any]]:
    """The numbers of distinct faults and of all faults by clean answer (row, may be None) and wrong answer (column)."""
    counts = run.select(
        "clean_answer, answer, count(DISTINCT seed_id), count(*)", "1 GROUP BY clean_answer, answer", order="1, 2"
    )
    rows = _most_frequent([(clean, n) for clean, _, n, _ in counts])
    columns = _most_frequent([(answer, n) for _, answer, n, _ in counts])
    distinct, faults = ([[0] * len(columns) for _ in rows] for _ in range(2))
    for clean, answer, n_distinct, n in counts:
        r = rows.index(clean if clean in rows else OTHER_ANSWERS)
        c = columns.index(answer if answer in columns else OTHER_ANSWERS)
        distinct[r][c] += n_distinct
        faults[r][c] += n
    return {"rows": rows, "columns": columns, "distinct": distinct, "faults": faults}


def _most_frequent(pairs: Iterable[tuple[int | None, int]]) -> list[Any]:
    """The most frequent answers in ascending order, followed by `OTHER_ANSWERS` if there are more."""
    totals: Counter[int | None] = Counter()
    for answer, n in pairs:
        totals[answer] += n
    ordered = [answer for answer, _ in totals.most_common(MAX_LISTED_ANSWERS)]
    ordered.sort(key=lambda answer: -2 if answer is None else answer)
    return [*ordered, OTHER_ANSWERS] if len(totals) > MAX_LISTED_ANSWERS else [*ordered]


def rounded(value: float | None) -> float | None:
    """The value with five digits; None if it is not finite, which JSON cannot hold."""
    if value is None or not np.isfinite(value):
        return None
    return float(f"{value:.5g}")


SHRUNK_FILE = "shrunk.json"
MAX_POINTS = 120
_POINTS = items(number())
_CURVE = record(
    {
        **dict.fromkeys(("strengths", "share", "low", "high"), _POINTS),
        **dict.fromkeys(("failed", "seeds"), whole()),
        **dict.fromkeys(("caveat", "strength_1"), text()),
        "median": optional(number()),
    }
)


def _check_curve(curve: Any, place: str) -> None:
    _CURVE(curve, place)
    if len({len(curve[name]) for name in ("strengths", "share", "low", "high")}) > 1:
        raise ValueError("the columns of its curve must have one length")


_SHRUNK = record({}, {"robustness": optional(_check_curve)})
UNSHRUNK_CAVEAT = (
    "The curve uses the weakest fault of each seed as the campaign found it. Weaker disturbances may break seeds too; "
    "themis shrink --curve searches for them."
)


def breaking_curve(run: Reader, n_seeds: int) -> dict[str, Any] | None:
    """The points (strength, share of seeds not broken up to it), with the ends of the 95% interval if it is known.

    They come from `themis shrink --curve` if it was run, otherwise from the faults as found. None without faults.
    """
    problem = "is damaged ({}): remove it, and write it again with themis shrink"
    shrunk = read_json(run.path / SHRUNK_FILE, _SHRUNK, problem) or {}
    if curve := shrunk.get("robustness"):
        columns = (curve["strengths"], curve["share"], curve["low"], curve["high"])
        points = [[0.0, 1.0, 1.0, 1.0], *map(list, zip(*columns, strict=True))]
        source = f"{curve['failed']:,} of {curve['seeds']:,} seeds broke, each at its least strength. {curve['caveat']}"
        return {
            "source": source,
            "points": _thinned(points),
            "unit": curve["strength_1"],  # what strength 1 is
            "median": curve["median"],  # the strength at which half of the seeds have broken
        }
    weakest = _weakest(run)
    if not weakest or not n_seeds:
        return None
    points = [[0.0, 1.0], *([strength, 1 - (k + 1) / n_seeds] for k, strength in enumerate(weakest))]
    points.append([1.0, points[-1][1]])
    median = next((strength for strength, share in points if share <= 0.5), None)
    return {"source": UNSHRUNK_CAVEAT, "points": _thinned(points), "unit": "", "median": median}


def _weakest(run: Reader) -> list[float]:
    """The smallest strength that broke each failing seed, ascending."""
    columns = ", ".join(["seed_id", *(theta_column(name) for name in run.theta)])
    weakest: dict[float, float] = {}
    for rows in run.batches(f"{columns} FROM faults ORDER BY id"):
        table = np.array(rows, dtype=np.float64)
        strengths, _ = estimates.strengths(table[:, 1:], run.record["theta"])
        for seed, strength in zip(table[:, 0].tolist(), strengths.tolist(), strict=True):
            weakest[seed] = min(weakest.get(seed, np.inf), strength)
    return sorted(weakest.values())


def _thinned(points: list[list[float]]) -> list[list[float | None]]:
    """At most `MAX_POINTS` of the points, with the first and the last, rounded."""
    kept = np.unique(np.linspace(0, len(points) - 1, min(len(points), MAX_POINTS)).round().astype(int))
    return [list(map(rounded, points[k])) for k in kept.tolist()]


# The inputs of faults: pictures, or the features that changed

MAX_PICTURE_BYTES = 4 << 20
"""Size of all pictures of a page together; those of the most telling faults come first."""
STRIP_SIDE = 4 * MAX_PICTURE_SIDE
"""Pixels of the longer side of the frames of a clip, side by side."""
INPUTS_PER_READ = 250


@dataclass(frozen=True)
class ShownInputs:
    """Clean pictures by seed id and disturbed ones by fault id, as data URIs, or the changed features.

    The picture of a disturbed signal includes the clean one.
    """

    kind: str = "none"
    """pictures, clips, signals, features or none."""
    shape: tuple[int, ...] | None = None
    clean: dict[int, str] = field(default_factory=dict)
    disturbed: dict[int, str] = field(default_factory=dict)
    changes: dict[int, FeatureChanges] = field(default_factory=dict)


def read_inputs(
    run: Reader, ids: Sequence[int], seed_ids: Sequence[int], max_faults: int, names: Sequence[str] | None
) -> ShownInputs:
    """The stored inputs of the first `max_faults` faults; `names`: the names of a table's features."""
    kind, shape, size = "none", None, 0
    clean: dict[int, str] = {}
    disturbed: dict[int, str] = {}
    changes: dict[int, FeatureChanges] = {}
    for id, seed_id, tensors in _stored(run, ids[:max_faults], seed_ids):
        shape = tuple(tensors.inputs.shape[1:])
        if is_signal(shape):
            kind, disturbed[id] = "signals", data_uri(curves(tensors.clean_inputs[0], tensors.inputs[0]))
        elif is_picture(shape) or is_clip(shape):
            kind, bounds = "clips" if is_clip(shape) else "pictures", tuple(run.record["start"]["bounds"])
            boxes = None
            if tensors.clean_outputs is not None and is_picture(shape):
                boxes = stored_boxes(tensors, run.record["start"]["oracle"])
            disturbed[id] = _draw(tensors.inputs, bounds, boxes and boxes[1])
            if seed_id not in clean:
                clean[seed_id] = _draw(tensors.clean_inputs, bounds, boxes and boxes[0])
                size += len(clean[seed_id])
        else:
            kind, changes[id] = "features", feature_changes(tensors, names, run.record)
        size += len(disturbed.get(id, ""))
        if size > MAX_PICTURE_BYTES:
            break
    return ShownInputs(kind, shape, clean, disturbed, changes)


def _stored(run: Reader, ids: Sequence[int], seed_ids: Sequence[int]) -> Iterator[tuple[int, int, Tensors]]:
    """The faults whose inputs are stored, with their seeds."""
    for first in range(0, len(ids), INPUTS_PER_READ):
        batch = ids[first : first + INPUTS_PER_READ]
        stored = run.tensors(batch)
        for id, seed_id in zip(batch, seed_ids[first:], strict=False):
            if id in stored:
                yield id, seed_id, stored[id]


def _draw(inputs: Tensor, bounds: tuple[float, float], boxes: Tensor | None = None) -> str:
    if boxes is not None:
        height, width = inputs.shape[2:]
        return data_uri(with_boxes(to_pixels(inputs, bounds, MAX_SIDE_WITH_BOXES)[0], boxes, (height, width)))
    if not is_clip(tuple(inputs.shape[1:])):
        return data_uri(to_pixels(inputs, bounds)[0])
    return data_uri(to_pixels(side_by_side(inputs[0], bounds[1])[None], bounds, STRIP_SIDE)[0])


# The page

REPORT_FILE = "report.html"
SCRIPTS = ("elements.js", "charts.js", "sections.js", "gallery.js", "boot.js")
_UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def render(view: ReportView, *, live: str | None = None) -> str:
    """The HTML page of a view; with `live`, the page fetches the view again from that address every two seconds."""
    return render_page(f"{view.perturbation} on {view.subject}", view.as_json(), SCRIPTS, live=live)


def render_page(title: str, view: dict[str, Any], scripts: tuple[str, ...], *, live: str | None = None) -> str:
    """An HTML page whose scripts draw a view.

    The view is embedded as JSON, and its texts are inserted as text, never as HTML. The content security policy allows
    only these scripts and, if `live` is given, requests to the server; nothing else may run or be fetched.
    """
    script, style = _script(scripts), asset("page.css")
    connect = "" if live is None else " connect-src 'self';"
    policy = f"default-src 'none'; img-src data:; style-src {source_of(style)}; script-src {source_of(script)};"
    policy = f"{policy}{connect} base-uri 'none'"
    parts = {
        "title": escape(title),
        "policy": escape(policy, quote=True),
        "style": style,
        "script": script,
        "live": "" if live is None else escape(live, quote=True),
        "view": json.dumps(view, separators=(",", ":"), allow_nan=False, ensure_ascii=False).translate(_UNSAFE),
    }
    pieces = asset("page.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if k % 2 else piece for k, piece in enumerate(pieces))


def write_report(
    run: str | Path, out: Path | None = None, *, most_pictures: int = MAX_PICTURES, replaces: bool = False
) -> Path:
    """Write the report of a run, by default into its folder; return its path. replaces: see `check_free`."""
    path = Path(run) / REPORT_FILE if out is None else Path(out)
    if out is not None:
        check_free(path, replaces=replaces)  # before the work
    remedy = "remove it, or replace it with --force" if out is None else REPLACE_REMEDY
    content = render(read_view(run, most_pictures=most_pictures)).encode("utf-8", "replace")
    write_fresh(path, content, replaces=replaces, remedy=remedy)
    return path


def source_of(text: str) -> str:
    """The hash of a script or a style, as a content security policy names it."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def _script(names: tuple[str, ...]) -> str:
    return "".join(["(() => {\n'use strict';\n", *map(asset, names), "})();\n"])


@cache
def asset(name: str) -> str:
    """The text of a file beside this module, or of `package:file`."""
    package, _, file = name.rpartition(":")
    return (files(package or "themis.report") / file).read_text("utf-8")
