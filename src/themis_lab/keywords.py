"""The keyword options of functions, for editors and type checkers; written by tools/keywords.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict


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


class ContestOptions(TypedDict, total=False):
    """Options of `themis_lab.contest_run`."""

    mix: float
    """Share of each batch that is disturbed; the rest is clean. Default: 0.5."""
    fresh: float
    """Share of the disturbed inputs that is made anew from all training seeds; the rest are the run's faults. Default:
    1.0."""
    steer: float | None
    """How far fresh inputs follow the current errors: 0 draws theta, perturbation and class uniformly; by default 0.5,
    and 0 for pictures of one number each."""
    attack_steps: int
    """Steps of pgd, pgd_l2 and apgd for fresh inputs; fewer steps leave time for more batches. Default: 2."""
    distill: float
    """Pictures of one class or number each: share of the loss that compares with the old model's clean answer.
    Default: 0.9."""
    anchor: float
    """How much more the old answers count for clean pictures than for disturbed ones. Default: 2.0."""
    blend: float
    """Share of another picture that is blended into a picture, at most; 0 for none. Default: 0.5."""
    epochs: int
    """Number of epochs at most; an epoch shows every disturbed and every clean input once. Default: 10."""
    batches: int | None
    """Batches per epoch; by default as many as show every input once."""
    batch_size: int
    """Inputs per batch. Default: 64."""
    accumulate: int
    """Pass each batch to the model in this many parts, which takes less memory. Default: 1."""
    autocast: bool
    """Train in bfloat16 where it is safe, which is faster on recent GPUs. Default: False."""
    optimiser: str
    """Sgd (with momentum), adam or adamw. Default: 'adam'."""
    learning_rate: float | None
    """Learning rate, or its peak; by default 3e-4 for pictures of one class each, 1e-3 for other tasks."""
    schedule: str
    """Learning rate over the steps: constant, cosine, step or one-cycle. Default: 'cosine'."""
    weight_decay: float
    """Weight decay of the optimiser. Default: 0.0."""
    layers: list[str] | None
    """Glob patterns of the names of the parameters to train, such as fc*,conv2.*; by default all."""
    statistics: str
    """Running means and variances of normalisation layers: keep, or update. Default: 'keep'."""
    hold_out: float
    """Share of the seeds that is held out of training and used to choose the best epoch. Default: 0.2."""
    tolerance: float
    """How far the clean score may fall; the share of the way to the trained weights is chosen by it. Default:
    0.0025."""
    share: float | None
    """Share of the way from the old weights to the trained ones; by default chosen on held-out seeds."""
    patience: int | None
    """Stop after this many epochs without an improvement on the held-out seeds. Default: 5."""
    random_seed: int
    """Same seed, same weights. Default: 0."""
    inputs: int | None
    """Number of inputs that each technique chooses; by default the distinct faults that themis finds."""
    most_inputs: int
    """Maximum number of inputs if it is given by the faults that themis finds. Default: 2000."""
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
