"""The plan of a retraining: what is measured, how often and on what; the recipe says how the model is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from themis.options import check_count, check_known, option
from themis.retraining.recipe import CHOOSING
from themis.text import split_list

if TYPE_CHECKING:
    from themis.perturb import Perturbation

FREE = (*CHOOSING, "rounds")
"""Options that may differ when a retraining is resumed: they change no finished training."""


@dataclass(frozen=True)
class RetrainingPlan:
    """What a retraining measures."""

    also: str = option(
        "", "further perturbations to examine the model on, such as rain,fog:0.5,gaussian:0.3 (name:magnitude)"
    )
    random_seeds: int = option(3, "number of models that are trained, each with its own random seed")
    draws: int = option(8, "uniform tests per judge seed, the same ones for every model")
    passes: int | None = option(
        None, "passes per campaign on the judge seeds; by default enough for as many tests as the run had"
    )
    strengths: bool = option(
        False, "shrink the faults of these campaigns to the smallest strength that breaks each judge seed"
    )
    limit: int | None = option(
        None, "maximum number of faults to learn from, spread over seeds and outcomes; by default all"
    )
    rounds: int = option(1, "maximum number of rounds of retraining and campaign, until the fault rate stops falling")

    def __post_init__(self) -> None:
        for name in ("random_seeds", "draws", "rounds", "passes", "limit"):
            value = getattr(self, name)
            if value is not None or name not in ("passes", "limit"):
                check_count(name, value)

    @staticmethod
    def of(**options: Any) -> RetrainingPlan:
        """A plan from keyword options; `also` may be a list."""
        check_known(RetrainingPlan, options)
        if not isinstance(options.get("also", ""), str):
            options["also"] = ",".join(map(str, options["also"]))
        return RetrainingPlan(**options)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def examined(self) -> dict[str, Perturbation]:
        """The perturbations in `also`, by name."""
        return {name: named_perturbation(name) for name in split_list(self.also)}


def named_perturbation(text: str) -> Perturbation:
    """The perturbation called `name` or `name:magnitude`."""
    from themis.perturb import choose_perturbation

    name, _, number = text.rpartition(":")
    try:
        magnitude = float(number) if name else None
    except ValueError:  # module:NAME
        magnitude = None
    return choose_perturbation(text) if magnitude is None else choose_perturbation(name, magnitude)
