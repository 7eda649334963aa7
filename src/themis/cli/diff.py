"""`themis diff`: two versions of a model, or two techniques on one."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import Group, Parser, add_option
from themis.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.runs.diff.result import Diff

HELP = (
    "Set two runs against each other. Of two versions of a model, both run the faults of both, and tests drawn anew; "
    "McNemar's test and an interval say whether the second is better, so that a new fault is not the luck of a search. "
    "Of two techniques on one model, what each of them found."
)
EXAMPLES = """
themis diff runs/main runs/new
themis diff runs/main runs/new --weights-a main.pt --weights-b new.pt --out diff.md
themis diff runs/scheduled runs/random --json
"""
ENDINGS = (".md", ".png", ".json")
TESTS = 2000
SIDES = {"a": "first", "b": "second"}


def add_arguments(parser: Parser) -> None:
    parser.add_argument("before", metavar="RUN_A", help="folder of the first run")
    parser.add_argument("after", metavar="RUN_B", help="folder of the second run")
    how = parser.add_argument_group("how")
    add_option(how, "kind", str, "auto", "versions, techniques, or auto: techniques where both tested the same model")
    add_option(how, "tests", int, TESTS, "tests that are drawn anew and run on both models")
    add_option(how, "random_seed", int, 0, "same seed, same tests")
    how.add_argument("--no-curve", action="store_true", help="leave out the robustness curves, which take longest")
    places = parser.add_argument_group("models and data, if not as the runs remember them")
    for side, word in SIDES.items():
        _add_places(places, side, word)
    text = "data of both, as --data of themis run"
    places.add_argument("--data", metavar="DATA", help=text)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    text = "also write it as .md, .json or .png (the curves); can be repeated"
    output.add_argument("--out", metavar="FILE", action="append", help=text)


def _add_places(group: Group, side: str, word: str) -> None:
    group.add_argument(f"--model-{side}", metavar="MODEL", help=f"the {word} run's model, as --model of themis run")
    group.add_argument(f"--weights-{side}", metavar="FILE", help=f"the {word} run's weights")


def execute(arguments: Namespace, said: set[str]) -> int:
    files = [Path(each) for each in arguments.out or ()]
    _check_files(files, has_curve=not arguments.no_curve)
    from themis.runs.diff.diff import diff
    from themis.runs.store.reader import Reader

    with ExitStack() as stack:
        readers = [stack.enter_context(closing(Reader(each))) for each in (arguments.before, arguments.after)]
        sources = [_replayer(run, side, arguments) for run, side in zip(readers, SIDES, strict=True)]
        first, second = (f"name the one it had with --weights-{side} FILE or --model-{side} MODEL" for side in SIDES)
        found = diff(
            *sources,
            kind=arguments.kind,
            tests=arguments.tests,
            curves=not arguments.no_curve,
            random_seed=arguments.random_seed,
            remedies=(first, second),
        )
    for path in files:
        _write(found, path)
    if arguments.json:
        print(json.dumps(found.as_dict(), indent=2, allow_nan=False))
    else:
        _print(found, files)
    return DONE


def _check_files(files: list[Path], *, has_curve: bool) -> None:
    for path in files:
        if path.suffix.lower() not in ENDINGS:
            raise UsageError(f"--out must be a file with a known ending, got {path}: {', '.join(ENDINGS)} are known")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UsageError(f"--out must be a file in a folder that exists, got {path}: make the folder first")
        if path.suffix.lower() == ".png" and not has_curve:
            raise UsageError(f"--out {path} must have curves to draw: leave out --no-curve, or write .md")


def _replayer(run: Any, side: str, arguments: Namespace) -> Any:
    from argparse import Namespace

    from themis.cli.resume import moved
    from themis.runs.replay import Replayer

    values = {name: getattr(arguments, f"{name}_{side}") for name in ("model", "weights")} | {"data": arguments.data}
    said = {name for name, value in values.items() if value is not None}
    return Replayer(run, origin=moved(run, Namespace(**values), said))


def _print(found: Diff, files: list[Path]) -> None:
    words = ("before", "after") if found.kind == "versions" else ("first", "second")
    rows = [("", *words), *found.rows()]
    widths = [max(len(row[k]) for row in rows) for k in range(2)]
    for row in rows:
        print(f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]}".rstrip())
    print("\n".join([*found.lines(), *found.notes]))
    print(found.sentence)
    for path in files:
        print(f"written: {path}")


def _write(found: Diff, path: Path) -> None:
    from io import BytesIO

    from themis.runs.store.files import explained, write_file

    ending = path.suffix.lower()
    if ending == ".png":
        if found.curves is None:
            raise UsageError(f"--out {path} must have curves to draw, the ranges of theta differ: write .md instead")
        from themis.runs.diff.figure import draw_diff

        picture = BytesIO()
        draw_diff(found, picture)
        content = picture.getvalue()
    elif ending == ".json":
        content = (json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n").encode()
    else:
        content = found.markdown().encode(errors="replace")
    with explained(path):
        write_file(path, content)
