"""`themis faults`: list, sort and export faults. It only reads rows, so it needs neither torch nor a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import FORCE_HELP, ONLY_READ_HELP, Parser, add_option, convert
from themis.errors import UsageError, nearest
from themis.text import own_stream, percent, print_text, printable

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.store.reader import Reader, Selection

HELP = (
    "List the faults of a run, the most telling first: one of every seed and wrong answer before any second one, and "
    "small changes and confident answers before others. In the table, clean and answer are the answers to the clean "
    "and to the disturbed input, distance is Euclidean, stream says whether a test was drawn at random or by the "
    "search, and kept whether its input is stored. If fault numbers are given, print every detail of these faults. The "
    f"run may still be in progress. {ONLY_READ_HELP}"
)
EXAMPLES = """
themis faults runs/first
themis faults runs/first --distinct --min-ssim 0.9 --sort distance
themis faults runs/first --where "theta_sigma < 0.1 and answer = 3" --export found.parquet
themis faults runs/first 1204
"""
FILTERS: dict[str, tuple[Any, str, str]] = {
    "seed": (int, "seed_id = ?", "only faults of the seed with this number"),
    "label": (int, "label = ?", "only faults of seeds with this label"),
    "clean_answer": (int, "clean_answer = ?", "only faults whose clean input has this answer"),
    "answer": (int, "answer = ?", "only faults with this wrong answer; -1 means that the output was not finite"),
    "stream": (str, "stream = ?", "only faults of one stream: uniform (drawn at random) or search (by the policy)"),
    "kind": (str, "kind = ?", "only faults found by this kind of proposal"),
    "round": (int, "round = ?", "only faults found in this round"),
    "min_confidence": (
        float,
        "coalesce(confidence, 1) >= ?",
        "only answers with at least this confidence, such as 0.9; an output that is not finite counts as 1",
    ),
    "min_ssim": (float, "ssim >= ?", "only inputs with at least this similarity (SSIM) to the clean picture"),
    "max_distance": (float, "distance <= ?", "only inputs within this L2 distance of the clean input"),
}
"""Options that select faults: type of the value, condition, help."""
STREAMS = ("uniform", "search")
N_SHOWN, N_DRAWN = 20, 12
HEADERS = {"seed_id": "seed", "clean_answer": "clean", "clean_value": "clean value", "tensors": "kept"}
TEXTS = ("stream", "kind", "kept")
INTERNAL = ("id", "position", "chunk")
"""Columns that matter only to a replay."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("ids", metavar="FAULT", nargs="*", help="number of a fault to describe in detail")
    which = parser.add_argument_group("which faults")
    for name, (kind, _, text) in FILTERS.items():
        add_option(which, name, kind | None, None, text)
    which.add_argument("--distinct", action="store_true", help="only the smallest change per seed and wrong answer")
    which.add_argument("--kept", action="store_true", help="only faults whose input and output were kept")
    which.add_argument(
        "--where",
        metavar="SQL",
        help="only faults that satisfy an SQL condition on the columns of faults in run.sqlite",
    )
    order = parser.add_argument_group("order")
    add_option(order, "sort", str, "telling", "telling, or a column: id, distance, ssim, theta_NAME, ...")
    order.add_argument("--reverse", action="store_true", help="reverse the order")
    output = parser.add_argument_group("output")
    text = f"maximum number of faults, 0 for all (default: {N_SHOWN} in a table, all in JSON and in files)"
    add_option(output, "limit", int | None, None, text)
    output.add_argument("--json", action="store_true", help="print only the faults, as JSON")
    text = (
        f"write the faults as .parquet, .csv, .json, .npz (with tensors) or .png (the first {N_DRAWN} that were kept)"
    )
    output.add_argument("--export", metavar="FILE", help=text)
    output.add_argument("--force", action="store_true", help=FORCE_HELP)


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    from themis.runs.store.reader import Reader

    if arguments.json and arguments.export:
        raise UsageError("--json and --export cannot be combined: --export FILE.json writes JSON to a file")
    with closing(Reader(arguments.run)) as run:
        ids = read_ids(run, arguments.ids)
        selection = _select(run, arguments, ids)
        if arguments.export:
            print_text(_export(run, selection, Path(arguments.export), arguments.force))
        elif arguments.json:
            from themis.runs.store.export import json_text

            own_stream(sys.stdout).writelines(json_text(run, selection.rows(run)))
        elif ids:
            for row in chain.from_iterable(selection.rows(run)):
                print_text(_describe(run, row))
        else:
            _list(run, selection if arguments.limit is not None else replace(selection, limit=N_SHOWN))
    return DONE


def read_ids(run: Reader, words: Sequence[str]) -> list[int]:
    """Read fault numbers; rejects a number that the run does not have."""
    ids = [convert("FAULT", word, int) for word in words]
    for id in ids:
        if not run.count("id = ?", (str(id),)):  # as text, so that no number is too large for SQLite
            raise UsageError(f"the run has no fault {id}: {_nearest_ids(run, id)}")
    return ids


