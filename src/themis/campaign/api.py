"""Starting a campaign, and resuming one that was stopped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from themis.campaign.callback import Callback, Callbacks
from themis.campaign.criterion import CampaignCriterion, prepare_criterion
from themis.campaign.hiring import check_workers, hired
from themis.campaign.loop import has_finished, run_campaign
from themis.campaign.recorder import Recorder
from themis.campaign.setup import Setup, check_classes, prepare
from themis.campaign.state import Clock, State, saved_chunk
from themis.campaign.tested import describe_columns, read_tested
from themis.compute.cluster import RayExecutor, choose_executor
from themis.criteria.criterion import Criterion
from themis.data.features import Features
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, ModelError, UsageError, nearest, warn
from themis.judge import choose_judge
from themis.keywords import ResumeOptions, RunOptions
from themis.perturb import Perturbation, choose_perturbation
from themis.runs.environment import (
    as_plain_data,
    describe_environment,
    describe_run,
    describe_tested,
    list_changes,
    threads,
)
from themis.runs.faults import Faults
from themis.runs.parts import read_parts
from themis.runs.replay import LiveRun, Replayer
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.runs.store.writer import Checkpoint, Writer
from themis.runs.trust import Trusted
from themis.search import POLICIES, Policy, choose_policy
from themis.settings import Settings
from themis.target.blackbox import as_target
from themis.target.fingerprint import hash_seeds, hash_tensors
from themis.target.ledger import ledger_of
from themis.target.target import AnyTarget, refuse_target_options
from themis.target.traits import refuse_tokens

CHANGEABLE = ("coverage", "recall", "max_tests", "max_passes", "max_seconds", "plateau", "max_stored")
"""Options that `resume` may change: when to stop, and how many faults are stored. None of them changes a test."""


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
    executor: RayExecutor | str | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Test `target` on `data` under `perturbation`. Options are the fields of `Settings`.

    Args:
        target: The model under test; a bare `nn.Module` becomes a `Target` with default options, and an estimator of
            scikit-learn, XGBoost or LightGBM a `BlackBox` with the bounds of its table.
        data: `(inputs, labels)`, a tensor of inputs, a Dataset, a DataLoader, or a DataFrame of pandas or polars.
        perturbation: A name such as `"gaussian"`, a combination such as `"rain + fog"`, or a `Perturbation`.
        out: Folder for the results; without it nothing is written.
        callbacks: Called as the campaign proceeds, see `Callback`.
        origin: How another process can build the target and the data again; without it, `resume` must be given both.
        features: What the columns of a table may hold and how they may change, or a CSV file with that; inferred from
            the data by default.
        classes: Class names by number; by default those that the data has.
        train: Data that the criterion learns from; by default the clean seeds.
        rivals: Other models of the same task, for a policy that compares the target with them.
        executor: Where tests run: by default in this process; `RayExecutor` runs them in workers on Ray, with the same
            results.
    """
    refuse_target_options(options)
    listeners = Callbacks(callbacks)
    settings = Settings.of(**options)
    choose_judge(settings.judge)  # refuses an unknown name before anything runs
    policy = _with_rivals(choose_policy(settings.policy), rivals)
    chosen = choose_perturbation(perturbation, settings.magnitude)
    tested = read_tested(target, data, [chosen], settings, origin, features, classes)
    target, seeds, split, origin, class_names = tested
    chosen = chosen.fitted(tuple(seeds.shape[1:]))
    ledger_of(target, None if origin is None else origin.weights_path()).warn(seeds)
    workers = choose_executor(executor)
    if workers is not None:
        check_workers(workers, target, policy, settings)
    with (
        nullcontext() if workers is None else threads(workers.threads),
        nullcontext() if out is None else closing(Writer(out)) as store,
        hired(workers, target, seeds, chosen, settings, origin) as hire,
        _opened(target, policy),
    ):
        refuse_tokens(target, seeds.take(torch.arange(1))[0])
        environment = describe_environment(target.device)
        criterion = prepare_criterion(settings, policy, target, seeds, train)
        if store:
            environment |= describe_tested(target, seeds, origin)
            record = describe_run(settings, origin, chosen, environment) | describe_features(chosen, seeds)
            record |= _hashes(settings, policy, criterion, train)
            record["parts"] = None if split is None else split.describe()
            store.create(record, settings.max_stored, None if split is None else split.as_bytes())
        clock = Clock()
        with clock.timed("measure"):
            setup = prepare(target, seeds, chosen, policy, settings, environment, criterion, hire=hire)
        if class_names is not None:
            check_classes(setup.calculator)
        state = State.initial(setup, clock)
        result = run_campaign(setup, state, Recorder(no_faults(setup), listeners, store))
        return replace(result, folder=None if out is None else Path(out))


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
    executor: RayExecutor | str | None = None,
    **options: Unpack[ResumeOptions],
) -> Run:
    """Resume the run in the folder `out`; it ends as if it had never been stopped.

    The arguments other than `out`, `callbacks`, `trust` and `executor` are needed only if the run cannot create them
    again, for example because a model lives in memory or an object is your own. Options are the limits that should
    differ from the first time. `executor` is as for `run`, and need not be that of the first time.
    `trust=True` allows code that the folder names to run although the folder was not made on this machine by this user.
    """
    if features is not None and data is None:
        raise UsageError("features must come with the data they describe: pass data=..., or name both in origin=...")
    Reader(out, is_brief=True).close()  # refuses a folder without a run
    with closing(Writer(out)) as store, closing(Reader(out, is_brief=True)) as run:
        settings = _settings(run, dict(options))
        if features is not None:
            data = describe_columns(read_seeds(data, settings.max_seeds), features)
        chosen = policy or _recorded_policy(settings)
        rebuilt = Replayer(run, None if target is None else as_target(target), data, perturbation, origin, trust=trust)
        if rebuilt.origin is not None and not rivals:
            rivals = rebuilt.origin.read_rivals()
        chosen = _with_rivals(chosen, rivals)
        n_threads = run.record["environment"]["threads"]
        workers = choose_executor(executor, n_threads)
        if workers is not None:
            check_workers(workers, rebuilt.target, chosen, settings)
        with threads(n_threads):
            environment = _check_environment(rebuilt, run)
            rebuilt.check_same_tests()
        with (
            threads(n_threads),
            hired(workers, rebuilt.target, rebuilt.seeds, rebuilt.perturbation, settings, rebuilt.origin) as hire,
            _opened(rebuilt.target, chosen),
        ):
            own_criterion = _recorded_criterion(run, criterion, rebuilt, chosen, settings, train)
            fitted = rebuilt.perturbation.fitted(tuple(rebuilt.seeds.shape[1:]))
            record = describe_run(settings, rebuilt.origin, fitted, run.record["environment"])
            checkpoint = run.checkpoint()
            chunk = None if checkpoint is None else saved_chunk(checkpoint)
            class_names = run.record.get("start", {}).get("classes") or rebuilt.seeds.classes
            seeds = rebuilt.seeds.with_classes(class_names)
            clock = Clock()
            with clock.timed("measure"):
                setup = prepare(
                    rebuilt.target,
                    seeds,
                    rebuilt.perturbation,
                    chosen,
                    settings,
                    environment,
                    own_criterion,
                    chunk,
                    hire=hire,
                )
            permits = rebuilt.permission.is_granted
            listeners = Callbacks(callbacks)
            result = continue_campaign(setup, clock, run, store, record, checkpoint, listeners, signs=permits)
            return replace(result, folder=Path(out))


