"""The model and the data of a command: which options name them, and how those of a recorded run are overridden."""

from __future__ import annotations

import os
import sys
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError
from themis.runs.source import Origin

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.perturb import Perturbation
    from themis.runs.store import Reader
    from themis.settings import Settings

PERTURB_HELP = "a perturbation: gaussian, 'rain(angle=-10:10) + fog' or module:NAME; see themis perturbations"
LOCATION_OPTIONS = ("model", "weights", "trust", "data", "features", "device")
"""Options that say where the model and the data of a recorded run are now."""
REPLAY_OPTIONS = ("model", "weights", "trust", "data", "features", "bounds", "mean", "std", "oracle", "device")
"""Options of commands that run recorded faults again."""


def require(arguments: Namespace, *names: str) -> None:
    """Raise an error if one of these options is missing; a model of the zoo comes with its data."""
    texts = {field.name: field.metadata["help"] for field in fields(Origin)} | {"perturb": PERTURB_HELP}
    for name in names:
        comes_with_zoo = arguments.zoo is not None and name in ("model", "data")
        if not getattr(arguments, name) and not comes_with_zoo:
            raise UsageError(f"--{name} must be given: {texts[name]}")


def origin_folder(folder: str | None) -> str:
    """The absolute folder in which modules and relative paths are looked up; a run records it."""
    if folder is not None and not os.path.isdir(folder):
        raise UsageError(f"--folder must be an existing folder, got {folder}: check the path")
    return os.path.abspath(folder or os.getcwd())


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


def override_origin(run: Reader, overrides: dict[str, Any]) -> Origin | None:
    """The recorded origin of a run with some of its values replaced, or None if there is nothing to replace."""
    from themis.runs.replay import recorded_origin

    recorded, changes = recorded_origin(run), dict(overrides)
    if not changes:
        return None
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
    if changes.get("trust"):
        changes["trust"] = [os.path.abspath(path) for path in changes["trust"]]
    reader, colon, path = changes.get("data", "").partition(":")
    if os.path.exists(path):
        changes["data"] = f"{reader}{colon}{os.path.abspath(path)}"
    sys.path.insert(0, os.getcwd())
    return replace(recorded or Origin(folder=os.getcwd()), **changes)
