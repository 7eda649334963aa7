"""The criterion of a campaign: it guides the search, or only observes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from themis.criteria import Criterion, choose_criterion
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, UsageError
from themis.progress import step
from themis.search import Policy
from themis.settings import Settings
from themis.target.against import Against
from themis.target.target import AnyTarget


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
            raise UsageError(
                f"policy {settings.policy!r} follows a criterion, got none: pass criterion=..., for example kmnc"
            )
        if train is not None:
            raise UsageError(
                "train is data that a criterion learns from, got no criterion: pass criterion=..., for example kmnc"
            )
        return None
    name = settings.criterion if isinstance(settings.criterion, str) else str(chosen)
    own, leads = chosen.fresh(), policy.is_guided  # the caller's object stays unchanged
    if chosen.learnt:
        if train is not None:
            raise UsageError(
                f"{chosen} is fitted already, train would change nothing: leave it out, or pass {chosen!r}"
            )
        return CampaignCriterion(own, name, leads, None, 0)
    data = seeds
    with nullcontext() if train is None else _name_training_data():
        if train is not None:
            data = read_seeds(train, settings.train_inputs)
        if data.shape[1:] != seeds.shape[1:]:
            raise DataError(
                f"its inputs must have the seeds' shape {list(seeds.shape[1:])}, got {list(data.shape[1:])}"
            )
        with step("fitting the criterion"):
            own.learn_from(target, data)
    source = None if not chosen.learns else "the seeds" if train is None else "training data"
    return CampaignCriterion(own, name, leads, source, len(data))


def choose_campaign_criterion(criterion: str | Criterion) -> Criterion:
    """The criterion with this name, or the given one, if a campaign can use it."""
    chosen: Criterion = choose_criterion(criterion)
    if not chosen.can_guide:
        raise UsageError(
            f"{chosen.name} cannot be used in a campaign: it reads contributions, and a campaign provides activations; "
            "use it in a loop of your own, or choose another criterion"
        )
    return chosen


@contextmanager
def _name_training_data() -> Iterator[None]:
    """Errors about data say that it is the training data."""
    try:
        yield
    except DataError as error:
        raise DataError(f"training data: {error}") from error
