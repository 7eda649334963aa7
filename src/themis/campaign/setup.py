"""The fixed parts of a campaign and how they are prepared: the criterion, the clean sweep and the search space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from themis.criteria import Criterion, View, choose_criterion
from themis.data.features import Features
from themis.data.groups import read_groups
from themis.data.seeds import Seeds, class_numbers, read_seeds
from themis.data.slices import SliceColumn, read_seed_weights, slice_columns
from themis.errors import DataError, ModelError, UsageError, warn
from themis.judge.coverage import Rule, relative_scale
from themis.measure.calculator import Calculator, Limits
from themis.measure.distance import SLIGHT_CHANGE, change_of_contrast, check_similarity
from themis.measure.moments import Moments, choose_panel
from themis.measure.repeats import BATCH_TOLERANCE, REPEAT_TOLERANCE, check_repeats, warn_of_batch_dependence
from themis.measure.runner import Measurer
from themis.measure.tests import Floats, Ints, Tests
from themis.oracle import Detection, KeyPoints, choose_oracle
from themis.oracle.classes import is_classifier
from themis.oracle.oracle import find_constant
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.plugins import Extensible
from themis.progress import step
from themis.runs.estimates import SlicedSeeds
from themis.runs.fault import NUMBER_TASKS, gives_answers
from themis.runs.parts import SeedSplit
from themis.runs.run import Start, covers_neurons
from themis.runs.source import Origin
from themis.search import Policy, Space
from themis.search.policy import UNIFORM_STREAM
from themis.settings import Settings, least_similarity
from themis.target import diagnose
from themis.target.against import Against
from themis.target.alignment import align_seeds, align_target
from themis.target.blackbox import as_target
from themis.target.target import AnyTarget
from themis.target.traits import is_differentiable


@dataclass(frozen=True)
class CampaignCriterion:
    """A criterion that is ready to be updated with a campaign's tests."""

    criterion: Criterion
    name: str
    """The name as the user wrote it."""
    leads: bool
    """Whether the policy follows the criterion; then the coverage goal and the plateau refer to it."""
    source: str | None
    """The data that it learned from; None if it learns nothing or was already fitted."""
    n_inputs: int

    def describe(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "leads": self.leads,
            "is_share": self.criterion.laws.bounded,
            "source": self.source,
            "inputs": self.n_inputs,
        }


def prepare_criterion(
    settings: Settings, policy: Policy, target: AnyTarget, seeds: Seeds, train: Any
) -> CampaignCriterion | None:
    """The criterion in the settings, fitted to the training data or, without any, to the clean inputs of the seeds."""
    chosen = None if settings.criterion is None else choose_campaign_criterion(settings.criterion)
    if isinstance(target, Against) and (chosen is not None or policy.is_guided or policy.takes_rivals):
        raise UsageError(
            "a model that is tested against a reference must have neither a criterion nor a policy that follows one, "
            f"got policy {settings.policy!r} and criterion {settings.criterion!r}: leave them out"
        )
    own = policy.own_criterion(target, seeds, chosen)
    if own is not None:
        return CampaignCriterion(own, str(own), True, None, 0)
    if chosen is None:
        if policy.is_guided:
            missing = f"policy {settings.policy!r} follows a criterion, got none"
        elif train is not None:
            missing = "train is data that a criterion learns from, got no criterion"
        else:
            return None
        raise UsageError(f"{missing}: pass criterion=..., for example kmnc")
    name = settings.criterion if isinstance(settings.criterion, str) else str(chosen)
    own, leads = chosen.fresh(), policy.is_guided  # the caller's object stays unchanged
    if chosen.learnt:
        if train is not None:
            raise UsageError(
                f"{chosen} is fitted already, train would change nothing: leave it out, or pass {chosen!r}"
            )
        return CampaignCriterion(own, name, leads, None, 0)
    data = seeds
    try:
        if train is not None:
            data = read_seeds(train, settings.train_inputs)
        if data.shape[1:] != seeds.shape[1:]:
            raise DataError(
                f"its inputs must have the seeds' shape {list(seeds.shape[1:])}, got {list(data.shape[1:])}"
            )
        with step("fitting the criterion"):
            own.learn_from(target, data)
    except DataError as error:
        if train is None:
            raise
        raise DataError(f"training data: {error}") from error
    source = None if not chosen.learns else "the seeds" if train is None else "training data"
    return CampaignCriterion(own, name, leads, source, len(data))


