"""Starting a campaign, and resuming one that was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from themis.campaign.callback import Callback
from themis.campaign.recorder import Callbacks
from themis.campaign.series import open_series, open_stored
from themis.campaign.setup import CampaignPlan, Executor, TestedModel, choose_executor, describe_columns, read_tested
from themis.criteria import Criterion
from themis.data.features import Features
from themis.data.seeds import read_seeds
from themis.errors import UsageError, nearest
from themis.judge import choose_judge
from themis.keywords import ResumeOptions, RunOptions
from themis.perturb import Perturbation, choose_perturbation
from themis.runs.environment import as_plain_data
from themis.runs.parts import read_parts
from themis.runs.replay import Replayer
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.runs.store.writer import Writer
from themis.runs.trust import Trusted
from themis.search import POLICIES, Policy, choose_policy
from themis.search.boundary import Boundary
from themis.settings import Settings
from themis.target.against import Against
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget, refuse_target_options

LIMITS = ("coverage", "recall", "max_tests", "max_passes", "max_seconds", "plateau")
CHANGEABLE = (*LIMITS, "max_stored", "clean_memory_gib")
"""Options that `resume` may change: when to stop, how many faults are stored, and how much memory clean activations
take. None of them changes a test."""


def run(
    target: AnyTarget | nn.Module,
    data: Any,
    perturbation: str | Perturbation,
    *,
    out: str | Path | None = None,
    callbacks: Iterable[Callback] = (),
    origin: Origin | None = None,
    features: Features | str | Path | None = None,
    classes: Sequence[str] | None = None,
    train: Any = None,
    rivals: Iterable[AnyTarget | nn.Module] = (),
    executor: Executor | str | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Test `target` on `data` under `perturbation`. Options are the fields of `Settings`.

    Args:
        target: The model under test; a bare `nn.Module` becomes a `Target` with default options, and an estimator of
            scikit-learn, XGBoost or LightGBM a `BlackBox` with the bounds of its table. `Against(model, reference)`
            tests a model against the reference that it should agree with.
        data: `(inputs, labels)`, a tensor of inputs, a Dataset, a DataLoader, or a DataFrame of pandas or polars.
        perturbation: A name such as `"gaussian"`, a combination such as `"rain + fog"`, or a `Perturbation`.
        out: Folder for the results; without it nothing is written.
        callbacks: Called as the campaign proceeds, see `Callback`.
        origin: How another process can rebuild the target and the data; without it, pass both to `resume`.
        features: The values that the columns of a table may have and how they may change, or a CSV file that says so;
            by default inferred from the data.
        classes: Class names by number; by default those of the data.
        train: Data that the criterion learns from; by default the clean seeds.
        rivals: Other models of the same task, for a policy that compares the target with them.
        executor: Where tests run: by default in this process; `ray` runs them in workers on Ray, with the same
            results.
    """
    refuse_target_options(options)
    listeners = Callbacks(callbacks)
    if isinstance(target, Against):
        options = {"policy": "boundary", **options}
    settings = Settings.of(**options)
    choose_judge(settings.judge)  # refuses an unknown name before anything runs
    policy = _with_rivals(choose_policy(settings.policy), rivals)
    if isinstance(policy, Boundary) and not isinstance(target, Against):
        raise UsageError("policy 'boundary' must have a reference: pass --against (themis.Against), or another policy")
    plan = CampaignPlan(choose_perturbation(perturbation, settings.magnitude), policy, settings)
    tested = read_tested(target, data, [plan.perturbation], settings, origin, features, classes)
    with (
        nullcontext() if out is None else closing(Writer(out)) as store,
        open_series(tested, plan, executor=choose_executor(executor), train=train) as series,
    ):
        return series.run(plan, store, listeners)


