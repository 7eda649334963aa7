"""List the faults of a run, the most telling first: one of every seed and wrong answer before any second one, and small
changes and confident answers before others. In the table, clean and answer are the answers to the clean and to the
disturbed input, distance is Euclidean, stream says whether a test was drawn at random or by the search, and kept
whether its input is stored; reference is the answer of the model that a run was made against. If fault numbers are
given, print every detail of these faults. The run may still be in progress. Nothing that the folder names is run.

themis faults runs/first
themis faults runs/first --distinct --min-ssim 0.9 --sort distance
themis faults runs/first --where "theta_sigma < 0.1 and answer = 3" --export found.parquet
themis faults runs/first 1204
"""

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

from themis.cli import DONE
from themis.cli.options import FORCE_HELP, CommandLine, Parser, add_option, check_file, convert
from themis.errors import UsageError, nearest
from themis.options import check_count
from themis.report.names import feature_names
from themis.runs.fault import COLUMNS, STREAMS, Fault, show_outcome
from themis.runs.store.export import EXPORT_FOLDERS, EXPORT_FORMATS, export, json_text
from themis.runs.store.files import fresh_file
from themis.runs.store.reader import Reader, Selection, check_condition
from themis.runs.store.schema import TENSORS_COLUMN, read_signature
from themis.text import counted, own_stream, percent, print_columns, print_text

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
"""Options that select faults: the type of the value, the SQL condition and the help."""
N_LISTED, N_DRAWN = 20, 12
HEADERS = {"seed_id": "seed", "clean_answer": "clean", "clean_value": "clean value", "tensors": "kept"}
TEXT_HEADERS = ("stream", "kind", "kept")
HIDDEN_COLUMNS = ("id", "position", "chunk")
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
    text = f"maximum number of faults, 0 for all (default: {N_LISTED} in a table, all in JSON and in files)"
    add_option(output, "limit", int | None, None, text)
    output.add_argument("--json", action="store_true", help="print only the faults, as JSON")
    text = (
        f"write the faults as .parquet, .csv, .json, .npz (with tensors) or .png (the first {N_DRAWN} that were kept); "
        "or those that were kept as pictures with a CSV file (pictures:FOLDER) or for FiftyOne (fiftyone:FOLDER)"
    )
    output.add_argument("--export", metavar="FILE", help=text)
    output.add_argument("--force", action="store_true", help=FORCE_HELP)


def execute(arguments: CommandLine) -> int:
    if arguments.json and arguments.export:
        raise UsageError("--json and --export cannot be combined: --export FILE.json writes JSON to a file")
    with closing(Reader(arguments.run)) as run:
        ids = read_ids(run, arguments.ids)
        selection = _select(run, arguments, ids)
        if arguments.export:
            print_text(_export(run, selection, arguments.export, arguments.force))
        elif arguments.json:
            own_stream(sys.stdout).writelines(json_text(run, selection.rows(run)))
        elif ids:
            for values in _read(run, selection):
                print_text(_describe(run, values))
        else:
            _list(run, selection if arguments.limit is not None else replace(selection, limit=N_LISTED))
    return DONE


def read_ids(run: Reader, words: Sequence[str]) -> list[int]:
    """Convert fault numbers; refuse a number that the run does not have."""
    ids = [convert("FAULT", word, int) for word in words]
    for id in ids:
        if not run.count("id = ?", (str(id),)):  # as text, so that no number is too large for SQLite
            [(n, first, last)] = run.select("count(*), min(id), max(id)", order="1")
            known = f"its {counted(n, 'fault')} have numbers from {first} to {last}" if n else "it has no faults"
            raise UsageError(f"the run has no fault {id}: {known}")
    return ids


def named_faults(run: Reader, words: Sequence[str]) -> list[Fault]:
    """The faults with these numbers, each once, in this order."""
    ids = read_ids(run, words)
    faults = {fault.id: fault for fault in run.faults("id IN (SELECT value FROM json_each(?))", (json.dumps(ids),))}
    return [faults[id] for id in dict.fromkeys(ids)]


def _select(run: Reader, arguments: CommandLine, ids: list[int]) -> Selection:
    if arguments.stream is not None and arguments.stream not in STREAMS:
        raise UsageError(f"unknown stream {arguments.stream!r}: {nearest(arguments.stream, STREAMS)}")
    check_count("limit", arguments.limit or 0, least=0)
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
    rows = _read(run, selection)
    print_text(_describe_state(run, selection.count(run), len(rows)))
    if not rows:
        return
    task, classes = run.task, run.classes
    theta = [name for name in run.columns if name.startswith("theta_")]
    of_numbers = ("value",) if task == "against" else ("clean_value", "value")
    columns = ("id", "seed_id", *theta, "clean_answer", "answer", *of_numbers, "confidence", "distance", "ssim")
    used = [name for name in columns if any(row[name] is not None for row in rows)]
    shown = [*used, "stream", "tensors"]
    if selection.sort in run.columns and selection.sort not in shown:
        shown.insert(-1, selection.sort)
    known = {**HEADERS, "value": "reference"} if task == "against" else HEADERS
    headers = [known.get(name, name.removeprefix("theta_")) for name in shown]
    cells = [[_cell(name, row[name], task, classes) for name in shown] for row in rows]
    print_columns([headers, *cells], [name in TEXT_HEADERS for name in headers])


def _read(run: Reader, selection: Selection) -> list[dict[str, Any]]:
    return [dict(zip(run.columns, row, strict=True)) for row in chain.from_iterable(selection.rows(run))]