def choose_campaign_criterion(criterion: str | Criterion) -> Criterion:
    """Choose a criterion by name, or check the given one; refuse criteria that no campaign can use."""
    chosen: Criterion = choose_criterion(criterion)
    if not chosen.can_guide:
        raise UsageError(
            f"{chosen.name} cannot be used in a campaign: it reads contributions, and a campaign provides activations; "
            "use it in a loop of your own, or choose another criterion"
        )
    return chosen


N_INSPECTED_SEEDS = 16
"""Seeds that are disturbed at the strongest theta before the first test."""
N_REPEATED_SEEDS = 4
"""Seeds that a user's own perturbation must disturb twice alike."""
N_GRADIENT_TESTS = 2
"""Tests with which gradients are tried."""
DRAWN_ORACLES = (Detection, KeyPoints)
"""Oracles whose clean answers are drawn into pictures."""
MakeMeasurer = Callable[[Calculator], Measurer]
"""Creates the measurer of a calculator."""


@dataclass(frozen=True)
class CampaignPlan:
    """What distinguishes a campaign from others on the same model and seeds."""

    perturbation: Perturbation
    policy: Policy
    """Chooses the tests; nothing else may use this object while the campaign runs."""
    settings: Settings


@runtime_checkable
class Executor(Protocol):
    """Runs tests outside this process, with the same results."""

    @property
    def threads(self) -> int:
        """Threads that compute each test."""

    def with_threads(self, threads: int | None) -> Executor:
        """Return the executor with the number of threads of other results; None allows any number.

        Raises an error if the executor has another number, or if a package that it needs is missing.
        """

    def check(self, target: AnyTarget, policy: Policy, settings: Settings) -> None:
        """Refuse campaigns that it cannot run."""

    def measurers(self, tested: TestedModel, plan: CampaignPlan) -> AbstractContextManager[MakeMeasurer]:
        """Yield a function that creates the measurers of campaigns in the block; the target is not open yet."""


EXECUTORS: Extensible[Callable[..., Executor]] = Extensible("themis.executors", {})


def choose_executor(executor: Executor | str | None, threads: int | None = None) -> Executor | None:
    """Choose an executor; None stands for this process. threads: see `Executor.with_threads`."""
    if executor is None or executor == "local":
        return None
    if isinstance(executor, str) and executor in EXECUTORS:
        executor = EXECUTORS[executor]()
    if not isinstance(executor, Executor):
        known = ", ".join(["local", *EXECUTORS])
        raise UsageError(f"executor must be one of {known}, or an object such as RayExecutor(), got {executor!r}")
    return executor.with_threads(threads)


@dataclass(frozen=True)
class SeedFacts:
    """What is recorded about a seed with each of its faults; one row per seed."""

    seed_id: Ints
    label: Ints
    """The label if it is a class number, else -1."""
    clean_answer: Ints
    clean_value: Floats


@dataclass(frozen=True)
class CleanSweep:
    """The results of running every clean input, which all campaigns on one model and its seeds share."""

    calculator: Calculator
    """Has the clean outputs and activations; each campaign gets a copy for its perturbation."""
    measurer: Measurer
    """Runs the tests, in this process or in workers."""
    moments: Moments
    """Of the clean activations."""
    constant: str | None
    """A sentence if the clean answers are no better than a constant, so that a low fault rate means nothing."""
    has_gradient: bool
    """Whether the outputs have a gradient in the inputs."""
    view: View | None = None

    def with_perturbation(self, perturbation: Perturbation) -> CleanSweep:
        """Return the sweep for a campaign under another perturbation, in which its passes do not count again."""
        calculator = self.calculator.with_perturbation(perturbation)
        return replace(self, calculator=calculator, measurer=self.measurer.with_calculator(calculator))


@dataclass(frozen=True)
class Setup:
    """The context of a campaign, which does not change until it ends."""

    settings: Settings
    environment: dict[str, Any]
    criterion: CampaignCriterion | None
    sweep: CleanSweep
    scale: Tensor | None
    """The unit of each neuron's sensitivity; None if it is absolute."""
    rule: Rule
    panel_neurons: Tensor
    space: Space
    last_test: float
    """The number of tests after which no seed is left to test once; infinite if seeds are tested again."""
    uniform_tests: Callable[[int, int, int], Tests]
    """Maps the number of a test, its place in the uniform stream and `n` to the `n` uniform tests from there on.

    It has a cache, because tests that are started ahead are requested again when they are proposed."""
    facts: SeedFacts
    sliced: SlicedSeeds
    columns: list[SliceColumn]
    """The columns that divide the seeds into slices."""
    slight: str | None
    """A sentence if the perturbation hardly changes the inputs."""
    covers_neurons: bool
    """Whether coverage is a goal; a model without hidden layers has nothing to cover."""

    @property
    def calculator(self) -> Calculator:
        """Has the target, the seeds and the perturbation."""
        return self.sweep.calculator

    @property
    def has_calibration(self) -> bool:
        """Whether answers are classes with a confidence, and every seed has a label to compare them with."""
        return is_classifier(self.calculator.clean.oracle) and bool((self.facts.label >= 0).all())


