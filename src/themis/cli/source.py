"""The model and the data of a command: which options name them, and how those of a recorded run are overridden."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from themis.errors import UsageError
from themis.runs.source import OPTIONS, Origin
from themis.runs.store.schema import DATABASE
from themis.settings import Settings

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.perturb import Perturbation
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader


class Recorded(Protocol):
    """A folder of a run or a suite, and what it records."""

    @property
    def path(self) -> Path: ...

    @property
    def record(self) -> dict[str, Any]: ...


PERTURB_HELP = "a perturbation: gaussian, 'rain(angle=-10:10) + fog' or module:NAME; see themis perturbations"
TRUST_HELP = "Code that a run folder from elsewhere names runs only with --trust RUN."
LOCATION_OPTIONS = ("model", "weights", "trust", "data", "features", "device")
"""Options that say where the model and the data of a recorded run are now."""
REPLAY_OPTIONS = ("model", "weights", "trust", "data", "features", "bounds", "mean", "std", "oracle", "device")
"""Options of commands that run recorded faults again."""


def require(arguments: Namespace, *names: str) -> None:
    """Raise an error if one of these options is missing; a model of the zoo comes with its data."""
    texts = {field.name: field.metadata.get("help", "") for field in fields(Origin)} | {"perturb": PERTURB_HELP}
    for name in names:
        comes_with_zoo = arguments.zoo is not None and name in ("model", "data")
        if not getattr(arguments, name) and not comes_with_zoo:
            raise UsageError(f"--{name} must be given: {texts[name]}")


def origin_folder(folder: str | None) -> str:
    """The absolute folder in which modules and relative paths are looked up; a run records it."""
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"--folder must be an existing folder, got {folder}: check the path")
    return os.path.abspath(folder or os.getcwd())


def named_origin(arguments: Namespace) -> Origin:
    """The model and the data that the user names; a configuration file counts as the user's own command line.

    The exception is the file in a run folder, which another program wrote: like the folder itself, it must have been
    made here or be trusted before code that it names runs.
    """
    folder = origin_folder(arguments.folder)
    if arguments.config is not None:
        check_config(arguments, Path(arguments.config))
    return Origin.of({**vars(arguments), "folder": folder})


def check_config(arguments: Namespace, path: Path) -> None:
    """Refuse code that the configuration file of a run folder names, unless the folder was made here or is trusted."""
    folder = path.absolute().parent
    if not any((folder / name).exists() for name in (DATABASE, "environment.json", "summary.json")):
        return
    from themis.cli.options import read_config_file
    from themis.runs.store.reader import Reader
    from themis.runs.trust import (
        CODE_OPTIONS,
        Permission,
        is_trusted,
        names_code,
        perturbation_code,
        pickled_files,
        why_not_ours,
    )

    content = read_config_file(str(path))
    trusted = [] if "trust" in arguments.from_config else arguments.trust or []
    if is_trusted(path, trusted) or is_trusted(folder, trusted):
        arguments.trust = [*trusted, *(content.get("trust") or ())]
        return
    problem, expected = "it holds no run", {}
    if (folder / DATABASE).is_file():
        with closing(Reader(folder)) as run:
            problem, expected = why_not_ours(run.record), run.config()
    if not problem and any(name not in expected or expected[name] != value for name, value in content.items()):
        problem = f"its {path.name} was changed since"
    values = {name: getattr(arguments, name, None) for name in arguments.from_config}
    code = [phrase for name in CODE_OPTIONS if name in values for phrase in names_code(name, values[name])]
    code += perturbation_code(str(values.get("perturb") or ""))
    code += pickled_files(values.get("trust") or ())
    own = [phrase for name in CODE_OPTIONS for phrase in names_code(name, getattr(arguments, name, None))]
    if values.get("folder") and own:
        code.append(f"modules in {values['folder']!r}")
    known = {*OPTIONS, "perturb", *(field.name for field in fields(Settings))}
    code += [f"the option {name} of {path.name}" for name in sorted(arguments.from_config - known)]
    Permission(str(folder), problem).require(code)


def check_names(perturbation: str, settings: Settings) -> Perturbation:
    """Reject unknown names before the model and the data are loaded, which may take long; returns the perturbation."""
    from themis.campaign.criterion import choose_campaign_criterion
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


def rebuild(run: Reader, overrides: dict[str, Any]) -> Replayer:
    """The run with its model and data as recorded, except for the values of options that the user has set.

    Code that the run folder names runs only if the folder was made here or is trusted; what the user named may run.
    """
    from themis.runs.replay import Replayer

    trust = [os.path.abspath(path) for path in overrides.get("trust") or ()]
    return Replayer(run, origin=override_origin(run, overrides), trust=trust)


def override_origin(run: Recorded, overrides: dict[str, Any]) -> Origin | None:
    """The recorded origin of a run with some of its values replaced, or None if there is nothing to replace."""
    from themis.runs.source import recorded_origin
    from themis.runs.trust import permit

    changes = {name: value for name, value in overrides.items() if name != "trust"}
    trusted = [os.path.abspath(path) for path in overrides.get("trust") or ()]
    permission = permit(run.path, run.record, trusted)
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
    if os.path.isfile(changes.get("model", "")):
        changes["model"] = os.path.abspath(changes["model"])
    reader, colon, path = changes.get("data", "").partition(":")
    if os.path.exists(path):
        changes["data"] = f"{reader}{colon}{os.path.abspath(path)}"
    origin = recorded or Origin(folder=os.getcwd())
    return replace(origin, **changes, permission=permission.with_own(changes))