def _describe_state(run: Reader, n_matching: int, n_shown: int) -> str:
    [(tests,)] = run.select("coalesce(max(tests), 0)", order="1", table="rounds")
    n, state = run.count(), run.state(run.summary())
    word = {"running": "is still running", "killed": "was killed", "interrupted": "was interrupted"}.get(state, state)
    counts = f"{counted(n, 'fault')}, {n_matching:,} match{'es' * (n_matching == 1)}, {n_shown:,} shown"
    remedy = f": continue it with themis resume {quote(str(run.path))}" if word.startswith("was") else ""
    return f"{counts}; the campaign {word} after {tests:,} tests{remedy}"


def _cell(name: str, value: Any, task: str, classes: list[str] | None) -> str:
    if name == "tensors":
        return "no" if value is None else "yes"
    if value is None:
        return "-"
    if name == "answer":
        return show_outcome(task, value, classes)
    if name == "value" and task == "against":
        return f"{value:.0f}"
    if name == "confidence":
        return percent(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _describe(run: Reader, values: dict[str, Any]) -> str:
    """The details of one fault, each with its meaning."""
    shares = sorted(zip(read_signature(values["signature"]), run.layers, strict=True), reverse=True)
    values["signature"] = ", ".join(f"{layer} {share:.1%}" for share, layer in shares[:5])
    answer, words = values["answer"], show_outcome(run.task, values["answer"], run.classes)
    if words != str(answer):
        values["answer"] = words if answer < 0 else f"{answer}, {words}"
    if not run.record.get("start", {}).get("criterion"):
        values["raised"] = None
    file = values["tensors"]
    values["tensors"] = "not kept: a replay computes them again" if file is None else run.path / "tensors" / file
    theta = [name for name in run.columns if name.startswith("theta_")]
    known = {column.name: column.text for column in (*COLUMNS, TENSORS_COLUMN)}
    meanings = {name: known["theta" if name in theta else name] for name in run.columns if name not in HIDDEN_COLUMNS}
    exact = {name: f"{value:.9g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    rows = [(name, exact[name], text) for name, text in meanings.items() if values[name] is not None]
    rows.append(("replay", f"themis replay {quote(str(run.path))} {values['id']}", ""))
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:<{width}}  {value}{f'  ({text})' * bool(text)}" for name, value, text in rows]
    if file is not None and values["ssim"] is None:  # no picture
        lines += _describe_changes(run, values["id"])
    return "\n".join([f"fault {values['id']}", *lines])


def _describe_changes(run: Reader, id: int) -> list[str]:
    """The changed features of a table row, with their values before and after; empty for other inputs."""
    from themis.report.names import feature_changes

    tensors = run.tensors([id]).get(id)
    if tensors is None or tensors.inputs.ndim != 2:
        return []
    changes = feature_changes(tensors, feature_names(run), run.record)
    width = max((len(name) for name, _, _ in changes.rows), default=0)
    lines = [f"    {name:<{width}}  {before} -> {after}" for name, before, after in changes.rows]
    more = f"; the {len(lines)} that changed most:" if len(lines) < changes.n else ":" if lines else ""
    return [f"  {changes.n} of {changes.of} features changed{more}", *lines]


def _export(run: Reader, selection: Selection, name: str, replaces: bool) -> str:
    kind, _, folder = name.partition(":")
    if kind in EXPORT_FOLDERS and folder:
        n, n_matching = EXPORT_FOLDERS[kind](run, selection, Path(folder)), selection.count(run)
        is_part = n < min(n_matching, selection.limit or n_matching)
        left_out = "; the inputs of the others were not kept" if is_part else ""
        return f"Wrote the pictures of {n:,} of {counted(n_matching, 'fault')} to {folder}{left_out}"
    path = Path(name)
    if not path.suffix:
        folders = " or ".join(f"{each}:FOLDER" for each in EXPORT_FOLDERS)
        raise UsageError(f"--export must be {', '.join(EXPORT_FORMATS)}, .png, {folders}, got {name}")
    check_file("--export", path, [*EXPORT_FORMATS, ".png"], replaces=replaces)
    if path.suffix.lower() == ".png":
        return _draw(run, selection, path, replaces)
    n = export(run, selection.rows(run), path, replaces=replaces)
    return f"Wrote {counted(n, 'fault')} to {path}"


def _draw(run: Reader, selection: Selection, path: Path, replaces: bool) -> str:
    """Draw the first matching faults whose inputs were kept."""
    from themis.runs.display.figure import draw_pairs
    from themis.runs.replay import stored_inputs

    n_matching, start = selection.count(run), run.record["start"]
    conditions, limit = [*selection.conditions, "tensors IS NOT NULL"], min(selection.limit or N_DRAWN, N_DRAWN)
    faults = replace(selection, conditions=conditions, limit=limit).faults(run)
    tensors = run.tensors([fault.id for fault in faults])
    kept = [(fault, tensors[fault.id]) for fault in faults if fault.id in tensors]
    pictures = [(fault, stored_inputs(stored, start)) for fault, stored in kept]
    if not pictures:
        found = f"of {n_matching:,} that match, no input was kept" if n_matching else "no fault matches"
        raise UsageError(f"cannot draw faults: {found}")
    best = ": the most telling" if selection.sort == "telling" and not selection.is_reversed else ""
    title = f"{len(pictures)} of {n_matching:,} faults ({run.record['perturbation']}){best}"
    with fresh_file(path, replaces=replaces) as part, part.open("wb") as file:
        draw_pairs(pictures, file, title)
    return f"Drew {len(pictures)} of {n_matching:,} faults in {path}"
