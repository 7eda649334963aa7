"""The criterion of a campaign: one that guides its search, or that only watches it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import choose_criterion
from themis.criteria.nc import NC
from themis.criteria.view import View
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, ModelError, ThemisError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.fold import Objective
from themis.search import DeepXplore, Policy
from themis.settings import Settings
from themis.target.target import AnyTarget, Target


@dataclass(frozen=True)
class Guide:
    """A criterion that is ready to take in a campaign's tests."""

    criterion: Criterion
    name: str
    """In words."""
    leads: bool
    """Whether the policy follows it; then the coverage goal and the plateau are its own."""
    source: str | None
    """What it learnt from; None where it learns nothing, or came fitted."""
    n_inputs: int

    def view(self, calculator: Calculator) -> View:
        """What the criterion sees of the calculator's tests."""
        example, max_bytes = calculator.inputs[0], calculator.clean_bytes
        return View.of(self.criterion, calculator.target, calculator.layers, example, max_bytes)

    def objective(self, policy: Policy, calculator: Calculator, number: int) -> Objective | None:
        """What the tests from `number` on climb under policy deepxplore; None under others."""
        if not isinstance(policy, DeepXplore):
            return None
        if calculator.clean_outputs.ndim != 2 or calculator.clean_outputs.shape[1] < 2:
            raise UsageError(
                "policy 'deepxplore' goes by classes, this model's output has "
                f"{list(calculator.clean_outputs.shape[1:])}: take policy 'fuzz' with a criterion"
            )
        covered, n, device = self.criterion.state.get("covered"), calculator.n_neurons, calculator.device
        asleep = torch.arange(n, device=device) if covered is None else (~covered).nonzero().squeeze(1)
        is_probability = calculator.oracle.is_probability
        return policy.objective(calculator.clean_outputs.argmax(1), asleep, is_probability, number)

    def describe(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "leads": self.leads,
            "is_share": self.criterion.laws.bounded,
            "source": self.source,
            "inputs": self.n_inputs,
        }


def is_guided(policy: Policy) -> bool:
    """Whether a policy follows a criterion."""
    return bool(getattr(policy, "is_guided", False))


def make_guide(settings: Settings, policy: Policy, target: AnyTarget, seeds: Seeds, train: Any) -> Guide | None:
    """The criterion that the settings ask for, fitted: on training data, or else on the seeds' clean inputs."""
    if isinstance(policy, DeepXplore):
        return _make_pair(settings, policy, target, seeds)
    if settings.criterion is None:
        if is_guided(policy):
            raise UsageError("policy 'fuzz' follows a criterion, got none: pass criterion=..., as kmnc")
        if train is not None:
            raise UsageError("train is what a criterion learns from, got no criterion: pass criterion=..., as kmnc")
        return None
    given = choose_guide(settings.criterion)
    name = settings.criterion if isinstance(settings.criterion, str) else str(given)
    own, leads = given.fresh(), is_guided(policy)  # the caller's stays as it is
    if given.learnt:
        if train is not None:
            raise UsageError(f"{given} is fitted already, train would change nothing: leave it out, or pass {given!r}")
        return Guide(own, name, leads, None, 0)
    data = seeds if train is None else _training_data(train, settings, seeds)
    with nullcontext() if train is None else _about_training():
        fit_to(own, target, data)
    source = None if not given.learns else "the seeds" if train is None else "training data"
    return Guide(own, name, leads, source, len(data))


def choose_guide(criterion: str | Criterion) -> Criterion:
    """A criterion that can take part in a campaign."""
    given = choose_criterion(criterion)
    if not given.can_guide:
        raise UsageError(
            f"{given.name} cannot take part in a campaign, which shows it activations: it reads contributions, in a "
            "loop of your own; take another criterion"
        )
    return given


def _training_data(train: Any, settings: Settings, seeds: Seeds) -> Seeds:
    with _about_training():
        data = read_seeds(train, settings.train_inputs)
        if data.shape[1:] != seeds.shape[1:]:
            raise DataError(f"its inputs must be {list(seeds.shape[1:])} as the seeds are, got {list(data.shape[1:])}")
        return data


@contextmanager
def _about_training() -> Iterator[None]:
    """Says of what is wrong with data that it is the training data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"training data: {error}") from error


def _check_rivals(policy: DeepXplore, target: AnyTarget, seeds: Seeds) -> None:
    """Refuse models that cannot answer what the target answers."""
    inputs = seeds.take(torch.arange(min(2, len(seeds)))).to(target.device)
    with torch.no_grad():
        wanted = list(target.forward(inputs).shape[1:])
        for k, rival in enumerate(policy.rivals):
            try:
                found = list(rival.forward(inputs).shape[1:])
            except ThemisError as error:
                raise ModelError(f"rival {k + 1} must answer the target's inputs: {error}") from error
            if found != wanted:
                raise UsageError(
                    f"rival {k + 1} must give the target's {wanted} scores, got {found}: give models of one task"
                )


def _make_pair(settings: Settings, policy: DeepXplore, target: AnyTarget, seeds: Seeds) -> Guide:
    """The neuron coverage that goes with policy deepxplore: of the very neurons that are tested."""
    if not policy.rivals:
        raise UsageError("policy 'deepxplore' sets other models against the target, got none: pass rivals=[...]")
    if not isinstance(target, Target):
        raise UsageError("policy 'deepxplore' needs gradients, this target has none: take policy 'fuzz'")
    _check_rivals(policy, target, seeds)
    criterion = NC(neurons=target.neurons)
    if settings.criterion is not None:
        given = choose_guide(settings.criterion)
        if not isinstance(given, NC) or given.neurons != target.neurons or given.requested_layers is not None:
            raise UsageError(
                f"policy 'deepxplore' goes with nc of all layers and the target's neurons, got {given!r}: write "
                f"nc(threshold=0.5, neurons={target.neurons})"
            )
        criterion = given.fresh()
    return Guide(criterion, str(criterion), True, None, 0)
