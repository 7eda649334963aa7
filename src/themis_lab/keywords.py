"""The keyword options of functions, for editors and type checkers; written by tools/keywords.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from themis.keywords import RecipeOptions


class CompareOptions(TypedDict, total=False):
    """Options of `themis_lab.compare`."""

    techniques: str | Sequence[Any]
    """Policies, criteria and paper-preset (the paper's method with all its settings), such as
    kmnc,kmnc(k=100),scheduled; random and corners are always included. Default: 'nc,kmnc,idc,lsa,paper,scheduled'."""
    magnitudes: str | Sequence[Any]
    """Grid (ten, chosen on separate seeds), paper (the paper's five), numbers such as 0.1,0.2,0.3, or several.
    Default: 'grid'."""
    campaigns: int
    """Campaigns per technique and magnitude, each with its own random seed. Default: 3."""
    max_passes: int
    """Passes per campaign (a forward pass is 1, a backward pass 2), including those over clean seeds. Default:
    5000."""
    round_size: int
    """Tests per round, after which a technique learns from their outcomes. Default: 160."""
    seeds: int
    """Maximum number of seeds that techniques use. Default: 1000."""
    judge_seeds: int
    """Maximum number of separate seeds on which error rates are measured. Default: 1000."""
    grid_seeds: int
    """Maximum number of further seeds on which the grid is chosen. Default: 500."""
    train_inputs: int
    """Training inputs that a criterion is fitted to, a random sample. Default: 10000."""
    uniform_share: float
    """Share of tests drawn uniformly, the same ones for every technique. Default: 0.2."""
    resamples: int
    """Resamples of seeds and campaigns for the intervals. Default: 1000."""
    random_seed: int
    """Random seed of the first campaign; the following ones count up from it. Default: 0."""
    threads: int
    """Torch threads per worker; results may depend on it, but never on --workers. Default: 1."""


class ContestOptions(RecipeOptions, total=False):
    """Options of `themis_lab.contest_run`."""

    inputs: int | None
    """Number of inputs that each technique chooses; by default the distinct faults that themis finds."""
    most_inputs: int
    """Maximum number of inputs if it follows from the faults that themis finds. Default: 2000."""
    passes: int
    """Passes per campaign on the search seeds, including those over clean seeds. Default: 5000."""
    round_size: int
    """Tests per round, after which a technique learns from their outcomes. Default: 160."""
    random_seeds: int
    """How often each technique searches and trains, each time with its own random seed. Default: 3."""
    draws: int
    """Uniform tests per judge seed, the same ones for every model. Default: 5."""
    judge_passes: int
    """Passes of a campaign on the judge seeds against each model; 0 for no campaign. Default: 0."""
