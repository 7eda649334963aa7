"""Beginning a campaign: a new one, or one that goes on where it was stopped."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from themis.campaign.callback import Callback, Callbacks
from themis.campaign.criterion import Guide, make_guide
from themis.campaign.loop import Campaign
from themis.campaign.setup import check_classes
from themis.criteria.criterion import Criterion
from themis.data.features import Features
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, ModelError, UsageError, nearest
from themis.judge import choose_judge
from themis.measure.similarity import check_similarity
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.runs.environment import (
    as_plain_data,
    describe_environment,
    describe_run,
    describe_tested,
    list_changes,
    threads,
)
from themis.runs.parts import SeedSplit, read_parts
from themis.runs.replay import Replayer
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store import Reader, Writer
from themis.search import POLICIES, DeepXplore, Policy, choose_policy
from themis.settings import Settings
from themis.target.fingerprint import hash_seeds, hash_tensors
from themis.target.ledger import ledger_of
from themis.target.target import AnyTarget, as_target

CHANGEABLE = ("coverage", "max_tests", "max_passes", "max_seconds", "plateau", "max_stored", "clean_memory_gib")
"""Options that may differ from the first time: when to stop, and what never changes a result."""


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
    **options: Any,
) -> Run:
    """Test `target` on `data` under `perturbation`; options are the fields of `Settings`.

    data: `(inputs, labels)`, a tensor of inputs, a Dataset or a DataLoader. out: folder for the results. origin: how
    another process makes target and data again; without it a resumed run must be given both. features: what a table's
    columns may hold and how they may change, or a CSV file that says so; by default as the data shows it. classes:
    names by number; by default as the data has them. train: data that the criterion learns from; by default the clean
    seeds. rivals: other models of the task, for policy deepxplore.
    """
    settings = Settings.of(**options)
    choose_judge(settings.judge)  # refuses an unknown name before anything runs
    policy = _with_rivals(choose_policy(settings.policy), rivals)
    chosen = choose_perturbation(perturbation, settings.magnitude)
    target = as_target(target)
    check_gradient(chosen, target)
    seeds = _described(read_seeds(data, settings.max_seeds), features)
    given = origin.classes if classes is None and origin is not None else classes
    seeds = seeds if given is None else seeds.with_classes(given)
    check_fits(chosen, seeds.shape[1:])
    if chosen.inputs == "table":
        seeds.features.check_inside(target.bounds)
    check_similarity(settings.min_ssim, seeds.shape[1:])
    split = None if settings.split is None else SeedSplit.of(seeds, settings.split, settings.split_seed)
    seeds = seeds if split is None else split.search(seeds)
    ledger_of(target, None if origin is None else origin.weights_path()).warn(seeds)
    with nullcontext() if out is None else closing(Writer(out)) as store, _opened(target, policy):
        environment = describe_environment(target.device)
        guide = make_guide(settings, policy, target, seeds, train)
        if store:
            environment |= describe_tested(target, seeds, origin)
            record = describe_run(settings, origin, chosen, environment) | _features_hash(chosen, seeds)
            record |= _hashes(settings, policy, guide, train)
            record["parts"] = None if split is None else split.describe()
            store.create(record, settings.max_stored, None if split is None else split.as_bytes())
        told = Callbacks(callbacks)
        campaign = Campaign(target, seeds, chosen, policy, settings, told, store, environment, guide=guide)
        if given is not None:
            check_classes(campaign)
        return campaign.run()


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
    **options: Any,
) -> Run:
    """Go on with the run in the folder `out`; it ends as if it had never been stopped.

    target, data, features, perturbation, policy, criterion, train, rivals: needed where the run cannot make them again,
    as a model that lives in memory, or objects of your own. options: limits that shall differ from the first time.
    """
    if features is not None and data is None:
        raise UsageError("features must come with the data they describe: pass data=..., or name both in origin=...")
    with closing(Reader(out)) as run:
        settings = _settings(run, options)
        if features is not None:
            data = _described(read_seeds(data, settings.max_seeds), features)
        chosen = policy or _policy(settings)
        made = Replayer(run, None if target is None else as_target(target), data, perturbation, origin)
        if made.origin is not None and not rivals:
            rivals = made.origin.read_rivals()
        chosen = _with_rivals(chosen, rivals)
        n_threads = run.record["environment"]["threads"]
        with closing(Writer(run.path)) as store, threads(n_threads), _opened(made.target, chosen):
            environment = _checked_environment(made, run)
            guide = _guide(run, criterion, made, chosen, settings, train)
            record = describe_run(settings, made.origin, made.perturbation, run.record["environment"])
            checkpoint = run.checkpoint()
            chunk = None if checkpoint is None else checkpoint.values["chunk"]
            classes = run.record.get("start", {}).get("classes") or made.seeds.classes
            what = (made.target, made.seeds.with_classes(classes), made.perturbation, chosen, settings)
            campaign = Campaign(*what, Callbacks(callbacks), store, environment, chunk, guide)
            if checkpoint is not None:
                faults = run.faults("id < ?", (checkpoint.tests,))
                campaign.restore(checkpoint, run.rounds(checkpoint.rounds), faults)
            store.reopen(record, settings.max_stored)  # from here on the run is another
            return campaign.run()


def _guide(
    run: Reader, criterion: Criterion | None, made: Replayer, policy: Policy, settings: Settings, train: Any
) -> Guide | None:
    """The run's criterion, which learns again from what it has learnt from."""
    recorded = settings.criterion
    if criterion is not None and as_plain_data(criterion) != recorded:
        raise UsageError(f"the criterion must be the run's {recorded}, got {criterion!r}: give the same")
    if criterion is None and recorded is not None and recorded.startswith("<"):
        raise UsageError(f"the run's criterion {recorded} was made in Python: pass criterion=..., the same")
    settings = replace(settings, criterion=criterion or recorded)
    if train is None and run.record["train_sha256"] is not None:
        if made.origin is None:
            raise UsageError("the run's criterion learnt from training data that cannot be read again: pass train=...")
        train = made.origin.read_train()
    guide = make_guide(settings, policy, made.target, made.seeds, train)
    hashes = _hashes(settings, policy, guide, train)
    for name, what, error in (
        ("train_sha256", "training data must be what the criterion learnt from", DataError),
        ("criterion_sha256", "criterion must have learnt what the run's had", UsageError),
        ("rivals_sha256", "rivals must be the models that the run had", ModelError),
    ):
        if hashes[name] != run.record[name]:
            raise error(f"the {what}, its hash is another: give the same, or begin a new run")
    return guide


