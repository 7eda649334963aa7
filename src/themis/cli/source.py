"""The options that name the model, the data and the executor of a command, and overrides for a recorded run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.cli.options import CommandLine, Parser, add_fields, add_option, read_config_file
from themis.errors import UsageError
from themis.runs import trust
from themis.runs.source import Origin, recorded_origin
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE, config
from themis.settings import Settings

if TYPE_CHECKING:
    from themis.campaign.setup import Executor
    from themis.perturb import Perturbation
    from themis.runs.replay import Replayer
    from themis.suites.result import SuiteRun


PERTURB_HELP = "a perturbation: gaussian, 'rain(angle=-10:10) + fog' or module:NAME; see themis perturbations"
LOCATION_OPTIONS = ("model", "weights", "against", "trust", "data", "features", "device")
"""Options that say where the model and the data of a recorded run are now."""
REPLAY_OPTIONS = (*LOCATION_OPTIONS, "bounds", "mean", "std", "oracle")
"""Options of commands that run recorded faults again."""
WORKERS_HELP = "number of workers on Ray; never changes the result"
RAY_ONLY = ("address", "cpus_per_worker", "gpus_per_worker")
"""Options that only `--executor ray` has."""


def add_overrides(
    parser: Parser, names: tuple[str, ...], title: str = "model and data, if not as recorded in the run"
) -> None:
    """Add options that say where the model and the data of a recorded run are now."""
    add_fields(parser.add_argument_group(title), Origin, only=names, shows_default=False)


def require(arguments: CommandLine, *names: str) -> None:
    """Refuse a command line without one of these options; --zoo replaces the model and the data."""
    texts = {field.name: field.metadata.get("help", "") for field in fields(Origin)} | {"perturb": PERTURB_HELP}
    for name in names:
        comes_with_zoo = arguments.zoo is not None and name in ("model", "data")
        if not getattr(arguments, name) and not comes_with_zoo:
            raise UsageError(f"--{name} must be given: {texts[name]}")


def named_origin(arguments: CommandLine) -> Origin:
    """The model and the data that the user names.

    A configuration file counts as the user's own words, except for that in a run folder: like the folder itself, it
    must have been made here or be trusted before code that it names runs.
    """
    folder = arguments.folder  # modules and relative paths are looked up in it; a run records it
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"--folder must be an existing folder, got {folder}: check the path")
    if arguments.config is not None:
        check_config(arguments, Path(arguments.config))
    return Origin.of({**vars(arguments), "folder": os.path.abspath(folder or os.getcwd())})


def check_config(arguments: CommandLine, path: Path) -> None:
    """Refuse the configuration file of a run folder, unless it is trusted or unchanged since Themis wrote it here."""
    folder = path.absolute().parent
    if not any((folder / name).exists() for name in (DATABASE, "environment.json", "summary.json")):
        return

    content = read_config_file(str(path))
    trusted = [] if "trust" in arguments.from_config else arguments.trust or []
    if trust.is_trusted(path, trusted) or trust.is_trusted(folder, trusted):
        arguments.trust = [*trusted, *(content.get("trust") or ())]
        return
    problem, expected = "it holds no run", {}
    if (folder / DATABASE).is_file():
        with closing(Reader(folder)) as run:
            problem, expected = trust.why_not_ours(run.record), config(run.record)
    if not problem and any(name not in expected or expected[name] != value for name, value in content.items()):
        problem = f"its {path.name} was changed since"
    if problem:
        code = ", ".join(trust.code_of(content)) or "no model or data, but other options"
        raise UsageError(
            f"{folder} must be trusted before code that it names runs, but {problem}; {path.name} names {code}: if you "
            f"know them, pass --trust {quote(str(folder))}, or a copy of the file in a folder of your own"
        )


def check_names(perturbation: str, settings: Settings) -> Perturbation:
    """Refuse unknown names before the model and the data are loaded, which may take long; return the perturbation."""
    from themis.campaign.setup import choose_campaign_criterion
    from themis.judge import choose_judge
    from themis.perturb import choose_perturbation
    from themis.search import choose_policy

    chosen = choose_perturbation(perturbation)
    chosen.at(settings.magnitude)
    choose_policy(settings.policy)
    if settings.criterion is not None:
        choose_campaign_criterion(settings.criterion)
    choose_judge(settings.judge)
    return chosen


def rebuild(run: Reader, given: Mapping[str, Any]) -> Replayer:
    """A handle with the recorded model and data of a run, or those that the user has named instead.

    Code that the run folder names runs only if the folder was made here or is trusted; code that the user named runs.
    """
    from themis.runs.replay import Replayer

    trusted = [os.path.abspath(path) for path in given.get("trust") or ()]
    return Replayer(run, origin=override_origin(run, given), trust=trusted)


def override_origin(run: Reader | SuiteRun, given: Mapping[str, Any]) -> Origin | None:
    """The recorded origin of a run, overridden by the options in `REPLAY_OPTIONS` that the user has given."""
    changes = {name: given[name] for name in REPLAY_OPTIONS if name in given and name != "trust"}
    trusted = [os.path.abspath(path) for path in given.get("trust") or ()]
    permission = trust.permit(run.path, run.record, trusted)
    recorded = recorded_origin(run.record, permission)
    if not changes:
        return recorded
    if recorded is None and not {"model", "data"} <= set(changes):
        raise UsageError("--model and --data must both be given: the run was started from Python and records neither")
    if "model" in changes:
        changes["zoo"] = None
    # These paths are relative to the current folder, not to the one in which the run was started.
    for name in ("weights", "features"):
        if changes.get(name):
            changes[name] = os.path.abspath(changes[name])
    for name in ("model", "against"):
        if os.path.isfile(changes.get(name) or ""):
            changes[name] = os.path.abspath(changes[name])
    reader, colon, path = changes.get("data", "").partition(":")
    if os.path.exists(path):
        changes["data"] = f"{reader}{colon}{os.path.abspath(path)}"
    origin = recorded or Origin(folder=os.getcwd())
    return replace(origin, **changes, permission=permission.with_own(changes))


def add_executor(parser: Parser, *, workers: str | None = WORKERS_HELP) -> None:
    """Add the options that choose an executor. workers: the help of `--workers`; None if the command adds it itself."""
    group = parser.add_argument_group("where it runs")
    text = "local, or ray: in workers on this machine or on a cluster, with the same results"
    add_option(group, "executor", str, "local", text)
    if workers is not None:
        add_option(group, "workers", int | None, None, workers)
    text = "address of a running Ray cluster, or auto for one on this machine (default: Ray is started and stopped)"
    add_option(group, "address", str | None, None, text)
    add_option(group, "cpus_per_worker", int | None, None, "CPUs and threads of each worker (default: 1)")
    add_option(group, "gpus_per_worker", float, 0.0, "GPUs of each worker; 0.5 lets two workers share one")


def read_executor(arguments: CommandLine, *, shares_workers: bool = False) -> Executor | None:
    """The chosen executor, None for the local one; `shares_workers`: `--workers` is also for the local one."""
    from themis.campaign.setup import EXECUTORS, choose_executor

    if choose_executor(arguments.executor) is not None:
        names = (*RAY_ONLY, *(["workers"] if "workers" in arguments.given else []))
        options = {name: getattr(arguments, name) for name in names}
        return EXECUTORS[arguments.executor](**{name: value for name, value in options.items() if value is not None})
    for name in (*RAY_ONLY, *(() if shares_workers else ("workers",))):
        if name in arguments.given and getattr(arguments, name):  # a printed configuration has all options
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} must come with --executor ray, which starts workers: add it, or leave {flag} out")
    return None
