"""The command line. A command's module is imported when the command is used, and nothing heavy before it must be.

Each module `themis.cli.COMMAND` has `HELP` (what the command does), `EXAMPLES` (lines to copy), `add_arguments(parser)`
and `execute(arguments, said) -> exit code`; `said` names the options that were given, by a flag or in a file.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from themis.cli.options import Parser

DONE, GATE_FAILED, BAD_USAGE, RUN_FAILED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes."""

COMMANDS = {
    "demo": "train LeNet-5 on real digits and test it, in a minute",
    "check": "look at a model and its data before a campaign",
    "run": "test a model: find faults until coverage or a budget stops it",
    "resume": "go on with a run that was interrupted, or give it more budget",
    "replay": "run faults again and compare them with what was recorded",
    "faults": "list, sort and export the faults of a run",
    "groups": "put faults that are one story together, say where they enter",
    "shrink": "make faults smaller, and draw how robust the model is",
    "diff": "set two versions of a model, or two techniques, side by side",
    "gate": "hold a run against limits; the exit code says if it may ship",
    "watch": "show a run in the browser, while it runs and afterwards",
    "report": "write a run as one HTML file, with its faults and figures",
    "retrain": "make the model better with the faults of a run, and measure it",
    "perturbations": "list what a model can be disturbed with, and draw it",
    "compare": "compare techniques and criteria at equal cost",
    "zoo": "list, verify and train the models of the zoo",
    "doctor": "check the installation and say what this machine has",
    "completion": "print a script that completes options in a shell",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Whatever goes wrong is one line on stderr."""
    from themis.errors import ModelError, ThemisError, UsageError

    _share_cores()
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"themis {words[0]}" if words and words[0] in COMMANDS else "themis"
    try:
        with _calm_warnings(name):
            code = _dispatch(words)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # `themis faults RUN | head`: the reader has all it wants
        _silence_stdout()
        return DONE
    except KeyboardInterrupt:
        return _complain(name, "interrupted", INTERRUPTED)
    except ThemisError as error:
        where = "; THEMIS_DEBUG=1 shows where" if isinstance(error, ModelError) and error.__cause__ else ""
        return _complain(name, f"{error}{where}", BAD_USAGE if isinstance(error, UsageError) else RUN_FAILED)
    except SystemExit as error:
        text = f"sys.exit({error.code!r}) was called: take it out of the code that makes the model or the data"
        return _complain(name, text, RUN_FAILED)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error}; set THEMIS_DEBUG=1 for the traceback, and please report it"
        return _complain(name, text, RUN_FAILED)


def _share_cores() -> None:
    """Let torch's threads, before it is imported, wait for one another in their sleep after a microsecond or two.

    They spin for milliseconds by default: where another process has a core, small models train and run 20 times slower.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("", "-h", "--help", "help"):
        print(_overview())
        return DONE if first else BAD_USAGE
    if first == "--version":
        from themis.version import __version__

        print(f"themis {__version__}")
        return DONE
    if first not in COMMANDS:
        from themis.errors import UsageError, nearest

        raise UsageError(f"unknown command {first!r}: {nearest(first, [*COMMANDS, '--help', '--version'])}")
    return _execute(first, words[1:])


def _execute(name: str, words: list[str]) -> int:
    from themis.cli.options import Parser, parse

    parser = Parser(prog=f"themis {name}")
    module = fill(parser, name)
    try:
        arguments, said = parse(parser, words)
    except SystemExit:  # --help has printed
        return DONE
    arguments.words = ["themis", name, *words]
    return int(module.execute(arguments, said))


def _overview() -> str:
    lines = [f"  {name:<14}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: themis COMMAND [options]",
            "",
            "Tests deep-learning models: finds the inputs that break them, and says how much",
            "of their behaviour was covered.",
            "",
            "commands:",
            *lines,
            "",
            "themis COMMAND --help lists its options, themis --version prints the version.",
            "The first one to try is themis demo.",
        ]
    )


def fill(parser: Parser, name: str) -> Any:
    """Give the parser of a command its options; returns the command's module."""
    from textwrap import fill as wrap
    from textwrap import indent

    module: Any = import_module(f"themis.cli.{name}")
    module.add_arguments(parser)
    parser.description = wrap(module.HELP, 79)
    if examples := getattr(module, "EXAMPLES", ""):
        parser.epilog = f"examples:\n{indent(examples.strip(), '  ')}"
    parser.describe_usage()
    return module


def _complain(name: str, text: str, code: int) -> int:
    """One line on stderr, after the traceback if THEMIS_DEBUG asks for it; returns the exit code."""
    if os.environ.get("THEMIS_DEBUG"):
        import traceback

        traceback.print_exc()
    print(f"{name}: {' '.join(text.split())}", file=sys.stderr)
    return code


@contextmanager
def _calm_warnings(name: str) -> Iterator[None]:
    """Themis's own warnings as one line; none of other packages, unless Python was asked to show them."""

    def show(message: Warning | str, *place: Any, **rest: Any) -> None:
        print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr)

    if sys.warnoptions or os.environ.get("THEMIS_DEBUG"):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"themis\b")
        warnings.showwarning = show
        yield


def _silence_stdout() -> None:
    """Python flushes stdout once more at exit: let that go nowhere."""
    with suppress(OSError, ValueError):  # a stdout that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
