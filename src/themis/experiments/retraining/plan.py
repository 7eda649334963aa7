"""The plan of a retraining: what is measured, how often and on what, beside the recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError
from themis.options import check_count, check_known, option

if TYPE_CHECKING:
    from themis.perturb import Perturbation

FREE = ("tolerance", "rounds")
"""Options that may differ when a retraining is gone on with: they change no step that is done."""


@dataclass(frozen=True)
class Plan:
    """What a retraining measures."""

    also: str = option("", "more to examine on than the run's own, as rain,fog:0.5,gaussian:0.3 (name:magnitude)")
    random_seeds: int = option(3, "models that are trained, each with a random seed of its own, for the spread")
    draws: int = option(8, "uniform tests a judge seed, the same ones for every model")
    passes: int | None = option(
        None, "passes of each campaign on the judge seeds; by default the run's, for as many tests"
    )
    limit: int | None = option(None, "faults to learn from, at most, spread over seeds and outcomes; by default all")
    rounds: int = option(1, "campaign and retraining in turn, up to this often, until the fault rate stops falling")
    tolerance: float = option(0.005, "how far the clean score may fall before it is a failure")

    def __post_init__(self) -> None:
        for name in ("random_seeds", "draws", "rounds", "passes", "limit"):
            value = getattr(self, name)
            if value is not None or name not in ("passes", "limit"):
                check_count(name, value)
        if isinstance(self.tolerance, bool) or not 0 <= self.tolerance < 1:
            raise UsageError(f"tolerance must lie in [0, 1), got {self.tolerance!r}")

    @staticmethod
    def of(**options: Any) -> Plan:
        """A plan from keyword options; `also` may be a list."""
        check_known(Plan, options)
        if not isinstance(options.get("also", ""), str):
            options["also"] = ",".join(map(str, options["also"]))
        return Plan(**options)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def examined(self) -> dict[str, Perturbation]:
        """What is examined on beside the run's own perturbation, by name."""
        from themis.experiments.comparison.plan import split_list

        return {each: named_perturbation(each) for each in split_list(self.also)}


def named_perturbation(text: str) -> Perturbation:
    """`name`, or `name:magnitude`."""
    from themis.perturb import choose_perturbation

    name, _, number = text.rpartition(":")
    try:
        magnitude = float(number) if name else None
    except ValueError:  # module:NAME
        magnitude = None
    return choose_perturbation(text) if magnitude is None else choose_perturbation(name, magnitude)
