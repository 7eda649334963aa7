"""Campaigns on one model and its seeds: starting and resuming a campaign, alone or in a suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from themis.campaign.loop import has_finished, run_campaign
from themis.campaign.recorder import Callbacks, Recorder
from themis.campaign.setup import (
    CampaignCriterion,
    CampaignPlan,
    CleanSweep,
    Executor,
    MakeMeasurer,
    Setup,
    TestedModel,
    check_classes,
    prepare,
    prepare_criterion,
    sweep_clean,
)
from themis.campaign.state import Clock, State
from themis.criteria import Criterion
from themis.data.seeds import Seeds, read_seeds
from themis.data.slices import read_seed_weights
from themis.errors import DataError, ModelError, UsageError, warn
from themis.measure.kernels_cuda import can_fold
from themis.measure.runner import LocalMeasurer
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.perturb.perturbation import is_same_code
from themis.runs.analysis.review import read_review
from themis.runs.environment import (
    check_same_tests,
    describe_environment,
    describe_run,
    describe_tested,
    list_changes,
    threads,
)
from themis.runs.faults import Faults
from themis.runs.replay import LiveRun
from themis.runs.run import Run, Seconds
from themis.runs.store.files import is_database
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.runs.store.writer import Checkpoint, Writer
from themis.settings import Settings
from themis.target.fingerprint import hash_seeds, hash_tensors
from themis.target.ledger import ledger_of
from themis.target.traits import refuse_tokens

IDENTITY_HASHES = (
    ("model_sha256", "model", ModelError),
    ("reference_sha256", "reference", ModelError),
    ("data_sha256", "data", DataError),
)
"""What must be the same when a campaign is resumed: the key in its record, the noun in messages, the error."""
LEARNED_HASHES = (
    ("train_sha256", "training data", DataError),
    ("criterion_sha256", "fitted criterion", UsageError),
    ("rivals_sha256", "rivals", ModelError),
    ("seed_weights_sha256", "weights of the seeds", DataError),
)
"""The same for what the criterion and the policy depend on."""
MAX_REMEMBERED_NEURONS = 1 << 25
"""Limit for the neurons of all remembered campaigns together; the sums of each neuron take 56 bytes."""


@dataclass(frozen=True)
class Campaign:
    """A campaign of a series that has stopped at the limits of its plan, and can be continued."""

    setup: Setup
    state: State
    faults: Faults
    record: dict[str, Any]
    seconds: Seconds


@dataclass(frozen=True)
class CampaignSeries:
    """An open target and its seeds. A single campaign is a series of one."""

    tested: TestedModel
    environment: dict[str, Any]
    make_measurer: MakeMeasurer
    train: Any = None
    """Data that criteria learn from; by default the clean seeds."""
    sweep: CleanSweep | None = None
    """The clean sweep that all campaigns share; without it, each campaign runs the clean inputs itself."""
    remembered: dict[Path, Campaign] = field(default_factory=dict)
    """Campaigns by folder that can be continued without reading the folder."""

    @cached_property
    def hashes(self) -> dict[str, Any]:
        """Hashes that identify the model and the data."""
        return describe_tested(self.tested.target, self.tested.seeds, self.tested.origin)

    def with_sweep(self, plan: CampaignPlan) -> CampaignSeries:
        """Run a clean sweep with the settings of `plan`, and return the series whose campaigns share it."""
        return replace(self, sweep=self._sweep(plan, None, None))

    def run(self, plan: CampaignPlan, store: Writer | None, callbacks: Callbacks) -> Run:
        """Run a new campaign; without a store, nothing is written."""
        environment = self.environment if store is None else self.environment | self.hashes
        criterion, record = self._criterion(plan), {}
        if store is not None:
            split = self.tested.split
            record = self._record(plan, criterion, environment)
            record["parts"] = None if split is None else split.describe()
            store.create(record, plan.settings.max_stored, None if split is None else split.as_bytes())
        clock = Clock()
        with clock.timed("measure"):
            setup = self._prepare(plan, criterion, environment)
        state, faults = State.initial(setup, plan.policy, clock), _no_faults(setup)
        run = run_campaign(setup, state, Recorder(faults, callbacks, store))
        if store is None:
            return run
        neurons = setup.calculator.n_neurons
        if self.sweep is not None and neurons * (1 + len(self.remembered)) <= MAX_REMEMBERED_NEURONS:
            self.remembered[store.path] = Campaign(setup, state, faults, record, run.seconds)
        return replace(run, folder=store.path)

    def proceed(self, plan: CampaignPlan, path: Path, callbacks: Callbacks, *, signs: bool) -> Run:
        """Run a campaign up to the limits of its plan: start it in the folder, or continue it."""
        if path in self.remembered:
            run = self._continue(self.remembered[path], plan, path, callbacks, signs=signs)
        elif not _has_begun(path):
            with closing(Writer(path)) as store:
                run = self.run(plan, store, callbacks)
        else:
            with open_stored(path) as (stored, store):
                plan = _as_recorded(plan, stored)
                self.check_same(plan, stored, None if self.sweep is None else self.sweep.calculator.clean.oracle)
                run = self.resume(plan, stored, store, callbacks, signs=signs)
        return run

    def _continue(
        self, campaign: Campaign, plan: CampaignPlan, path: Path, callbacks: Callbacks, *, signs: bool
    ) -> Run:
        """Raise the limit of tests of a remembered campaign, and run it up to the new limit."""
        assert self.sweep is not None
        max_tests, state = plan.settings.max_tests, campaign.state
        setup = replace(campaign.setup, settings=replace(campaign.setup.settings, max_tests=max_tests))
        setup.calculator.clean = self.sweep.calculator.clean
        setup.sweep.measurer.begin(setup.panel_neurons, setup.scale)
        state.clock = Clock()
        state.clock.restore(vars(campaign.seconds))
        record = campaign.record | {"settings": campaign.record["settings"] | {"max_tests": max_tests}}
        with closing(Writer(path)) as store:
            store.reopen(record, setup.settings.max_stored, signs=signs)
            run = run_campaign(setup, state, Recorder(campaign.faults, callbacks, store))
        self.remembered[path] = replace(campaign, seconds=run.seconds)
        return replace(run, folder=path)

    def resume(self, plan: CampaignPlan, run: Reader, store: Writer, callbacks: Callbacks, *, signs: bool) -> Run:
        """Continue a stored campaign, which `check_same` has accepted, from its last checkpoint.

        A campaign that has ended remains as it is unless a limit was raised. signs: whether to sign the folder again,
        because the code that it names may run.
        """
        criterion = self._criterion(plan)
        record = self._record(plan, criterion, run.record["environment"])
        for name, subject, error in LEARNED_HASHES:
            if record.get(name) != run.record.get(name):
                raise error(
                    f"the {subject} must be the same as in the run, but the hash differs: pass the same, or start a "
                    "new run"
                )
        read_review(run)  # refuses the review of another run before any test
        checkpoint = run.checkpoint()
        clock = Clock()
        with clock.timed("measure"):
            setup = self._prepare(plan, criterion, self.environment | self.hashes, checkpoint)
        state, faults = State.initial(setup, plan.policy, clock), _no_faults(setup)
        if checkpoint is not None:
            state.restore(checkpoint, run.rounds(checkpoint.rounds), setup)
            recorded = run.faults("id < ?", (checkpoint.tests,))
            if len(recorded):
                faults.add(**recorded.columns)
        summary = run.summary()
        if summary is not None and run.state(summary) == "ended" and has_finished(setup, state):
            before = replace(setup, settings=Settings(**run.record["settings"]))
            setup = before if has_finished(before, state) else setup
            state.clock = Clock()  # resuming has not added to the time of the run
            state.clock.restore(summary["seconds"])
            recorder = Recorder(faults, callbacks, None)
        else:  # from here on the folder changes
            store.reopen(record, plan.settings.max_stored, signs=signs)
            recorder = Recorder(faults, callbacks, store)
        return replace(run_campaign(setup, state, recorder), folder=run.path, review=read_review(run.path))

    def _criterion(self, plan: CampaignPlan) -> CampaignCriterion | None:
        return prepare_criterion(plan.settings, plan.policy, self.tested.target, self.tested.seeds, self.train)

    def _record(
        self, plan: CampaignPlan, criterion: CampaignCriterion | None, environment: dict[str, Any]
    ) -> dict[str, Any]:
        """The record of a run folder before the first test."""
        seeds, settings, weights = self.tested.seeds, plan.settings, {}
        fitted = plan.perturbation.fitted(tuple(seeds.shape[1:]))
        is_object = criterion is not None and isinstance(settings.criterion, Criterion)
        if settings.seed_weights is not None:
            weights["weights"] = torch.from_numpy(read_seed_weights(settings.seed_weights, seeds))
        return {
            **describe_run(settings, self.tested.origin, fitted, environment),
            **_describe_features(plan.perturbation, seeds),
            "train_sha256": None if self.train is None else hash_seeds(read_seeds(self.train, settings.train_inputs)),
            "criterion_sha256": hash_tensors(criterion.criterion.learnt) if criterion and is_object else None,
            "rivals_sha256": [rival.fingerprint() for rival in plan.policy.rivals],
            **({"seed_weights_sha256": hash_tensors(weights)} if weights else {}),
        }

    def _prepare(
        self,
        plan: CampaignPlan,
        criterion: CampaignCriterion | None,
        environment: dict[str, Any],
        checkpoint: Checkpoint | None = None,
    ) -> Setup:
        """The setup of a campaign, with as many tests per forward pass as when the checkpoint was taken."""
        sweep, chunk, wide_chunk = self.sweep, None, None
        if checkpoint is not None:
            chunk, wide_chunk = int(checkpoint.values["chunk"]), checkpoint.values.get("wide_chunk")  # see `Graphs`
        if sweep is None or chunk not in (None, sweep.calculator.chunk):  # another process may have run out of memory
            sweep = self._sweep(plan, criterion, chunk)
        else:
            sweep = sweep.with_perturbation(plan.perturbation)
        setup = prepare(sweep, plan, criterion, environment)
        if checkpoint is not None:
            setup.calculator.graphs.wide_chunk = wide_chunk
        return setup

    def _sweep(self, plan: CampaignPlan, criterion: CampaignCriterion | None, chunk: int | None) -> CleanSweep:
        target, seeds, *_ = self.tested
        sweep = sweep_clean(target, seeds, plan, criterion, chunk, self.make_measurer)
        if self.tested.class_names is not None:
            check_classes(sweep.calculator)
        return sweep

    def check_same(self, plan: CampaignPlan, run: Reader, oracle: Oracle | None) -> None:
        """Refuse a model, data or code other than the run's; warn of what can change the last bits.

        oracle: the settled oracle of the run; None if the run was stopped before its clean outputs were known.
        """
        target, seeds, then, now = self.tested.target, self.tested.seeds, run.record["environment"], self.environment
        refuse_changes(self.hashes, then, "run")
        features = _describe_features(plan.perturbation, seeds)
        if features.get("features_sha256") != run.record.get("features_sha256"):
            raise DataError(
                "the table's features must be the same as in the run, but they are described differently now: pass "
                "the same features, or start a new run"
            )
        changes = list_changes({name: then[name] for name in now if name in then}, now)
        if changes:
            warn(f"resumed in another environment, so the last bits and near-ties may differ: {'; '.join(changes)}")
        if oracle is not None:
            check_same_tests(run, target, seeds, plan.perturbation, oracle)


@contextmanager
def open_stored(path: str | Path) -> Iterator[tuple[Reader, Writer]]:
    """Open a run folder to resume its campaign, and lock it against other processes."""
    Reader(path, is_brief=True).close()  # refuses a folder without a run
    with closing(Writer(path)) as store, closing(Reader(path, is_brief=True)) as run:
        yield run, store


@contextmanager
def open_series(
    tested: TestedModel,
    plan: CampaignPlan,
    *,
    executor: Executor | None = None,
    n_threads: int | None = None,
    train: Any = None,
) -> Iterator[CampaignSeries]:
    """Open the target, the rivals and the workers of campaigns like `plan`. n_threads: those of a run to resume."""
    target, seeds, _, origin, _ = tested
    if target.device.type == "cuda":
        Thread(target=_load_ahead, args=(target.device,)).start()
    ledger_of(target, None if origin is None else origin.weights_path()).warn(seeds)
    if executor is not None:
        executor.check(target, plan.policy, plan.settings)
        n_threads = executor.threads
    with ExitStack() as stack:
        if n_threads is not None:
            stack.enter_context(threads(n_threads))
        made: Any = nullcontext(LocalMeasurer) if executor is None else executor.measurers(tested, plan)
        make_measurer = stack.enter_context(made)
        for model in (target, *plan.policy.rivals):
            stack.enter_context(model.opened())
        refuse_tokens(target, seeds.take(torch.arange(1))[0])
        yield CampaignSeries(tested, describe_environment(target.device), make_measurer, train)


def _load_ahead(device: torch.device) -> None:
    """Load what a campaign on a GPU needs later, so that the first one need not wait for it."""
    can_fold(device)
    import_module("scipy.special")
    import_module("scipy.optimize")


def refuse_changes(now: dict[str, Any], then: dict[str, Any], what: str) -> None:
    """Refuse to resume a run or a suite with a model or data other than recorded."""
    for name, subject, error in IDENTITY_HASHES:
        if now.get(name) != then.get(name):
            new, old = (f"{side[name][:12]}..." if name in side else "none" for side in (now, then))
            raise error(
                f"the {subject} must be the same as in the {what}, but its hash is {new} and was {old}: pass the same "
                f"{subject}, or start a new {what}"
            )


def _has_begun(path: Path) -> bool:
    """Whether the campaign of a run folder has begun its tests."""
    if not is_database(path / DATABASE):
        return False
    with closing(Reader(path, is_brief=True)) as run:
        return "start" in run.record


def _as_recorded(plan: CampaignPlan, run: Reader) -> CampaignPlan:
    """The plan with the ranges and settings of its run folder, whose perturbation must be the same."""
    perturbation = plan.perturbation.within(run.ranges)
    is_same = perturbation.name == run.record["perturbation"]
    if not is_same or not is_same_code(perturbation.code, run.record["perturbation_code"]):
        raise UsageError(
            f"the perturbation must be the same as in {run.path}, {run.record['perturbation']!r}, got "
            f"{perturbation.name!r}: pass the same one, or choose another folder"
        )
    settings = Settings(**{**run.record["settings"], "max_tests": plan.settings.max_tests})
    return replace(plan, perturbation=perturbation, settings=settings)


def _no_faults(setup: Setup) -> Faults:
    """An empty collection for a campaign's faults, which can be replayed."""
    calculator = setup.calculator
    theta = tuple(dimension.name for dimension in calculator.perturbation.theta)
    layers = tuple(layer.name for layer in calculator.layers)
    handle = LiveRun(calculator, setup.settings.random_seed)
    task = calculator.clean.oracle.spec().partition(":")[0]
    return Faults(calculator.perturbation.name, theta, layers, handle, task, calculator.seeds.classes)


def _describe_features(perturbation: Perturbation, seeds: Seeds) -> dict[str, Any]:
    """What identifies the features of a table, if tests depend on them, and how reports display their values."""
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