def _hashes(settings: Settings, policy: Policy, guide: Guide | None, train: Any) -> dict[str, Any]:
    """What tells training data, rivals, and a criterion that was made in Python, from others."""
    is_object = guide is not None and isinstance(settings.criterion, Criterion)
    return {
        "train_sha256": None if train is None else hash_seeds(read_seeds(train, settings.train_inputs)),
        "criterion_sha256": hash_tensors(guide.criterion.learnt) if guide is not None and is_object else None,
        "rivals_sha256": [each.fingerprint() for each in getattr(policy, "rivals", ())],
    }


def _with_rivals(policy: Policy, rivals: Iterable[AnyTarget | nn.Module]) -> Policy:
    given = tuple(as_target(each) for each in rivals)
    if not isinstance(policy, DeepXplore):
        if given:
            raise UsageError("rivals are models that policy 'deepxplore' sets against the target: pass policy=...")
        return policy
    policy.rivals = given or policy.rivals
    return policy


@contextmanager
def _opened(target: AnyTarget, policy: Policy) -> Iterator[None]:
    """The target, and the models that the policy sets against it, ready for use."""
    with ExitStack() as stack:
        for each in (target, *getattr(policy, "rivals", ())):
            stack.enter_context(each.opened())
        yield


def _described(seeds: Seeds, features: Features | str | Path | None) -> Seeds:
    return seeds if features is None else seeds.with_features(features)


def _features_hash(perturbation: Perturbation, seeds: Seeds) -> dict[str, Any]:
    """What tells a table's features from others, where tests depend on them; and how a report says their values."""
    if perturbation.inputs != "table":
        return {}
    axes: dict[str, Any] = getattr(seeds.features.axes, "as_dict", dict)()
    return {
        "features_sha256": seeds.features.sha256,
        "feature_names": list(seeds.features.names),
        "feature_axes": axes,
    }


def _settings(run: Reader, options: dict[str, Any]) -> Settings:
    for name in options:
        if name not in CHANGEABLE:
            raise UsageError(f"resume cannot change {name!r}, only when to stop: {nearest(name, CHANGEABLE)}")
    return Settings(**{**run.record["settings"], **options})


def _policy(settings: Settings) -> Policy:
    if settings.policy not in POLICIES:
        raise UsageError(f"the run's policy {settings.policy!r} has no name that is known here: pass policy=...")
    return choose_policy(settings.policy)


def _checked_environment(made: Replayer, run: Reader) -> dict[str, Any]:
    """Refuse another model or other data; warn of what changes last bits."""
    then = run.record["environment"]
    tested = describe_tested(made.target, made.seeds, made.origin)
    for name, what, error in (("model_sha256", "model", ModelError), ("data_sha256", "data", DataError)):
        if tested[name] != then[name]:
            raise error(
                f"the {what} must be the one that was tested, its hash is {tested[name][:12]}..., the run's was "
                f"{then[name][:12]}...: give the same {what}, or begin a new run"
            )
    if run.record["settings"].get("split") is not None:
        read_parts(run, made.all_seeds)  # those that were not searched must be the same too
    if _features_hash(made.perturbation, made.seeds).get("features_sha256") != run.record.get("features_sha256"):
        raise DataError(
            "the table's features must be those that were tested, others are described now: give the same ones, or "
            "begin a new run"
        )
    now = describe_environment(made.target.device)
    changes = list_changes({name: then[name] for name in now}, now)
    if changes:
        warnings.warn(
            f"resumed in another environment, so that last bits and near-ties may differ: {'; '.join(changes)}",
            RuntimeWarning,
            stacklevel=3,
        )
    return {**now, **tested}
