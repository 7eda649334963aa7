"""The criterion of a campaign: one that guides its search, or that only watches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from themis.criteria.criterion import Criterion
from themis.criteria.fitting import fit_to
from themis.criteria.names import choose_criterion
from themis.criteria.nc import NC
from themis.criteria.view import View
from themis.data.seeds import Seeds, read_seeds
from themis.errors import UsageError
from themis.measure.calculator import Calculator
from themis.measure.fold import Objective
from themis.search import DeepXplore, Policy
from themis.settings import Settings
from themis.target import AnyTarget, Target


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
        return View.of(self.criterion, calculator.target, calculator.layers, calculator.inputs[0])

    def objective(self, policy: Policy, calculator: Calculator, number: int) -> Objective | None:
        """What the tests from `number` on climb under policy deepxplore; None under others."""
        if not isinstance(policy, DeepXplore):
            return None
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
        return _make_pair(settings, policy, target)
    if settings.criterion is None:
        if is_guided(policy):
            raise UsageError("policy 'fuzz' follows a criterion, got none: pass criterion=..., as kmnc")
        if train is not None:
            raise UsageError("train is what a criterion learns from, got no criterion: pass criterion=..., as kmnc")
        return None
    given = choose_criterion(settings.criterion)
    name = settings.criterion if isinstance(settings.criterion, str) else str(given)
    leads = is_guided(policy)
    if given.learnt:
        return Guide(given.fresh(), name, leads, None, 0)
    data = seeds if train is None else read_seeds(train, settings.train_inputs)
    fit_to(given, target, data)
    source = None if not given.learns else "the seeds" if train is None else "training data"
    return Guide(given.fresh(), name, leads, source, len(data))


def _make_pair(settings: Settings, policy: DeepXplore, target: AnyTarget) -> Guide:
    """The neuron coverage that goes with policy deepxplore: of the very neurons that are tested."""
    if not policy.rivals:
        raise UsageError("policy 'deepxplore' sets other models against the target, got none: pass rivals=[...]")
    if not isinstance(target, Target):
        raise UsageError("policy 'deepxplore' needs gradients, this target has none: take policy 'fuzz'")
    criterion = NC(neurons=target.neurons)
    if settings.criterion is not None:
        given = choose_criterion(settings.criterion)
        if not isinstance(given, NC) or given.neurons != target.neurons or given.wanted is not None:
            raise UsageError(
                f"policy 'deepxplore' goes with nc of all layers and the target's neurons, got {given!r}: write "
                f"nc(threshold=0.5, neurons={target.neurons})"
            )
        criterion = given
    return Guide(criterion, str(criterion), True, None, 0)