def _nearest_ids(run: Reader, id: int) -> str:
    [(n, first, last)] = run.select("count(*), min(id), max(id)", order="1")
    if not n:
        return f"{run.path} has no faults"
    inside = min(max(id, first), last)
    close = sorted(near for (near,) in run.select("id", order=f"abs(id - {inside})", limit=3))
    return f"the nearest are {', '.join(map(str, close))}; its {n:,} faults have numbers from {first} to {last}"


def _select(run: Reader, arguments: Namespace, ids: list[int]) -> Selection:
    from themis.runs.store.reader import Selection, check_condition

    if arguments.stream is not None and arguments.stream not in STREAMS:
        raise UsageError(f"unknown stream {arguments.stream!r}: {nearest(arguments.stream, STREAMS)}")
    if arguments.limit is not None and arguments.limit < 0:
        raise UsageError(f"limit must be at least 0, got {arguments.limit}: 0 shows all faults")
    filters = {name: value for name in FILTERS if (value := getattr(arguments, name)) is not None}
    conditions, values = [FILTERS[name][1] for name in filters], list(filters.values())
    if ids:
        conditions.append("id IN (SELECT value FROM json_each(?))")
        values.append(json.dumps(ids))
    if arguments.kept:
        conditions.append("tensors IS NOT NULL")
    if arguments.where is not None:
        check_condition(run, arguments.where)
        conditions.append(arguments.where)
    limit = arguments.limit or None
    selection = Selection(conditions, values, arguments.distinct, arguments.sort, arguments.reverse, limit)
    selection.check(run)
    return selection


def _list(run: Reader, selection: Selection) -> None:
    rows = list(chain.from_iterable(selection.rows(run)))
    print_text(_describe_state(run, selection.count(run), len(rows)))
    theta = [name for name in run.columns if name.startswith("theta_")]
    answers = _leave_out_unused(run, rows, ("clean_answer", "answer", "clean_value", "value", "confidence"))
    similarity = _leave_out_unused(run, rows, ("ssim",))
    shown = ["id", "seed_id", *theta, *answers, "distance", *similarity, "stream", "tensors"]
    if selection.sort in run.columns and selection.sort not in shown:
        shown.insert(-1, selection.sort)
    at = [run.columns.index(name) for name in shown]
    headers = [HEADERS.get(name, name.removeprefix("theta_")) for name in shown]
    if rows:
        from themis.report.names import class_names, task_of

        task, classes = task_of(run), class_names(run)
        _print_table(headers, [[_cell(run.columns[k], row[k], task, classes) for k in at] for row in rows])


def _leave_out_unused(run: Reader, rows: list[tuple[Any, ...]], names: Sequence[str]) -> list[str]:
    """The columns that the task of the run uses; faults without a finite output do not show which."""
    finite = [row for row in rows if row[run.columns.index("answer")] >= 0]
    known = {name: any(row[run.columns.index(name)] is not None for row in finite or rows) for name in names}
    return [name for name in names if known[name] or (name == "confidence" and not finite)]


def _describe_state(run: Reader, n_matching: int, n_shown: int) -> str:
    [(tests,)] = run.select("coalesce(max(tests), 0)", order="1", table="rounds")
    n, summary = run.count(), run.summary()
    if summary is None:
        state = "is still running" if run.is_running() else "was killed"
    else:
        state = {"user": "was interrupted", "error": "failed"}.get(summary["stop_reason"], "ended")
    counts = f"{n:,} fault{'s' * (n != 1)}, {n_matching:,} match{'es' * (n_matching == 1)}, {n_shown:,} shown"
    can_resume = state in ("was killed", "was interrupted")
    remedy = f": continue it with themis resume {quote(str(run.path))}" if can_resume else ""
    return f"{counts}; the campaign {state} after {tests:,} tests{remedy}"


