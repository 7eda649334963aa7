"""The plan of a comparison: its options, and the campaigns that follow from them."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError
from themis.options import check_count, check_known, option
from themis.text import split_list
from themis_lab.techniques import Technique, choose_technique

if TYPE_CHECKING:
    from themis_lab.comparison.grid import Grid

ALWAYS = ("random", "corners")
"""Techniques in every comparison."""
GRID, PAPER, GIVEN = "grid", "paper", "given"
"""Grids of magnitudes: chosen on separate seeds, the paper's, and given as numbers."""
FREE = ("techniques", "magnitudes", "campaigns", "resamples")
"""Options that decide which campaigns are run and how they are summarised, but change no campaign."""


def as_file_name(text: str) -> str:
    """A name that every file system accepts; different texts have different names."""
    slug = re.sub(r"[^\w.-]+", "_", text)
    if slug == text:
        return text
    from themis.target.fingerprint import hash_text

    return f"{slug}-{hash_text(text)[:6]}"


@dataclass(frozen=True)
class CampaignCell:
    """One campaign of a comparison: a technique at a magnitude."""

    technique: str
    magnitude: float
    campaign: int

    @property
    def file(self) -> str:
        """A name that every file system accepts and no other cell has."""
        return f"{as_file_name(self.technique)}/{self.magnitude!r}-{self.campaign}.json"

    @property
    def group(self) -> str:
        """A criterion is fitted once for all campaigns of its technique."""
        return self.technique

    def __str__(self) -> str:
        return f"{self.technique} at {self.magnitude:g}, campaign {self.campaign + 1}"


@dataclass(frozen=True)
class ComparisonPlan:
    """What is compared at which cost; the same for every technique."""

    techniques: str = option(
        "nc,kmnc,idc,lsa,paper,scheduled",
        "policies, criteria and paper-preset (the paper's method with all its settings), such as "
        "kmnc,kmnc(k=100),scheduled; random and corners are always included",
    )
    magnitudes: str = option(
        "grid",
        "grid (ten, chosen on separate seeds), paper (the paper's five), numbers such as 0.1,0.2,0.3, or several",
    )
    campaigns: int = option(3, "campaigns per technique and magnitude, each with its own random seed")
    max_passes: int = option(
        5000, "passes per campaign (a forward pass is 1, a backward pass 2), including those over clean seeds"
    )
    round_size: int = option(160, "tests per round, after which a technique learns from their outcomes")
    seeds: int = option(1000, "maximum number of seeds that techniques use")
    judge_seeds: int = option(1000, "maximum number of separate seeds on which error rates are measured")
    grid_seeds: int = option(500, "maximum number of further seeds on which the grid is chosen")
    train_inputs: int = option(10_000, "training inputs that a criterion is fitted to, a random sample")
    uniform_share: float = option(0.2, "share of tests drawn uniformly, the same ones for every technique")
    resamples: int = option(1000, "resamples of seeds and campaigns for the intervals")
    random_seed: int = option(0, "random seed of the first campaign; the following ones count up from it")
    threads: int = option(1, "torch threads per worker; results may depend on it, but never on --workers")

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
    def of(**options: Any) -> ComparisonPlan:
        """A plan from keyword options; techniques and magnitudes may be lists."""
        check_known(ComparisonPlan, options)
        for name in ("techniques", "magnitudes"):
            if name in options and not isinstance(options[name], str):
                values = options[name] if isinstance(options[name], list | tuple) else [options[name]]
                options[name] = ",".join(str(value) for value in values)
        return ComparisonPlan(**options)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques, each of them once even if it is given under several names."""
        return tuple(dict.fromkeys(choose_technique(name) for name in (*ALWAYS, *split_list(self.techniques))))

    def cells(self, grids: tuple[Grid, ...]) -> list[CampaignCell]:
        """Every campaign once, though grids may share magnitudes."""
        magnitudes = sorted({magnitude for grid in grids for magnitude in grid.magnitudes})
        return [
            CampaignCell(technique.name, magnitude, campaign)
            for technique in self.chosen()
            for magnitude in magnitudes
            for campaign in range(self.campaigns)
        ]