def sweep_clean(
    target: AnyTarget,
    seeds: Seeds,
    plan: CampaignPlan,
    criterion: CampaignCriterion | None,
    chunk: int | None,
    make_measurer: MakeMeasurer,
) -> CleanSweep:
    """Trace the open target and run every clean input once, in passes of `chunk` tests if it is given."""
    limits = Limits.of(plan.settings, target.device, chunk)
    calculator = Calculator.trace(target, seeds, plan.perturbation, choose_oracle(target.oracle), limits)
    view = None
    if criterion is not None:
        view = criterion.criterion.view(target, calculator.layers, calculator.inputs[0], limits.clean_bytes)
        calculator.observer = view
    measurer = make_measurer(calculator)
    moments = measurer.sweep()
    diagnose.warn_of_changes(target)
    with step("running the model on the first inputs again"):
        check_repeats(calculator)
        diagnose.warn_of_normalisation(target, seeds.shape[1:])
        clean = calculator.clean
        calculator.passes += diagnose.warn_of_missing_normalisation(
            target, seeds, clean.outputs, clean.labels, calculator.chunk
        )
        warn_of_batch_dependence(calculator)
    constant = find_constant(clean.oracle, clean.outputs, clean.labels)
    if constant is not None:
        warn(
            f"{constant}, so that a low fault rate says nothing, and limits on it fail: check the weights, the "
            "preprocessing and the labels (themis check), give more varied inputs, or accept it with --allow-constant "
            "(allow_constant=True)"
        )
    return CleanSweep(calculator, measurer, moments, constant, _has_gradient(calculator), view)


def _has_gradient(calculator: Calculator) -> bool:
    """Whether the outputs have a gradient in the inputs; NumPy and `no_grad` in a model prevent it."""
    if not calculator.has_gradient:
        return False
    inputs = calculator.read(calculator.clean.usable[:N_GRADIENT_TESTS])
    return is_differentiable(lambda each: calculator.target.forward(each).float(), inputs)


def prepare(
    sweep: CleanSweep, plan: CampaignPlan, criterion: CampaignCriterion | None, environment: dict[str, Any]
) -> Setup:
    """Check the perturbation on the swept inputs, and set up the search space."""
    calculator, measurer, settings, policy = sweep.calculator, sweep.measurer, plan.settings, plan.policy
    perturbation, seeds = plan.perturbation, calculator.seeds
    _check_perturbation(calculator)
    slight = _describe_slight_change(calculator)
    if slight is not None:
        warn(f"{slight}: raise the magnitude, or widen the range of theta, as in gaussian_blur(sigma=0:0.2)")
    if perturbation.inputs == "any" and perturbation.family != "own" and isinstance(seeds.inputs, Tensor):
        diagnose.warn_of_unequal_ranges(perturbation.name, seeds.inputs, calculator.target.bounds)
    _decide_gradient(calculator, policy, sweep.has_gradient)
    panel_neurons = choose_panel(calculator.n_neurons, random_seed=settings.random_seed)
    scale = relative_scale(sweep.moments, calculator.layers) if settings.scale == "relative" else None
    measurer.begin(panel_neurons, scale)
    facts, margin = _describe_seeds(calculator)
    test_cost = calculator.cost(policy.needs_gradient, len(policy.rivals))
    if settings.max_passes is not None and settings.max_passes < calculator.passes + test_cost:
        raise UsageError(
            f"max_passes must leave room for a test after the {calculator.passes:,} passes of the clean sweep, got "
            f"{settings.max_passes:,}: raise it, or use fewer seeds with max_seeds"
        )
    space = _search_space(calculator, policy, facts, margin, settings)
    weight = np.ones(len(seeds))
    if space.seed_weight is not None:
        weight[:] = 0.0
        weight[space.seeds] = space.seed_weight
    sliced = SlicedSeeds(facts.seed_id, class_of_seeds(calculator), weight)
    metadata, columns = None if seeds.datums is None else seeds.datums.metadata, []
    if not settings.tests_each_seed_once:
        columns = sliced.columns(settings.slice_by, seeds.classes, metadata)

    @lru_cache(maxsize=4)
    def uniform_tests(first: int, place: int, n: int) -> Tests:
        return space.uniform_tests(np.arange(first, first + n), UNIFORM_STREAM, np.arange(place, place + n))

    return Setup(
        settings=settings,
        environment=environment,
        criterion=criterion,
        sweep=sweep,
        scale=scale,
        rule=Rule(settings.tolerance, settings.draws, settings.alpha),
        panel_neurons=panel_neurons,
        space=space,
        last_test=int(len(space.seeds) / settings.uniform_share) if settings.tests_each_seed_once else inf,
        uniform_tests=uniform_tests,
        facts=facts,
        sliced=sliced,
        columns=columns,
        slight=slight,
        covers_neurons=covers_neurons([layer.name for layer in calculator.layers], settings.preset),
    )


