"""The command line: one module per command.

The docstring of each module `themis.cli.COMMAND` is the help of the command: what it does, and after an empty line
examples to copy. `add_arguments(parser)` adds its options, and `execute(arguments)` runs it and returns the exit code;
`arguments.given` are the options that the user set, by a flag or in a file. A module is imported when its command is
used, and torch only when it is needed, so that `--help` is fast. The other modules hold what commands share: `options`
(flags and configuration files), `source` (the model and the data) and `output` (what a campaign prints and writes).
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from themis.plugins import Extensible, added, comes_with_themis, docstring_of
from themis.text import foreign_output_on_stderr, one_line, print_text

if TYPE_CHECKING:
    from themis.cli.options import Parser

DONE, GATE_FAILED, BAD_USAGE, RUN_FAILED, UNDECIDED, INTERRUPTED = 0, 1, 2, 3, 4, 130
"""Exit codes; 4 occurs only with `--decide`. A process ended by another signal than Ctrl-C exits with 128 plus its
number: 143 (SIGTERM), 129 (SIGHUP)."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)
PATH_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
FIRST_STEP_SECONDS, MAX_STEP_SECONDS = 2.0, 60.0
"""Seconds before a running step is printed for the first time, and at most between two such lines."""

COMMANDS = {
    "check": "inspect a model and its data before a campaign",
    "run": "test a model: find faults until coverage or a budget stops it",
    "suite": "test a model under many perturbations in one go",
    "resume": "continue a run that was interrupted, or extend its budget",
    "replay": "run faults again and compare them with the recorded ones",
    "faults": "list, sort and export the faults of a run",
    "groups": "group related faults, and say what each group has in common",
    "shrink": "make faults smaller, and plot how robust the model is",
    "diff": "compare two versions of a model, or two techniques",
    "gate": "check a run against limits; the exit code is for CI",
    "rate": "estimate the fault rate in operation from a run",
    "report": "write a run as one HTML file, with its faults and figures",
    "retrain": "fine-tune a model on the faults of a run, and measure the gain",
    "perturbations": "list the perturbations, and draw them",
    "doctor": "check the installation and this machine",
}
TRUST_HELP = "Code that a run folder from elsewhere names runs only with --trust RUN."
TERMS = {
    "seed": "a clean input; every test perturbs one seed",
    "theta": "the parameters of a perturbation, such as the angle of rain",
    "fault": "a test whose answer is wrong, or differs from that to its seed",
    "telling": "of a fault: new, from a small change, and answered confidently",
    "pass": "the unit of cost: a forward pass is 1, a backward pass is 2",
    "coverage": "share of neurons whose mean response to perturbation is known",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Every error is printed as one line on stderr."""
    from themis.campaign.interrupt import terminate_like_interrupt

    if "OMP_WAIT_POLICY" not in os.environ:
        # Makes torch's threads sleep after waiting a microsecond or two. By default they spin for milliseconds, which
        # makes small models 20 times slower if another process uses a core. Read when torch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    words = list(sys.argv[1:] if argv is None else argv)
    name = f"themis {words[0]}" if words and words[0] in _commands() else "themis"
    with terminate_like_interrupt() as received:
        code = _run(name, words)
    return 128 + received[-1] if code == INTERRUPTED and received else code


def _run(name: str, words: list[str]) -> int:
    from themis.campaign.interrupt import Terminated
    from themis.errors import ModelError, ThemisError, UsageError

    try:
        with _one_line_warnings(name):
            code = _dispatch(words)
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # `themis faults RUN | head`: the reader has closed the pipe
        with suppress(OSError, ValueError):  # Python flushes stdout at exit; raises if stdout is not a file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except KeyboardInterrupt as error:
        reason = f" ({error})" if isinstance(error, Terminated) else ""
        return _complain(name, f"interrupted{reason}", INTERRUPTED)
    except ThemisError as error:
        where = "; THEMIS_DEBUG=1 shows where" if isinstance(error, ModelError) and error.__cause__ else ""
        return _complain(name, f"{error}{where}", BAD_USAGE if isinstance(error, UsageError) else RUN_FAILED)
    except MemoryError:
        text = "there is not enough memory for this: use fewer or smaller inputs, or a smaller --batch-size"
        return _complain(name, text, RUN_FAILED)
    except SystemExit as error:
        text = f"sys.exit({error.code!r}) was called: remove it from the code that builds the model or the data"
        return _complain(name, text, RUN_FAILED)
    except OSError as error:
        if error.errno not in (*DISK_ERRORS, *PATH_ERRORS):
            return _complain(name, _describe_unexpected(error), RUN_FAILED)
        where = "the output" if error.filename is None else str(error.filename)[:200]
        remedy = "; check the path" if error.errno in PATH_ERRORS else ""
        return _complain(name, f"{where} cannot be read or written: {error.strerror or error}{remedy}", RUN_FAILED)
    except Exception as error:
        return _complain(name, _describe_unexpected(error), RUN_FAILED)


def _describe_unexpected(error: Exception) -> str:
    """Describe an unexpected error and what to do about it; names a package whose import fails."""
    from traceback import extract_tb

    cause = f"{type(error).__name__}: {error}"
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    lines = [frame.line or "" for frame in extract_tb(error.__traceback__) if frame.filename.startswith(own)]
    package = re.match(r"\s*(?:from|import)\s+(?!themis)(\w+)", lines[-1] if lines else "")
    if package is None:
        return f"unexpected {cause}; set THEMIS_DEBUG=1 for the traceback, and please report it"
    return (
        f"the package {package[1]} must be importable, but importing it raised {cause}: its installation seems to be "
        f"broken, install it again; THEMIS_DEBUG=1 shows where"
    )


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("", "-h", "--help", "help"):
        print_text(_overview())
        return DONE if first else BAD_USAGE
    if first == "--version":
        from themis.version import __version__

        print_text(f"themis {__version__}")
        return DONE
    if first not in _commands():
        from themis.errors import UsageError, nearest

        raise UsageError(f"unknown command {first!r}: {nearest(first, [*_commands(), '--help', '--version'])}")
    from themis.cli.options import Parser, parse

    name = f"themis {first}"
    parser = Parser(prog=name)
    module = configure_parser(parser, first)
    try:
        arguments = parse(parser, words[1:])
    except SystemExit:  # --help was printed
        return DONE
    arguments.words = ["themis", *words]
    is_silent = arguments.is_silent
    with (
        foreign_output_on_stderr(),
        nullcontext() if is_silent else _printed_log(name),
        nullcontext() if is_silent else _printed_steps(name),
    ):
        return int(module.execute(arguments))


def _overview() -> str:
    lines, terms = ([f"  {name:<15}{text}" for name, text in table.items()] for table in (summaries(), TERMS))
    return "\n".join(
        [
            "usage: themis COMMAND [options]",
            "",
            "Themis tests deep-learning models: it finds inputs that break them and measures",
            "how much of their behaviour has been tested.",
            "",
            "commands:",
            *lines,
            "",
            "terms:",
            *terms,
            "",
            "themis COMMAND --help lists the options of a command; themis --version prints",
            "the version. Start with themis demo.",
        ]
    )


def summaries() -> dict[str, str]:
    """One line about every command; commands of other packages are not imported."""
    entries = sorted(added("themis.commands").items())
    return COMMANDS | {name: _summary(entry) for name, entry in entries if name not in COMMANDS}


def _summary(entry: EntryPoint) -> str:
    """The first sentence of the help of a command from another package, and the name of that package."""
    from textwrap import shorten

    sentence = " ".join(docstring_of(entry).split()).partition(". ")[0].removesuffix(".")
    source = "" if comes_with_themis(entry) else f" (added by {entry.module.partition('.')[0]})"
    text = shorten(f"{sentence[:1].lower()}{sentence[1:]}", 62 - len(source), placeholder=" ...")
    return f"{text}{source}".strip()


def _commands() -> Extensible[Any]:
    """The summaries of Themis' own commands, and the modules of commands from packages; looking one up imports it."""
    return Extensible("themis.commands", COMMANDS)


def configure_parser(parser: Parser, name: str) -> Any:
    """Add the description and the options of a command to its parser; return the command's module."""
    from textwrap import fill, indent

    module: Any = import_module(f"themis.cli.{name}") if name in COMMANDS else _commands()[name]
    module.add_arguments(parser)
    text, _, examples = (module.__doc__ or "").partition("\n\n")
    trust = TRUST_HELP if "--trust" in parser._option_string_actions else ""
    parser.description = fill(f"{text} {trust}".rstrip(), 79)
    if examples:
        parser.epilog = f"examples:\n{indent(examples.strip(), '  ')}"
    parser.describe_usage()
    return module


def _complain(name: str, text: str, code: int) -> int:
    """Print one line on stderr, after the traceback if THEMIS_DEBUG is set; return the exit code."""
    if os.environ.get("THEMIS_DEBUG"):
        import traceback

        traceback.print_exc()
    print_text(f"{name}: {one_line(text)}", file=sys.stderr)
    return code


@contextmanager
def _one_line_warnings(name: str) -> Iterator[None]:
    """Print warnings of Themis as one line and hide other warnings, unless Python was asked to show them."""

    def show(message: Warning | str, *location: Any, **rest: Any) -> None:
        print_text(f"{name}: {one_line(str(message))}", file=sys.stderr)

    if sys.warnoptions or os.environ.get("THEMIS_DEBUG"):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", module=r"themis\b")
        warnings.showwarning = show
        yield


@contextmanager
def _printed_log(name: str) -> Iterator[None]:
    """Print what Themis logs, such as where a module of the user was imported from, as one line each."""
    import logging

    log, handler = logging.getLogger("themis"), logging.StreamHandler()  # to stderr, where text is made printable
    handler.setFormatter(logging.Formatter(f"{name}: %(message)s"))
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def _printed_steps(name: str) -> Iterator[None]:
    """Print the progress of steps that take long on stderr, from a thread, at intervals that grow."""
    from threading import Event, Thread

    from themis.progress import Step, shown_by

    steps: list[Step] = []

    def watch(step: Step, has_ended: Event) -> None:
        begun, seconds = time.perf_counter(), FIRST_STEP_SECONDS
        while not has_ended.wait(seconds):
            if step in steps[-1:]:
                print_text(f"{name}: {step.describe()} ({time.perf_counter() - begun:.0f} s so far)", file=sys.stderr)
            seconds = min(2 * seconds, MAX_STEP_SECONDS)

    @contextmanager
    def show(step: Step) -> Iterator[None]:
        has_ended = Event()
        watcher = Thread(target=watch, args=(step, has_ended), daemon=True)
        steps.append(step)
        watcher.start()
        try:
            yield
        finally:
            steps.remove(step)
            has_ended.set()
            watcher.join()

    with shown_by(show):
        yield
