"""`themis diff`: compare two versions of a model, or two techniques on one model."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import FORCE_HELP, Group, Parser, add_fields, add_option
from themis.cli.source import TRUST_HELP, rebuild
from themis.errors import UsageError
from themis.runs.source import Origin
from themis.text import print_json, print_text

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.diff.result import Diff

HELP = (
    "Compare two runs. If they tested two versions of a model, the faults of both runs and freshly drawn tests are run "
    "on both models; the interval of the difference tells whether the second is better, rather than whether its search "
    "was luckier. If they tested one model with two techniques, the faults that each of them found are compared. "
    f"{TRUST_HELP}"
)
EXAMPLES = """
themis diff runs/main runs/new
themis diff runs/main runs/new --weights-a main.pt --weights-b new.pt --out diff.md
themis diff runs/scheduled runs/random --json
"""
ENDINGS = (".md", ".png", ".json")
MAX_DIFF_TESTS = 2000
SIDE_WORDS = {"a": "first", "b": "second"}
REMEDIES = (
    "name its model with --weights-a FILE or --model-a MODEL",
    "name its model with --weights-b FILE or --model-b MODEL",
)


def add_arguments(parser: Parser) -> None:
    parser.add_argument("before", metavar="RUN_A", help="folder of the first run, or suite")
    parser.add_argument("after", metavar="RUN_B", help="folder of the second run, or suite")
    comparison = parser.add_argument_group("comparison")
    text = "versions, techniques, or auto: techniques if both runs tested the same model"
    add_option(comparison, "kind", str, "auto", text)
    add_option(comparison, "tests", int, MAX_DIFF_TESTS, "number of fresh tests to run on both models")
    add_option(comparison, "random_seed", int, 0, "the same seed gives the same tests")
    text = "leave out the robustness curves, which take the longest"
    comparison.add_argument("--no-curve", action="store_true", help=text)
    source = parser.add_argument_group("models and data, if not as recorded in the runs")
    for side, word in SIDE_WORDS.items():
        _add_model(source, side, word)
    source.add_argument("--data", metavar="DATA", help="data of both runs, as in --data of themis run")
    add_fields(source, Origin, only=("trust",), shows_default=False)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print only the result, as JSON")
    text = "also write the result as .md, .json or .png (the curves); can be repeated"
    output.add_argument("--out", metavar="FILE", action="append", help=text)
    output.add_argument("--force", action="store_true", help=FORCE_HELP)


def _add_model(group: Group, side: str, word: str) -> None:
    text = f"model of the {word} run, as in --model of themis run"
    group.add_argument(f"--model-{side}", metavar="MODEL", help=text)
    group.add_argument(f"--weights-{side}", metavar="FILE", help=f"weights of the {word} run")


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    files = [Path(name) for name in arguments.out or ()]
    _check_files(files, has_curve=not arguments.no_curve, is_forced=arguments.force)
    from themis.runs.diff.api import diff_runs
    from themis.runs.store.reader import Reader
    from themis.suites.folder import is_suite

    if is_suite(arguments.before) and is_suite(arguments.after):
        return _diff_suites(arguments, files)
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(Reader(path))) for path in (arguments.before, arguments.after)]
        sources = [_replayer(run, side, arguments) for run, side in zip(readers, SIDE_WORDS, strict=True)]
        result = diff_runs(
            *sources,
            kind=arguments.kind,
            tests=arguments.tests,
            curves=not arguments.no_curve,
            random_seed=arguments.random_seed,
            remedies=REMEDIES,
        )
    for path in files:
        _write(result, path, is_forced=arguments.force)
    if arguments.json:
        print_json(json.dumps(result.as_dict(), indent=2, allow_nan=False))
    else:
        _print(result, files)
    return DONE


def _check_files(files: list[Path], *, has_curve: bool, is_forced: bool) -> None:
    from themis.runs.store.files import check_free

    for path in files:
        if path.suffix.lower() not in ENDINGS:
            raise UsageError(f"--out must end in one of {', '.join(ENDINGS)}, got {path}")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"--out must be a file in an existing folder, got {path}: create the folder first")
        if path.suffix.lower() == ".png" and not has_curve:
            raise UsageError(f"--out {path} needs the curves: leave out --no-curve, or write .md")
        check_free(path, replaces=is_forced)


def _replayer(run: Any, side: str, arguments: Namespace) -> Any:
    values = {name: getattr(arguments, f"{name}_{side}") for name in ("model", "weights")} | {"data": arguments.data}
    overrides = {name: value for name, value in values.items() if value is not None}
    return rebuild(run, overrides | {"trust": arguments.trust})


def _print(result: Diff, files: list[Path]) -> None:
    headers = ("before", "after") if result.kind == "versions" else ("first", "second")
    rows = [("", *headers), *result.rows()]
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    for row in rows:
        print_text(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip())
    print_text("\n".join([*result.lines(), *result.notes]))
    print_text(result.sentence)
    for path in files:
        print_text(f"Written: {path}")


def _write(result: Diff, path: Path, *, is_forced: bool) -> None:
    from io import BytesIO

    from themis.runs.store.files import COMMENT, made_by, write_fresh

    ending = path.suffix.lower()
    if ending == ".png":
        if result.curves is None:
            raise UsageError(f"--out {path} needs curves, but the ranges of theta differ: write .md instead")
        from themis.runs.display.figure import draw_diff

        picture = BytesIO()
        draw_diff(result, picture)
        content = picture.getvalue()
    elif ending == ".json":
        content = (json.dumps({**made_by("diff"), **result.as_dict()}, indent=2, allow_nan=False) + "\n").encode()
    else:
        content = f"{COMMENT}\n\n{result.markdown()}".encode(errors="replace")
    write_fresh(path, content, replaces=is_forced)


def _diff_suites(arguments: Namespace, files: list[Path]) -> int:
    """Compare two suites member by member."""
    from themis.runs.store.files import COMMENT, made_by, write_fresh
    from themis.suites.diff import SuiteSide, diff_suites
    from themis.suites.result import SuiteRun

    if any(path.suffix.lower() == ".png" for path in files):
        raise UsageError("--out must end in .md or .json for suites: compare two members for a figure of the curves")
    before = SuiteSide(SuiteRun(arguments.before), lambda run: _replayer(run, "a", arguments), REMEDIES[0])
    after = SuiteSide(SuiteRun(arguments.after), lambda run: _replayer(run, "b", arguments), REMEDIES[1])
    result = diff_suites(
        before,
        after,
        kind=arguments.kind,
        tests=arguments.tests,
        random_seed=arguments.random_seed,
        trust=arguments.trust or False,
    )
    for path in files:
        if path.suffix.lower() == ".json":
            content = json.dumps({**made_by("diff"), **result.as_dict()}, indent=2, allow_nan=False) + "\n"
        else:
            content = f"{COMMENT}\n\n{result.markdown()}"
        write_fresh(path, content.encode(errors="replace"), replaces=arguments.force)
    if arguments.json:
        print_json(json.dumps(result.as_dict(), indent=2, allow_nan=False))
        return DONE
    from themis.report.table import Table, table_console
    from themis.suites.diff import HEAD

    rows = [row[:-1] for row in result.rows()]
    notes = [f"{name}: {difference.sentence}" for name, difference in result.members.items()]
    Table("Suites before and after", HEAD[:-1], rows, [*notes, *result.lines()], file="--out FILE.md").show(
        table_console()
    )
    for path in files:
        print_text(f"Written: {path}")
    return DONE