def resume(
    out: str | Path,
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    *,
    perturbation: Perturbation | None = None,
    policy: Policy | None = None,
    origin: Origin | None = None,
    features: Features | str | Path | None = None,
    criterion: Criterion | None = None,
    train: Any = None,
    rivals: Iterable[AnyTarget | nn.Module] = (),
    callbacks: Iterable[Callback] = (),
    trust: Trusted = False,
    executor: Executor | str | None = None,
    **options: Unpack[ResumeOptions],
) -> Run:
    """Resume the run in the folder `out`; the result is the same as without a stop.

    Arguments other than `out`, `callbacks`, `trust` and `executor` are needed only if they cannot be created again, for
    example because a model exists only in memory or an object is your own. Options are limits to change. `executor` is
    as for `run`, and may differ from the first time. `trust=True` allows the code that the folder names to run even if
    another user or machine made the folder.
    """
    if features is not None and data is None:
        raise UsageError("features must come with the data they describe: pass data=..., or name both in origin=...")
    with open_stored(out) as (run, store):
        settings = _settings(run, dict(options))
        if features is not None:
            data = describe_columns(read_seeds(data, settings.max_seeds), features)
        if policy is None and settings.policy not in POLICIES:
            raise UsageError(f"the run's policy {settings.policy!r} is not one of Themis's own: pass policy=...")
        chosen = policy or choose_policy(settings.policy)
        rebuilt = Replayer(run, None if target is None else as_target(target), data, perturbation, origin, trust=trust)
        if rebuilt.origin is not None and not rivals:
            rivals = rebuilt.origin.read_rivals()
        chosen = _with_rivals(chosen, rivals)
        n_threads = run.record["environment"]["threads"]
        workers = choose_executor(executor, n_threads)
        target, seeds = rebuilt.target, rebuilt.seeds
        seeds = seeds.with_classes(run.record.get("start", {}).get("classes") or seeds.classes)
        tested = TestedModel(target, seeds, None, rebuilt.origin, None)
        settings = replace(settings, criterion=_recorded_criterion(settings.criterion, criterion))
        plan = CampaignPlan(rebuilt.perturbation, chosen, settings)
        if train is None and run.record["train_sha256"] is not None:
            if rebuilt.origin is None:
                raise UsageError(
                    "the run's criterion learned from training data that cannot be read again: pass train=..."
                )
            train = rebuilt.origin.read_train()
        with open_series(tested, plan, executor=workers, n_threads=n_threads, train=train) as series:
            series.check_same(plan, run, rebuilt.oracle if "start" in run.record else None)
            if settings.split is not None:
                read_parts(run, rebuilt.all_seeds)  # also refuses changes in the other parts of the split
            return series.resume(plan, run, store, Callbacks(callbacks), signs=rebuilt.permission.is_granted)


def _recorded_criterion(recorded: Any, criterion: Criterion | None) -> Any:
    """The run's criterion: its name, or the object that the caller passes again."""
    if criterion is not None and as_plain_data(criterion) != recorded:
        raise UsageError(f"the criterion must be the run's {recorded}, got {criterion!r}: pass the same one")
    if criterion is None and recorded is not None and recorded.startswith("<"):
        raise UsageError(f"the run's criterion {recorded} was created in Python: pass the same one as criterion=...")
    return criterion or recorded


def _with_rivals(policy: Policy, rivals: Iterable[AnyTarget | nn.Module]) -> Policy:
    targets = tuple(as_target(rival) for rival in rivals)
    if not policy.takes_rivals:
        if targets:
            raise UsageError(
                "rivals are models that some policies compare the target with, such as 'deepxplore': pass policy=..."
            )
        return policy
    policy.rivals = targets or policy.rivals
    return policy


def _settings(run: Reader, options: dict[str, Any]) -> Settings:
    for name in options:
        if name not in CHANGEABLE:
            if options[name] == run.record["settings"].get(name):
                continue
            raise UsageError(f"resume cannot change {name!r}, which changes tests: {nearest(name, CHANGEABLE)}")
    return Settings(**{**run.record["settings"], **options})
