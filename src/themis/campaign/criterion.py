"""The criterion of a campaign: it guides the search, or only observes it."""

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
from themis.progress import step
from themis.search import DeepXplore, Policy
from themis.settings import Settings
from themis.target.target import AnyTarget, Target


@dataclass(frozen=True)
class CampaignCriterion:
    """A criterion that is ready to be updated with a campaign's tests."""

    criterion: Criterion
    name: str
    """As the user writes it."""
    leads: bool
    """Whether the policy follows it; then the coverage goal and the plateau refer to it."""
    source: str | None
    """What it learned from; None if it learns nothing or was fitted already."""
    n_inputs: int

    def view(self, calculator: Calculator) -> View:
        """The criterion's view of the calculator's forward passes."""
        example, max_bytes = calculator.inputs[0], calculator.clean_bytes
        return View.of(self.criterion, calculator.target, calculator.layers, example, max_bytes)

    def objective(self, policy: Policy, calculator: Calculator, number: int) -> Objective | None:
        """The objective of the tests from `number` on under policy `deepxplore`; None under other policies."""
        if not isinstance(policy, DeepXplore):
            return None
        if calculator.clean_outputs.ndim != 2 or calculator.clean_outputs.shape[1] < 2:
            raise UsageError(
                "policy 'deepxplore' needs class scores, but this model's output has shape "
                f"{list(calculator.clean_outputs.shape[1:])}: use policy 'fuzz' with a criterion"
            )
        covered = self.criterion.state.get("covered")
        if covered is None:
            uncovered = torch.arange(calculator.n_neurons, device=calculator.device)
        else:
            uncovered = (~covered).nonzero().squeeze(1)
        is_probability = calculator.oracle.is_probability
        return policy.objective(calculator.clean_outputs.argmax(1), uncovered, is_probability, number)

    def describe(self) -> dict[str, Any]:
        """Plain data."""
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
    """The criterion that the settings name, fitted to training data or else to the seeds' clean inputs."""
    if isinstance(policy, DeepXplore):
        return _neuron_coverage(settings, policy, target, seeds)
    if settings.criterion is None:
        if policy.is_guided:
            raise UsageError("policy 'fuzz' follows a criterion, got none: pass criterion=..., for example kmnc")
        if train is not None:
            raise UsageError(
                "train is data that a criterion learns from, got no criterion: pass criterion=..., for example kmnc"
            )
        return None
    chosen = choose_campaign_criterion(settings.criterion)
    name = settings.criterion if isinstance(settings.criterion, str) else str(chosen)
    own, leads = chosen.fresh(), policy.is_guided  # the caller's object stays unchanged
    if chosen.learnt:
        if train is not None:
            raise UsageError(
                f"{chosen} is fitted already, train would change nothing: leave it out, or pass {chosen!r}"
            )
        return CampaignCriterion(own, name, leads, None, 0)
    data = seeds if train is None else _training_data(train, settings, seeds)
    with nullcontext() if train is None else _name_training_data(), step("fitting the criterion"):
        fit_to(own, target, data)
    source = None if not chosen.learns else "the seeds" if train is None else "training data"
    return CampaignCriterion(own, name, leads, source, len(data))


def choose_campaign_criterion(criterion: str | Criterion) -> Criterion:
    """The criterion with this name, or the given one, if a campaign can use it."""
    chosen = choose_criterion(criterion)
    if not chosen.can_guide:
        raise UsageError(
            f"{chosen.name} cannot be used in a campaign: it reads contributions, and a campaign provides activations; "
            "use it in a loop of your own, or choose another criterion"
        )
    return chosen


def _training_data(train: Any, settings: Settings, seeds: Seeds) -> Seeds:
    with _name_training_data():
        data = read_seeds(train, settings.train_inputs)
        if data.shape[1:] != seeds.shape[1:]:
            raise DataError(
                f"its inputs must have the seeds' shape {list(seeds.shape[1:])}, got {list(data.shape[1:])}"
            )
        return data


@contextmanager
def _name_training_data() -> Iterator[None]:
    """Errors about data say that it is the training data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"training data: {error}") from error


def _check_rivals(policy: DeepXplore, target: AnyTarget, seeds: Seeds) -> None:
    """Refuse models whose outputs do not match the target's."""
    inputs = seeds.take(torch.arange(min(2, len(seeds)))).to(target.device)
    with torch.no_grad():
        expected = list(target.forward(inputs).shape[1:])
        for k, rival in enumerate(policy.rivals):
            try:
                shape = list(rival.forward(inputs).shape[1:])
            except ThemisError as error:
                raise ModelError(f"rival {k + 1} must accept the target's inputs: {error}") from error
            if shape != expected:
                raise UsageError(
                    f"rival {k + 1} must give scores of the target's shape {expected}, got {shape}: pass models of "
                    "the same task"
                )


def _neuron_coverage(settings: Settings, policy: DeepXplore, target: AnyTarget, seeds: Seeds) -> CampaignCriterion:
    """The neuron coverage that policy `deepxplore` raises: of the neurons that are tested."""
    if not policy.rivals:
        raise UsageError("policy 'deepxplore' compares the target with other models, got none: pass rivals=[...]")
    if not isinstance(target, Target):
        raise UsageError("policy 'deepxplore' needs gradients, but this target has none: use policy 'fuzz'")
    _check_rivals(policy, target, seeds)
    criterion = NC(neurons=target.neurons)
    if settings.criterion is not None:
        chosen = choose_campaign_criterion(settings.criterion)
        if not isinstance(chosen, NC) or chosen.neurons != target.neurons or chosen.requested_layers is not None:
            raise UsageError(
                f"policy 'deepxplore' requires nc over all layers and the target's neurons, got {chosen!r}: write "
                f"nc(threshold=0.5, neurons={target.neurons})"
            )
        criterion = chosen.fresh()
    return CampaignCriterion(criterion, str(criterion), True, None, 0)