def _cell(name: str, value: Any, task: str, classes: list[str] | None) -> str:
    if name == "tensors":
        return "no" if value is None else "yes"
    if value is None:
        return "-"
    if name == "answer":
        from themis.runs.fault import show_outcome

        return show_outcome(task, value, classes)
    if name == "confidence":
        return percent(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _print_table(headers: list[str], rows: list[list[str]]) -> None:
    """Print a table: in colour in a terminal if rich is installed, and as plain text otherwise."""
    if own_stream(sys.stdout).isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(box=None, pad_edge=False, header_style="bold")
            colours = {"clean": "green", "answer": "red", "confidence": "red"}
            for name in headers:
                table.add_column(printable(name), justify="left" if name in TEXTS else "right", style=colours.get(name))
            for row in rows:
                table.add_row(*map(printable, row))
            Console(file=own_stream(sys.stdout)).print(table, markup=False)
            return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = zip(headers, row, widths, strict=True)
        padded = [cell.ljust(width) if name in TEXTS else cell.rjust(width) for name, cell, width in cells]
        print_text("  ".join(padded).rstrip())


def _describe(run: Reader, row: tuple[Any, ...]) -> str:
    """The details of one fault, each with what it means."""
    from themis.report.names import class_names, task_of
    from themis.runs.fault import COLUMNS, show_outcome
    from themis.runs.store.schema import TENSORS, read_signature

    values = dict(zip(run.columns, row, strict=True))
    shares = sorted(zip(read_signature(values["signature"]), run.layers, strict=True), reverse=True)
    values["signature"] = ", ".join(f"{layer} {share:.1%}" for share, layer in shares[:5])
    answer, words = values["answer"], show_outcome(task_of(run), values["answer"], class_names(run))
    if words != str(answer):
        values["answer"] = words if answer < 0 else f"{answer}, {words}"
    if not run.record.get("start", {}).get("criterion"):
        values["raised"] = None
    file = values["tensors"]
    values["tensors"] = "not kept: a replay computes them again" if file is None else run.path / "tensors" / file
    theta = [name for name in run.columns if name.startswith("theta_")]
    known = {column.name: column.text for column in (*COLUMNS, TENSORS)}
    meanings = {name: known["theta" if name in theta else name] for name in run.columns if name not in INTERNAL}
    rows = [(name, _format_exactly(values[name]), text) for name, text in meanings.items() if values[name] is not None]
    rows.append(("replay", f"themis replay {quote(str(run.path))} {values['id']}", ""))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:<{width}}  {value}{f'  ({text})' * bool(text)}" for name, value, text in rows]
    return "\n".join([f"fault {values['id']}", *lines, *([] if file is None else _describe_changes(run, values["id"]))])


def _describe_changes(run: Reader, id: int) -> list[str]:
    """The features of a table row that changed, with their values before and after; nothing for other inputs."""
    from themis.report.inputs import feature_changes
    from themis.report.names import feature_names

    tensors = run.tensors([id]).get(id)
    if tensors is None or tensors.inputs.ndim != 2:
        return []
    changes = feature_changes(tensors, feature_names(run), run.record)
    width = max((len(name) for name, _, _ in changes.rows), default=0)
    lines = [f"    {name:<{width}}  {before} -> {after}" for name, before, after in changes.rows]
    more = f"; the {len(lines)} that changed most:" if len(lines) < changes.n else ":" if lines else ""
    return [f"  {changes.n} of {changes.of} features changed{more}", *lines]


def _format_exactly(value: Any) -> str:
    return f"{value:.9g}" if isinstance(value, float) else str(value)  # nine digits determine a float32


def _export(run: Reader, selection: Selection, path: Path, replaces: bool) -> str:
    from themis.runs.store.export import FORMATS, export

    if path.suffix.lower() == ".png":
        return _draw(run, selection, path, replaces)
    if path.suffix.lower() not in FORMATS:
        known = nearest(path.suffix, [*FORMATS, ".png"])
        raise UsageError(f"--export must have a known file extension, got {path}: {known}")
    n = export(run, selection.rows(run), path, replaces=replaces)
    return f"Wrote {n:,} fault{'s' * (n != 1)} to {path}"


def _draw(run: Reader, selection: Selection, path: Path, replaces: bool) -> str:
    """Draw the first matching faults whose inputs were kept."""
    from themis.runs.display.fault import stored_boxes
    from themis.runs.display.figure import draw_pairs
    from themis.runs.store.files import fresh_file

    n_matching = selection.count(run)
    conditions, limit = [*selection.conditions, "tensors IS NOT NULL"], min(selection.limit or N_DRAWN, N_DRAWN)
    faults = replace(selection, conditions=conditions, limit=limit).faults(run)
    kept = run.tensors([fault.id for fault in faults])
    pictures = [
        (fault, kept[fault.id].clean_inputs[0], kept[fault.id].inputs[0]) for fault in faults if fault.id in kept
    ]
    start = run.record["start"]
    boxes = [stored_boxes(kept[fault.id], start["oracle"]) for fault, _, _ in pictures]
    if not pictures:
        found = f"of {n_matching:,} that match, no input was kept" if n_matching else "no fault matches"
        raise UsageError(f"cannot draw faults: {found}")
    best = ": the most telling" if selection.sort == "telling" and not selection.is_reversed else ""
    title = f"{len(pictures)} of {n_matching:,} faults ({run.record['perturbation']}){best}"
    with fresh_file(path, replaces=replaces) as part, part.open("wb") as file:
        draw_pairs(pictures, file, title=title, bounds=start["bounds"], classes=start.get("classes"), boxes=boxes)
    return f"Drew {len(pictures)} of {n_matching:,} faults in {path}"