def _check_perturbation(calculator: Calculator) -> None:
    """Refuse a perturbation of the user's own whose result depends on more than its seed, theta and noise seed.

    Its faults could not be replayed. Attacks are not examined, because they take passes.
    """
    perturbation, rows = calculator.perturbation, calculator.clean.usable[:N_REPEATED_SEEDS]
    is_own = any(part.family == "own" for part in perturbation.parts or (perturbation,))
    if not is_own or perturbation.passes or perturbation.needs_gradient:
        return
    middle = [(theta.low + theta.high) / 2 for theta in perturbation.theta]
    theta = torch.tensor(middle, device=calculator.device).expand(len(rows), -1)
    noise_seed = torch.arange(len(rows), device=calculator.device)

    def disturb(first: int, size: int) -> Tensor:
        part = slice(first, first + size)
        return calculator.disturb(rows[part], theta[part], noise_seed[part], size).disturbed.float()

    with torch.no_grad():
        once, again = disturb(0, len(rows)), disturb(0, len(rows))
        alone = torch.cat([disturb(row, 1) for row in range(len(rows))])
    low, high = calculator.target.bounds
    rule = f"perturbation {perturbation.name!r} must depend on nothing but a seed, its theta and rng, but"
    if float((once - again).abs().max()) > REPEAT_TOLERANCE * (high - low):
        raise ModelError(
            f"{rule} it gives different inputs when it is called twice: draw random numbers with rng.uniform and "
            "rng.normal, not with torch, numpy or random"
        )
    shift = (once - alone).abs().flatten(1).mean(1).max()  # rounding may carry single values to another step
    if float(shift) > BATCH_TOLERANCE * (high - low):
        raise ModelError(
            f"{rule} it gives an input another result alone than in a batch: treat each input by itself, as in "
            "inputs.amax((1, 2, 3), keepdim=True) instead of inputs.max()"
        )


def _describe_slight_change(calculator: Calculator) -> str | None:
    """Return a sentence if even the strongest theta hardly changes the inputs, so that few faults can be expected.

    Attacks are not examined: they take passes, and are meant to change little.
    """
    perturbation, rows = calculator.perturbation, calculator.clean.usable[:N_INSPECTED_SEEDS]
    if perturbation.passes or perturbation.needs_gradient or not len(rows):
        return None
    number = torch.arange(len(rows), device=calculator.device)
    ends = []
    for k, theta in enumerate(perturbation.theta):  # if both ends are strong, seeds alternate between them
        is_up = (number >> k) % 2 == 0 if theta.low < theta.identity < theta.high else theta.identity == theta.low
        ends.append(torch.where(torch.as_tensor(is_up, device=calculator.device), theta.high, theta.low))
    strongest = torch.stack([end.expand(len(rows)) for end in ends], 1).float()
    with torch.no_grad():
        inputs, disturbed, _ = calculator.disturb(rows, strongest, number, len(rows))
    share = change_of_contrast(inputs, disturbed)
    if not share < SLIGHT_CHANGE:
        return None
    return (
        f"{perturbation.name} hardly changes the inputs: at its strongest, by {share:.1%} of their contrast (root mean "
        f"square of the change, relative to the standard deviation of the inputs), less than {SLIGHT_CHANGE:.0%}"
    )