def continue_campaign(
    setup: Setup,
    clock: Clock,
    run: Reader,
    store: Writer,
    record: dict[str, Any],
    checkpoint: Checkpoint | None,
    callbacks: Callbacks,
    *,
    signs: bool,
) -> Run:
    """Continue a stored campaign from its last checkpoint. One that has ended is left as it is, unless a limit was
    raised.

    record: what the folder records from now on. signs: whether the code that it names may run.
    """
    settings = setup.settings
    state, faults = State.initial(setup, clock), no_faults(setup)
    if checkpoint is not None:
        state.restore(checkpoint, run.rounds(checkpoint.rounds), setup)
        recorded = run.faults("id < ?", (checkpoint.tests,))
        if len(recorded):
            faults.add(**recorded.columns)
    summary = run.summary()
    if summary is not None and run.state(summary) == "ended" and has_finished(setup, state):
        before = replace(setup, settings=Settings.recorded(run.record["settings"]))
        setup = before if has_finished(before, state) else setup
        state.clock = Clock()  # looking at the run again is no part of its time
        state.clock.restore(summary["seconds"])
        return run_campaign(setup, state, Recorder(faults, callbacks, None))
    # From here on the folder changes.
    store.reopen(record, settings.max_stored, signs=signs)
    return run_campaign(setup, state, Recorder(faults, callbacks, store))


def no_faults(setup: Setup) -> Faults:
    """An empty collection of a campaign's faults, which can replay each of them."""
    theta = tuple(dimension.name for dimension in setup.perturbation.theta)
    layers = tuple(layer.name for layer in setup.calculator.layers)
    handle = LiveRun(setup.calculator, setup.settings.random_seed)
    task = setup.calculator.oracle.spec().partition(":")[0]
    return Faults(setup.perturbation.name, theta, layers, handle, task, setup.seeds.classes)


