"""What a campaign asks of a test criterion, which measures how much of a model tests have covered.

The criteria of the literature are in `themis_lab.criteria`, with the base class that they share; packages add others as
entry points.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import UsageError, nearest
from themis.measure.calculator import Observer
from themis.plugins import Extensible
from themis.target.activations import Layer
from themis.target.target import AnyTarget

SPECIFICATION = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


@dataclass(frozen=True)
class Laws:
    """Which laws hold for a criterion's score; the tests check each of them."""

    bounded: bool
    """It lies in 0..1."""
    monotone: bool
    """Further tests never lower it."""
    order_free: bool
    """The same tests in a different order give the same score."""
    mergeable: bool
    """Merging two halves gives the same score as all tests together."""


class View(Observer, Protocol):
    """Reads what a criterion needs from the passes of one target, and updates the criterion with them."""

    layout: Any
    """What it reads of each layer."""


class Criterion(ABC):
    """A criterion as a campaign sees it; derive your own from `themis_lab.criteria.Criterion`, which does the rest."""

    name: ClassVar[str]
    laws: Laws
    learns: ClassVar[bool] = True
    """Whether it must be fitted."""
    can_guide: ClassVar[bool] = True
    """Whether it can take part in a campaign, which passes it activations."""
    learnt: dict[str, Tensor]
    """What it has learned from training data."""
    state: dict[str, Tensor]
    """What it remembers of the tests; empty before the first one."""

    @classmethod
    @abstractmethod
    def parse(cls, options: str) -> Self:
        """The criterion with options such as `k=100, neurons=element`, not yet fitted."""

    @abstractmethod
    def learn_from(self, target: AnyTarget, seeds: Seeds) -> None:
        """Fit it on a target's training data, if it learns."""

    @abstractmethod
    def view(self, target: AnyTarget, layers: tuple[Layer, ...], example: Tensor, max_bytes: int | None) -> View:
        """Its view of a target with these layers; `example` is one raw input, `max_bytes` the memory for clean ones."""

    @abstractmethod
    def fresh(self) -> Self:
        """A copy that is fitted in the same way and has seen no tests."""

    @abstractmethod
    def score(self) -> float:
        """The score of all tests so far; 0 before the first test."""

    @abstractmethod
    def report(self) -> dict[str, Any]:
        """Further results of the tests, as plain data."""

    @abstractmethod
    def restore(self, state: dict[str, Tensor], tests: int, layout: Any) -> None:
        """Resume from the `state` of a criterion that was fitted in the same way, after `tests` tests of `layout`."""


CRITERIA: Extensible[type[Criterion]] = Extensible("themis.criteria", {})
"""The criteria by name; packages add them."""


def choose_criterion(criterion: str | Criterion) -> Any:
    """The criterion of a specification such as `kmnc(k=100)`, not yet fitted; a criterion is returned as it is."""
    chosen = criterion
    if not isinstance(chosen, Criterion):
        match = SPECIFICATION.fullmatch(chosen) if isinstance(chosen, str) else None
        if match is None:
            raise UsageError(f"criterion must be a name, perhaps with options, got {criterion!r}: write kmnc(k=100)")
        name = match[1].lower()
        if name not in CRITERIA:
            raise UsageError(f"criterion must be a known name, got {match[1]!r}: {nearest(name, CRITERIA)}")
        chosen = CRITERIA[name].parse(match[2] or "")
    kind, own_name = type(chosen), getattr(chosen, "name", None)
    other = None if own_name is None else CRITERIA.get(own_name)
    if own_name is None or (other is not None and other is not kind):  # it would be reported under the name of another
        found = "it has none" if other is None else f"{own_name!r} is that of {other.__name__}"
        raise UsageError(
            f"the criterion {kind.__name__} must have a name of its own, but {found}: write name = "
            f"{kind.__name__.lower()!r} in the class"
        )
    return chosen