def _decide_gradient(calculator: Calculator, policy: Policy, of_model: bool) -> None:
    """Decide once whether tests have a gradient in theta; without one, a policy that needs it uses finite differences.

    of_model: whether the outputs have a gradient in the inputs. The perturbation is tried with every policy, so that
    all policies have the same number of passes left. Attacks, which need the gradient, have been checked.
    """
    perturbation = calculator.perturbation
    if calculator.has_gradient and not perturbation.passes:
        rows = calculator.clean.usable[:N_GRADIENT_TESTS]
        n, device = len(rows), calculator.device
        middle = torch.tensor([(theta.low + theta.high) / 2 for theta in perturbation.theta], device=device)
        noise_seed = torch.arange(n, device=device)
        calculator.passes += 3 * n  # those of the model, which is tried once for all perturbations
        calculator.has_gradient = of_model and is_differentiable(
            lambda theta: calculator.disturb(rows, theta, noise_seed, n).disturbed, middle.float().repeat(n, 1)
        )
    if policy.rivals and not calculator.has_gradient:
        raise UsageError(
            "a policy with rivals needs the gradient of the outputs in theta, which the model or the perturbation does "
            "not have: choose another policy"
        )


def _describe_seeds(calculator: Calculator) -> tuple[SeedFacts, Floats]:
    """The facts of all seeds, and their clean margins."""
    outputs, seeds = calculator.clean.outputs, calculator.seeds
    verdict = calculator.clean.oracle.compare(outputs, outputs, calculator.clean.labels)
    value = torch.full_like(verdict.margin, torch.nan) if verdict.value is None else verdict.value
    facts = SeedFacts(
        seeds.seed_id.numpy(),
        class_numbers(seeds.labels, len(seeds)),
        verdict.outcome.cpu().numpy(),
        value.cpu().numpy(),
    )
    return facts, verdict.margin.cpu().numpy()


def _search_space(
    calculator: Calculator, policy: Policy, facts: SeedFacts, margin: Floats, settings: Settings
) -> Space:
    """The usable seeds and the box of theta."""
    usable = calculator.clean.usable.cpu().numpy()
    weights = None
    if settings.seed_weights is not None:
        weights = read_seed_weights(settings.seed_weights, calculator.seeds)[usable]
        if not weights.any():
            raise DataError("seed_weights must give some usable seed a weight above 0, but all have 0: correct them")
    gradient_cost = None
    if calculator.has_gradient and policy.uses_gradient:
        gradient_cost = calculator.cost(True) / calculator.cost(False)
    space = Space.of(
        calculator.perturbation,
        usable,
        facts.seed_id[usable],
        margin[usable],
        settings.random_seed,
        facts.clean_answer[usable],
        gradient_cost,
    )
    return replace(space, seed_weight=weights, tests_each_seed_once=settings.tests_each_seed_once)


def class_of_seeds(calculator: Calculator) -> Ints:
    """The class of each seed: its label or, without labels, its clean answer; -1 in tasks without classes."""
    clean, n = calculator.clean, len(calculator.seeds)
    if not gives_answers(clean.oracle.spec().partition(":")[0]):
        return np.full(n, -1)
    if clean.labels is not None:
        return class_numbers(clean.labels.cpu(), n)
    has_classes = clean.outputs.ndim == 2 and clean.outputs.shape[1] > 1
    return clean.reference.cpu().numpy() if has_classes else np.full(n, -1)


def describe_start(setup: Setup, tests_before: int) -> Start:
    """Collect what is known after the clean sweep."""
    calculator, oracle, outputs = setup.calculator, setup.calculator.clean.oracle, setup.calculator.clean.outputs
    target, seeds, perturbation = calculator.target, calculator.seeds, calculator.perturbation
    grade = {} if calculator.clean.labels is None else oracle.grade(outputs, calculator.clean.labels)
    return Start(
        bounds=target.bounds,
        perturbation=perturbation.name,
        theta=perturbation.theta,
        settings=setup.settings,
        layers=calculator.layers,
        n_neurons=calculator.n_neurons,
        n_seeds=len(seeds),
        n_usable=len(setup.space.seeds),
        clean_accuracy=grade.get("accuracy"),
        clean_error=grade.get("error"),
        clean_iou=grade.get("iou"),
        chunk=calculator.chunk,
        n_kept=calculator.clean.kept.n_kept,
        kept_bytes=calculator.clean.kept.nbytes,
        device=str(calculator.device),
        gives_probabilities=oracle.is_probability,
        oracle=oracle.spec(),
        oracle_asked=choose_oracle(target.oracle).spec(),
        fault=oracle.describe(),
        tests_before=tests_before,
        criterion=None if setup.criterion is None else setup.criterion.describe(),
        classes=_class_names(calculator),
        perturbed=None if seeds.others is None else seeds.others.describe(),
        entry=getattr(target, "entry", None),
        clean_map=grade.get("map"),
        slight=setup.slight,
        left_out=None
        if len(setup.space.seeds) == len(seeds)
        else oracle.describe_left_out(calculator.clean.labels is not None),
        constant=setup.sweep.constant,
    )


