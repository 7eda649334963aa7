"""The plan of a comparison: all that decides its result."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, nearest
from themis.options import check_count, check_known, option

if TYPE_CHECKING:
    from themis.experiments.comparison.grid import Grid
    from themis.perturb import Perturbation

ALWAYS = ("random", "corners")
"""Rivals in every comparison."""
BASELINES = ("nc", "kmnc", "idc", "lsa")
"""Those of the paper, whose mean it compares itself with."""
GUIDED = "fuzz"
"""The policy that a criterion guides; without one it is no technique."""
DIFFERENTIAL = "deepxplore"
"""The policy that sets other models against the target."""
GRID, PAPER, GIVEN = "grid", "paper", "given"
"""Grids of magnitudes: fixed on other seeds, the paper's, and numbers."""
FREE = ("techniques", "magnitudes", "campaigns", "resamples")
"""What says which campaigns are run and how they are summed up, and changes none of them."""


@dataclass(frozen=True)
class Technique:
    """A way to search: a policy, or the fuzzer guided by a criterion. Its name says in one way only what it is."""

    name: str
    criterion: str | None = None


@dataclass(frozen=True)
class Cell:
    """One campaign: a technique at a magnitude."""

    technique: str
    magnitude: float
    campaign: int

    @property
    def file(self) -> str:
        """Where its result is kept, a name that any disk takes and no other cell has."""
        slug = re.sub(r"[^\w.-]+", "_", self.technique)
        if slug != self.technique:
            from themis.target.fingerprint import hash_text

            slug = f"{slug}-{hash_text(self.technique)[:6]}"
        return f"{slug}/{self.magnitude!r}-{self.campaign}.json"

    def __str__(self) -> str:
        return f"{self.technique} at {self.magnitude:g}, campaign {self.campaign + 1}"


@dataclass(frozen=True)
class Plan:
    """What is compared at which cost; the same for every technique."""

    techniques: str = option(
        "nc,kmnc,idc,lsa,paper,scheduled",
        "policies and criteria, as kmnc,kmnc(k=100),scheduled; random and corners are always with them",
    )
    magnitudes: str = option(
        "grid",
        "grid (ten, fixed on other seeds), paper (the paper's five), numbers as 0.1,0.2,0.3, or several of these",
    )
    campaigns: int = option(3, "campaigns a technique and magnitude, each with a random seed of its own")
    max_passes: int = option(5000, "passes a campaign (a forward is 1, a backward 2), those over clean seeds included")
    round_size: int = option(160, "tests after which a technique learns from what came of them")
    seeds: int = option(1000, "seeds that techniques use, at most")
    judge_seeds: int = option(1000, "other seeds, on which error rates are measured, at most")
    grid_seeds: int = option(500, "yet other seeds, on which the grid is fixed, at most")
    train_inputs: int = option(10_000, "training inputs that a criterion learns from, a random sample")
    uniform_share: float = option(0.2, "share of tests drawn uniformly, the same ones for every technique")
    resamples: int = option(1000, "resamples of seeds and campaigns, for the intervals")
    random_seed: int = option(0, "that of the first campaign; the next ones count on from it")
    threads: int = option(1, "torch threads of each worker; results may change with it, never with --workers")

    def __post_init__(self) -> None:
        counts = (
            "campaigns",
            "max_passes",
            "round_size",
            "seeds",
            "judge_seeds",
            "grid_seeds",
            "train_inputs",
            "resamples",
            "threads",
        )
        for name in (*counts, "random_seed"):
            check_count(name, getattr(self, name), 0 if name == "random_seed" else 1)
        if not 0 <= self.uniform_share <= 1:
            raise UsageError(f"uniform_share must lie in [0, 1], got {self.uniform_share!r}")

    @staticmethod
    def of(**options: Any) -> Plan:
        """A plan from keyword options; techniques and magnitudes may be lists."""
        check_known(Plan, options)
        for name in ("techniques", "magnitudes"):
            if name in options and not isinstance(options[name], str):
                given = options[name] if isinstance(options[name], list | tuple) else [options[name]]
                options[name] = ",".join(str(each) for each in given)
        return Plan(**options)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques, none of them twice, whatever they are called."""
        return tuple(dict.fromkeys(choose_technique(name) for name in (*ALWAYS, *split_list(self.techniques))))

    def grids(self, perturbation: Perturbation) -> tuple[Grid, ...]:
        """The grids of magnitudes; that fixed on other seeds is empty yet."""
        from themis.experiments.comparison.grid import Grid, paper_grid

        grids: list[Grid] = []
        numbers: list[float] = []
        for word in dict.fromkeys(split_list(self.magnitudes)):
            if word == GRID:
                grids.append(Grid(GRID, ()))
            elif word == PAPER:
                grids.append(paper_grid(perturbation))
            else:
                numbers.append(_magnitude(word))
        if numbers:
            grids.append(Grid(GIVEN, tuple(sorted(set(numbers)))))
        if not grids:
            raise UsageError("magnitudes must name at least one, got none: write grid, paper or numbers as 0.1,0.2,0.3")
        for each in grids:
            for magnitude in each.magnitudes:
                perturbation.at(magnitude)  # refuses what means nothing
        return tuple(grids)

    def cells(self, grids: tuple[Grid, ...]) -> list[Cell]:
        """Every cell once, though grids may share magnitudes."""
        magnitudes = sorted({each for grid in grids for each in grid.magnitudes})
        return [
            Cell(technique.name, magnitude, campaign)
            for technique in self.chosen()
            for magnitude in magnitudes
            for campaign in range(self.campaigns)
        ]


def choose_technique(name: str) -> Technique:
    """A technique by any of its names; the paper's baselines at its settings."""
    from themis.criteria.names import CRITERIA, choose_criterion
    from themis.criteria.names import PAPER as SETTINGS
    from themis.search import POLICIES

    policies = [each for each in POLICIES if each != GUIDED]
    if name.lower() in policies:
        return Technique(name.lower())
    base = name.partition("(")[0].strip().lower()
    try:
        criterion = choose_criterion(name)
    except UsageError as error:
        if "(" in name or base in CRITERIA:
            raise UsageError(f"technique {name!r}: {error}") from error
        raise UsageError(
            f"techniques must be policies or criteria, got {name!r}: {nearest(name, [*policies, *CRITERIA])}"
        ) from error
    if not criterion.can_guide:
        raise UsageError(
            f"techniques must be policies or criteria that can guide a campaign, got {name!r}: {criterion.name} needs "
            "more than a campaign shows it, leave it out"
        )
    return Technique(str(criterion), SETTINGS.get(str(criterion), str(criterion)))


def split_list(text: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts = [each.strip() for each in re.split(r",(?![^(]*\))", text)]
    return [each for each in parts if each]


def _magnitude(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"magnitudes must be positive numbers, {GRID} or {PAPER}, got {word!r}")
    return value
