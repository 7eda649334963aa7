"""Gates on the command line: options that `run`, `resume` and `gate` share, and what they print and write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.cli import DONE, GATE_FAILED
from themis.cli.options import Group, Option, Parser, add_option
from themis.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.report.gates.gates import Gates, Verdicts
    from themis.runs.run import Run

REMEDY = "name the one it had with --baseline-weights FILE or --baseline-model MODEL"
KNOWN = "coverage, coverage_all, coverage_low, coverage_uniform, clean_accuracy, clean_iou, criterion"


class Repeated(Option):
    """An option that may be given several times: all of its values count."""

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        before = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def add_gates(parser: Parser) -> None:
    """Options of the gates."""
    group = parser.add_argument_group("gates: exit code 1 if one fails")
    text = f"fail where a figure is under this, as coverage=0.99; can be repeated. Known: {KNOWN}"
    _add(group, "--fail-under", "METRIC=X", text, Repeated, list[str] | None)
    text = "fail where the fault rate may be more than this: the upper end of the uniform stream's 95% interval"
    add_option(group, "max_fault_rate", float | None, None, text)
    text = "fail on more new faults than this: those that the baseline's model stands up to, by running both on them"
    add_option(group, "max_new_faults", int | None, None, text)
    _add(group, "--baseline", "RUN", "folder of the run that new faults are new against")
    _add(group, "--baseline-weights", "FILE", "weights of its model, if they are elsewhere now")
    _add(group, "--baseline-model", "MODEL", "its model, if it is made in another way now")
    _add(group, "--junit", "FILE", "write the gates as JUnit XML, a test case each")
    _add(group, "--markdown", "FILE", "append a summary in Markdown, as to $GITHUB_STEP_SUMMARY")


def _add(group: Group, flag: str, metavar: str, text: str, action: Any = Option, kind: Any = str | None) -> None:
    group.add_argument(flag, action=action, kind=kind, is_needed=False, default=None, metavar=metavar, help=text)


def read_gates(arguments: Namespace) -> Gates:
    """The gates that were asked for; refuses files that cannot be written before anything runs."""
    from themis.report.gates.gates import Gates

    for name in ("junit", "markdown"):
        path = getattr(arguments, name)
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise UsageError(f"--{name} must be a file in a folder that exists, got {path}: make the folder first")
    others = ("baseline_weights", "baseline_model")
    if arguments.baseline is None and any(getattr(arguments, name) is not None for name in others):
        raise UsageError("--baseline must be given with --baseline-weights and --baseline-model: name the run")
    how = (arguments.max_fault_rate, arguments.max_new_faults, arguments.baseline)
    return Gates.of(arguments.fail_under or (), *how)


def is_asked(arguments: Namespace, gates: Gates) -> bool:
    """Whether anything is to be judged or written."""
    return bool(gates) or arguments.junit is not None or arguments.markdown is not None


def judge(run: Any, gates: Gates, arguments: Namespace, *, folder: str | None) -> Verdicts:
    """Hold a run against the gates and write the files that were asked for."""
    from contextlib import ExitStack, closing

    from themis.report.gates.gates import check_gates, write_junit, write_markdown

    with ExitStack() as stack:
        if arguments.baseline_weights is not None or arguments.baseline_model is not None:
            from dataclasses import replace

            from themis.report.gates.limits import open_baseline

            reader = stack.enter_context(closing(open_baseline(arguments.baseline)))
            gates = replace(gates, baseline=_moved(reader, arguments))
        verdicts = check_gates(run, gates, folder=folder, remedy=REMEDY)
    page = None if verdicts.folder is None else verdicts.folder / "report.html"
    report = page if page is not None and page.is_file() else None
    if arguments.junit is not None:
        write_junit(arguments.junit, verdicts, report=report)
    if arguments.markdown is not None:
        write_markdown(arguments.markdown, verdicts, report=report)
    return verdicts


def judge_stopped(result: Run, gates: Gates | None, arguments: Namespace) -> Verdicts | None:
    """The same of a campaign that has stopped just now; None where nothing was asked, or the user stopped it."""
    if gates is None or result.stop_reason == "user" or not is_asked(arguments, gates):
        return None
    return judge(result, gates, arguments, folder=arguments.out)


def say(verdicts: Verdicts | None, arguments: Namespace) -> int:
    """Print a line a gate, of a quiet command the failed ones alone; the exit code."""
    if verdicts is None:
        return DONE
    is_quiet = getattr(arguments, "quiet", False)
    if not arguments.json:
        for each in verdicts.verdicts:
            if not (is_quiet and each.has_passed):
                print(each.line, file=sys.stderr if is_quiet else sys.stdout)
    return GATE_FAILED if verdicts.has_failed else DONE


def _moved(reader: Any, arguments: Namespace) -> Any:
    from argparse import Namespace

    from themis.cli.resume import moved
    from themis.runs.replay import Replayer

    values = {"model": arguments.baseline_model, "weights": arguments.baseline_weights}
    said = {name for name, value in values.items() if value is not None}
    return Replayer(reader, origin=moved(reader, Namespace(**values), said))