def _recorded_criterion(
    run: Reader, criterion: Criterion | None, rebuilt: Replayer, policy: Policy, settings: Settings, train: Any
) -> CampaignCriterion | None:
    """The run's criterion, fitted again to the data it learned from."""
    recorded = settings.criterion
    if criterion is not None and as_plain_data(criterion) != recorded:
        raise UsageError(f"the criterion must be the run's {recorded}, got {criterion!r}: pass the same one")
    if criterion is None and recorded is not None and recorded.startswith("<"):
        raise UsageError(f"the run's criterion {recorded} was created in Python: pass the same one as criterion=...")
    settings = replace(settings, criterion=criterion or recorded)
    if train is None and run.record["train_sha256"] is not None:
        if rebuilt.origin is None:
            raise UsageError("the run's criterion learned from training data that cannot be read again: pass train=...")
        train = rebuilt.origin.read_train()
    prepared = prepare_criterion(settings, policy, rebuilt.target, rebuilt.seeds, train)
    hashes = _hashes(settings, policy, prepared, train)
    for name, subject, error in (
        ("train_sha256", "training data", DataError),
        ("criterion_sha256", "fitted criterion", UsageError),
        ("rivals_sha256", "rivals", ModelError),
    ):
        if hashes[name] != run.record[name]:
            raise error(
                f"the {subject} must be the same as in the run, but the hash differs: pass the same, or start a new run"
            )
    return prepared


def _hashes(settings: Settings, policy: Policy, criterion: CampaignCriterion | None, train: Any) -> dict[str, Any]:
    """Hashes that identify the training data, the rivals, and a criterion that was created in Python."""
    is_object = criterion is not None and isinstance(settings.criterion, Criterion)
    return {
        "train_sha256": None if train is None else hash_seeds(read_seeds(train, settings.train_inputs)),
        "criterion_sha256": hash_tensors(criterion.criterion.learnt) if criterion is not None and is_object else None,
        "rivals_sha256": [rival.fingerprint() for rival in policy.rivals],
    }


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


@contextmanager
def _opened(target: AnyTarget, policy: Policy) -> Iterator[None]:
    """The target and the policy's rivals, ready for use."""
    with ExitStack() as stack:
        for model in (target, *policy.rivals):
            stack.enter_context(model.opened())
        yield


def describe_features(perturbation: Perturbation, seeds: Seeds) -> dict[str, Any]:
    """What identifies a table's features if tests depend on them, and how a report displays their values."""
    coding = {} if seeds.coding is None else {"coding": seeds.coding.as_dict()}
    if perturbation.inputs != "table":
        return coding
    axes: dict[str, Any] = getattr(seeds.features.axes, "as_dict", dict)()
    return {
        "features_sha256": seeds.features.sha256,
        "feature_names": list(seeds.features.names),
        "feature_axes": axes,
        **coding,
    }


def _settings(run: Reader, options: dict[str, Any]) -> Settings:
    for name in options:
        if name not in CHANGEABLE:
            if options[name] == run.record["settings"].get(name):
                continue
            raise UsageError(f"resume cannot change {name!r}, only when to stop: {nearest(name, CHANGEABLE)}")
    return Settings.recorded({**run.record["settings"], **options})


def _recorded_policy(settings: Settings) -> Policy:
    if settings.policy not in POLICIES:
        raise UsageError(f"the run's policy {settings.policy!r} is not one of Themis's own: pass policy=...")
    return choose_policy(settings.policy)


def _check_environment(rebuilt: Replayer, run: Reader) -> dict[str, Any]:
    """Refuse another model or other data; warn of changes that can change the last bits."""
    then = run.record["environment"]
    tested = describe_tested(rebuilt.target, rebuilt.seeds, rebuilt.origin)
    for name, subject, error in (("model_sha256", "model", ModelError), ("data_sha256", "data", DataError)):
        if tested[name] != then[name]:
            raise error(
                f"the {subject} must be the same as in the run, but its hash is {tested[name][:12]}... and was "
                f"{then[name][:12]}...: pass the same {subject}, or start a new run"
            )
    if run.record["settings"].get("split") is not None:
        read_parts(run, rebuilt.all_seeds)  # the parts that were not searched must be the same too
    features = describe_features(rebuilt.perturbation, rebuilt.seeds)
    if features.get("features_sha256") != run.record.get("features_sha256"):
        raise DataError(
            "the table's features must be the same as in the run, but they are described differently now: pass the "
            "same features, or start a new run"
        )
    now = describe_environment(rebuilt.target.device)
    changes = list_changes({name: then[name] for name in now if name in then}, now)
    if changes:
        warn(f"resumed in another environment, so the last bits and near-ties may differ: {'; '.join(changes)}")
    return {**now, **tested}
