"""Compare two runs. If they tested two versions of a model, the faults of both runs and freshly drawn tests are run on
both models; the interval of the difference tells whether the second is better, rather than whether its search was
luckier. If they tested one model with two techniques, the faults that each of them found are compared.

themis diff runs/main runs/new
themis diff runs/main runs/new --weights-a main.pt --weights-b new.pt --out diff.md
themis diff runs/scheduled runs/random --json
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from themis.cli import DONE
from themis.cli.options import FORCE_HELP, CommandLine, Parser, add_fields, add_option, check_file
from themis.cli.source import rebuild
from themis.report.table import Table, table_console
from themis.runs.source import Origin
from themis.runs.store.files import TEXT_MARK, made_by, write_fresh
from themis.runs.store.reader import Reader
from themis.suites.folder import is_suite
from themis.text import print_columns, print_json, print_text

if TYPE_CHECKING:
    from themis.runs.analysis.diff import Diff
    from themis.runs.replay import Replayer
    from themis.suites.diff import SuiteDiff

DEFAULT_TESTS = 2000
SIDE_WORDS = {"a": "first", "b": "second"}
MODEL_REMEDIES = tuple(f"name its model with --weights-{side} FILE or --model-{side} MODEL" for side in SIDE_WORDS)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("before", metavar="RUN_A", help="folder of the first run, or suite")
    parser.add_argument("after", metavar="RUN_B", help="folder of the second run, or suite")
    comparison = parser.add_argument_group("comparison")
    text = "versions, techniques, or auto: techniques if both runs tested the same model"
    add_option(comparison, "kind", str, "auto", text)
    add_option(comparison, "tests", int, DEFAULT_TESTS, "number of fresh tests to run on both models")
    add_option(comparison, "random_seed", int, 0, "the same seed gives the same tests")
    source = parser.add_argument_group("models and data, if not as recorded in the runs")
    for side, word in SIDE_WORDS.items():
        source.add_argument(f"--model-{side}", metavar="MODEL", help=f"model of the {word} run, as in themis run")
        source.add_argument(f"--weights-{side}", metavar="FILE", help=f"weights of the {word} run")
    source.add_argument("--data", metavar="DATA", help="data of both runs, as in --data of themis run")
    add_fields(source, Origin, only=("trust",), shows_default=False)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")
    text = "also write the result as .md or .json; can be repeated"
    output.add_argument("--out", metavar="FILE", action="append", help=text)
    output.add_argument("--force", action="store_true", help=FORCE_HELP)


def execute(arguments: CommandLine) -> int:
    files = [Path(name) for name in arguments.out or ()]
    for path in files:
        check_file("--out", path, (".md", ".json"), replaces=arguments.force)
    from themis.runs.analysis.compare import DiffOptions, Side, diff_runs
    from themis.runs.replay import read_run

    options = DiffOptions(arguments.kind, arguments.tests, arguments.random_seed)
    replayers = [partial(_replayer, side, arguments) for side in SIDE_WORDS]
    result: Diff | SuiteDiff
    if is_suite(arguments.before) and is_suite(arguments.after):
        from themis.suites.diff import SuiteSide, diff_suites
        from themis.suites.result import SuiteRun

        suites = [SuiteRun(path) for path in (arguments.before, arguments.after)]
        before, after = (SuiteSide(*side) for side in zip(suites, replayers, MODEL_REMEDIES, strict=True))
        result = diff_suites(before, after, options, arguments.trust or False)
    else:
        with ExitStack() as stack:
            readers = [stack.enter_context(closing(Reader(path))) for path in (arguments.before, arguments.after)]
            first, second = (
                Side(read_run(replayer(run)), remedy=remedy)
                for replayer, run, remedy in zip(replayers, readers, MODEL_REMEDIES, strict=True)
            )
            result = diff_runs(first, second, options)
    for path in files:
        _write(result, path, is_forced=arguments.force)
    if arguments.json:
        print_json(result.as_dict())
        return DONE
    _print(result)
    for path in files:
        print_text(f"Written: {path}")
    return DONE


def _replayer(side: str, arguments: CommandLine, run: Reader) -> Replayer:
    values = {name: getattr(arguments, f"{name}_{side}") for name in ("model", "weights")} | {"data": arguments.data}
    overrides = {name: value for name, value in values.items() if value is not None}
    return rebuild(run, overrides | {"trust": arguments.trust})


def _print(result: Diff | SuiteDiff) -> None:
    from themis.suites.diff import DIFF_COLUMNS, SuiteDiff

    if isinstance(result, SuiteDiff):
        rows = [row[:-1] for row in result.rows()]
        notes = [f"{name}: {difference.sentence}" for name, difference in result.members.items()]
        notes += result.lines()
        Table("Suites before and after", DIFF_COLUMNS[:-1], rows, notes, file="--out FILE.md").show(table_console())
        return
    headers = ("before", "after") if result.kind == "versions" else ("first", "second")
    print_columns([("", *headers), *result.rows()], [True, True, True])
    print_text("\n".join([*result.lines(), *result.notes, result.sentence]))


def _write(result: Diff | SuiteDiff, path: Path, *, is_forced: bool) -> None:
    if path.suffix.lower() == ".json":
        content = (json.dumps({**made_by("diff"), **result.as_dict()}, indent=2, allow_nan=False) + "\n").encode()
    else:
        content = f"{TEXT_MARK}\n\n{result.markdown()}".encode(errors="replace")
    write_fresh(path, content, replaces=is_forced)