def check_classes(calculator: Calculator) -> None:
    """Refuse class names if their number is not that of the model's answers."""
    names, n_answers = calculator.seeds.classes, _n_answers(calculator)
    if isinstance(calculator.clean.oracle, Detection):
        return  # detections do not show how many classes the model has
    if names is not None and len(names) != n_answers:
        raise UsageError(_wrong_names(len(names), n_answers))


def _class_names(calculator: Calculator) -> tuple[str, ...] | None:
    """The classes' names if there is one for each of the model's answers."""
    names, n_answers = calculator.seeds.classes, _n_answers(calculator)
    if isinstance(calculator.clean.oracle, Detection):
        return names
    if names is None or n_answers == 0 or len(names) == n_answers:
        return names if n_answers else None
    warn(f"{_wrong_names(len(names), n_answers)}; class numbers are shown")
    return None


def _wrong_names(n_names: int, n_answers: int) -> str:
    if not n_answers:
        return f"classes must be left out if the model's answers are not classes, got {n_names} names"
    return f"classes must be one name for each of the model's {n_answers} answers, got {n_names}: pass classes=..."


def _n_answers(calculator: Calculator) -> int:
    """The number of classes, labels, points or numbers in an answer that can have names, or 0."""
    outputs, task = calculator.clean.outputs, calculator.clean.oracle.spec().partition(":")[0]
    if task == "against":
        return outputs.shape[1] // 2
    named = ("wrong", "changed", "top5", "multilabel", "segmentation", "keypoints")
    if (task in named and outputs.ndim > 1) or (task in NUMBER_TASKS and outputs.ndim > 1 and outputs.shape[1] > 1):
        return outputs.shape[1]
    return 2 if task == "threshold" else 0


class TestedModel(NamedTuple):
    """A target with seeds that fit it and the perturbations."""

    target: AnyTarget
    seeds: Seeds
    """The search part if the data is split."""
    split: SeedSplit | None
    origin: Origin | None
    class_names: Sequence[str] | None
    """Names that the user gave; None for those of the data."""


def read_tested(
    target: AnyTarget | nn.Module,
    data: Any,
    perturbations: Iterable[Perturbation],
    settings: Settings,
    origin: Origin | None,
    features: Features | str | Path | None,
    classes: Sequence[str] | None,
) -> TestedModel:
    """Read the seeds, and refuse a target, seeds and perturbations that do not fit each other before anything runs."""
    target = as_target(target)
    chosen = list(perturbations)
    for perturbation in chosen:
        check_gradient(perturbation, target)
    seeds = describe_columns(align_seeds(target, read_seeds(data, settings.max_seeds)), features)
    target = align_target(target, seeds)
    origin = None if origin is None else origin.resolved(target)
    class_names = origin.classes if classes is None and origin is not None else classes
    seeds = seeds if class_names is None else seeds.with_classes(class_names)
    for perturbation in chosen:
        check_fits(perturbation, seeds.shape[1:])
        if perturbation.inputs == "table":
            seeds.features.check_inside(target.bounds)
    check_similarity(least_similarity(vars(settings)), seeds.shape[1:])
    groups = None if settings.split_by is None else read_groups(settings.split_by, seeds)
    split = None if settings.split is None else SeedSplit.of(seeds, settings.split, settings.split_seed, groups)
    seeds = seeds if split is None else split.search(seeds)
    if settings.seed_weights is not None:
        read_seed_weights(settings.seed_weights, seeds)
    if settings.slice_by is not None:  # checked with two made-up classes, since the real ones may be known only later
        metadata = {} if seeds.datums is None else seeds.datums.metadata
        slice_columns(settings.slice_by, seeds.seed_id.numpy(), np.arange(len(seeds)) % 2, None, metadata)
    return TestedModel(target, seeds, split, origin, class_names)


def describe_columns(seeds: Seeds, features: Features | str | Path | None) -> Seeds:
    """The seeds with the given description of the columns of their table, if any."""
    return seeds if features is None else seeds.with_features(features)
