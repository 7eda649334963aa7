"""The keyword options of functions, for editors and type checkers; written by tools/keywords.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from themis.criteria import Criterion
    from themis.search.policy import Policy


class BudgetOptions(TypedDict, total=False):
    """How long a campaign runs."""

    max_tests: int | None
    """Stop after this many tests; None sets no limit. Default: 20000."""
    max_passes: int | None
    """Stop after this many passes (a forward pass is 1, a backward pass is 2)."""
    max_seconds: float | None
    """Stop after this many seconds."""


class StopOptions(TypedDict, total=False):
    """What else a resumed campaign may change."""

    coverage: float | None
    """Stop at this coverage, if little is left to find; None sets no goal. Default: 1.0."""
    recall: float | None
    """Share of the distinct faults that four times the tests would find; at the coverage goal, stop only if it was
    found and the residual risk is at most 1%; None stops at the coverage goal in any case. Default: 0.9."""
    plateau: int | None
    """Stop after this many rounds without a new distinct fault or more coverage. Default: 20."""
    max_stored: int
    """Number of faults whose inputs are stored, the most telling first; the rows of all faults are stored. Default:
    1000."""
    clean_memory_gib: float | None
    """Memory in GiB for the clean activations of the seeds (default: half of what is free on a GPU, a quarter on a
    CPU); those that do not fit are computed again when tests need them, with the same results."""


class CampaignOptions(StopOptions, total=False):
    """Options of a campaign, alone or in a suite."""

    policy: str | Policy
    """How tests are chosen: random, corners, paper, scheduled, boundary (only --against, where it is the default), or
    a policy that a package adds, such as fuzz. Default: 'scheduled'."""
    preset: str | None
    """Preset paper: policy paper, no uniform stream, point value of the MCSE, gibbs in every round, no budget and no
    plateau: it runs until coverage, or a limit that you set."""
    judge: str
    """How the sampled neurons are judged in each round: exact, gibbs or pymc. Default: 'exact'."""
    tolerance: float
    """A neuron has converged if its MCSE (at 4,000 draws) is below this. Default: 0.0005."""
    alpha: float | None
    """Confidence of the upper bound on the MCSE; None uses the point value. Default: 0.95."""
    draws: int
    """Draws per neuron, over all chains. Default: 4000."""
    sample: int
    """Number of neurons that are sampled. Default: 1000."""
    scale: str
    """Unit of sensitivity: absolute, as in the paper, or relative to the spread of each neuron on clean inputs, for
    models with small activations, which the absolute tolerance calls covered after a few tests. Default:
    'absolute'."""
    uniform_share: float
    """Share of tests drawn uniformly; claims about the model are based only on them. Default: 0.2."""
    round_size: int | None
    """Tests per round (default: 640 or five chunks; with policy paper, one per seed)."""
    batch_size: int | None
    """Tests per forward pass on an accelerator (default: 256), inputs per call of a black box; does not change the
    result."""
    min_ssim: float | None
    """Drop tests whose similarity (SSIM) to their seed is below this; 1 means identical."""
    min_vif: float | None
    """Drop tests that keep less than this share of the visual information (VIF) of their seed; it predicts better than
    SSIM what people recognise, and needs pictures of at least 41 pixels per side; people name most pictures above
    0.1."""
    max_seeds: int | None
    """Use a random sample of this many seeds; it is always the same."""
    split: Sequence[float] | None
    """Shares of the seeds for search, training and judging, such as 0.5,0.2,0.3; only the first part is tested."""
    split_seed: int
    """The same seed gives the same split of the same data, whatever the random seed. Default: 0."""
    split_by: str | None
    """Groups of seeds that stay together: a number of consecutive seeds, such as 100 frames of a video, or a text file
    with the group of each seed, one per line, such as the patient."""
    seed_weights: str | None
    """How often inputs like each seed occur in operation: FILE:COLUMN of a CSV file with a row per input of the data,
    FILE:COLUMN=VALUE:SHARE,..., or class=NAME:SHARE,...; the uniform stream follows them."""
    slice_by: str | None
    """Columns to give the fault rate by: class, FILE:COLUMN of a CSV file with a row per input of the data, or
    several, separated by commas; --max-fault-rate then holds for each slice too."""
    random_seed: int
    """The same seed gives the same campaign. Default: 0."""


class RunOptions(CampaignOptions, BudgetOptions, total=False):
    """Options of `themis.run`."""

    magnitude: float | None
    """Largest strength of the perturbation; for noise and attacks, the upper end of theta."""
    criterion: str | Criterion | None
    """Criterion that guides policy fuzz, which is then the default, or observes another policy: kmnc, 'kmnc(k=100)',
    nc, ..."""
    train_inputs: int | None
    """Number of training inputs that the criterion learns from, drawn at random. Default: 10000."""
    decide: str | None
    """Stop as soon as a claim is certain at 95%, however often it looks: fault_rate<=0.02 (all tests are uniform, each
    of another seed) or recall>=0.9, the share of random faults found before (half of them are uniform); exit code 0, 1
    or 4 (undecided)."""


class SuiteKeywords(CampaignOptions, total=False):
    """Options of `themis.run_suite`."""

    max_tests: int | None
    """Tests of the whole suite (default: 1,000 per member)."""
    max_seconds: float | None
    """Stop after this many seconds; the same command, or themis resume, continues the suite."""
    share: float
    """Share of the tests divided among all members by weight; the rest is adaptive. Default: 0.5."""
    level_seeds: int | None
    """Seeds that are graded at each level, a random sample; None grades all. Default: 1000."""
    decide: str | None
    """A claim to decide at 95% on as few graded seeds as it takes, instead of running campaigns: mean_error<=0.3, or
    mce<=0.8 with a baseline; exit code 0, 1 or 4 (undecided)."""


class ResumeOptions(StopOptions, BudgetOptions, total=False):
    """Limits that `themis.resume` may change."""


class RecipeOptions(TypedDict, total=False):
    """How models are trained."""

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
    """For pictures of one class or number each: share of the loss that compares with the old model's clean answer.
    Default: 0.9."""
    anchor: float
    """How much more the old answers count for clean pictures than for disturbed ones. Default: 2.0."""
    blend: float
    """Share of another picture that is blended into a picture, at most; 0 for none. Default: 0.5."""
    epochs: int
    """Number of epochs at most; an epoch shows every disturbed and every clean input once. Default: 10."""
    batches: int | None
    """Batches per epoch; by default as many as show every input once, and at least 100 if inputs are made anew."""
    batch_size: int
    """Inputs per batch. Default: 64."""
    accumulate: int
    """Pass each batch to the model in this many parts, which takes less memory. Default: 1."""
    autocast: bool
    """Train in bfloat16 where it is safe, which is faster on recent GPUs. Default: False."""
    optimiser: str
    """Optimiser: sgd (with momentum), adam or adamw. Default: 'adam'."""
    learning_rate: float | None
    """Learning rate, or its peak; by default 3e-4 for pictures of one class each, 1e-3 for other tasks."""
    schedule: str
    """Learning rate over the steps: constant, or falling like a cosine. Default: 'cosine'."""
    weight_decay: float
    """Weight decay of the optimiser. Default: 0.0."""
    layers: list[str] | None
    """Glob patterns of the names of the parameters to train, such as fc*,conv2.*; by default all."""
    statistics: str
    """Running means and variances of normalisation layers: keep, or update. Default: 'keep'."""
    hold_out: float
    """Share of the seeds that is held out of training and used to choose the best epoch. Default: 0.2."""
    tolerance: float
    """How far the clean score may fall; limits how far the weights move towards the trained ones. Default: 0.0025."""
    confidence: float
    """How likely the clean score must be to stay within the tolerance: 0.5 is the best estimate, 0.95 is cautious.
    Default: 0.5."""
    share: float | None
    """Share of the way from the old weights to the trained ones; by default chosen on held-out seeds."""
    patience: int | None
    """Stop after this many epochs without an improvement on the held-out seeds. Default: 5."""
    random_seed: int
    """Same seed, same weights. Default: 0."""


class RetrainOptions(RecipeOptions, total=False):
    """Options of `themis.retrain`."""

    also: str | Sequence[Any]
    """Further perturbations to examine the model on, such as rain,fog:0.5,gaussian:0.3 (name:magnitude). Default:
    ''."""
    random_seeds: int
    """Number of models that are trained, each with its own random seed. Default: 3."""
    draws: int
    """Uniform tests per judge seed, the same ones for every model. Default: 8."""
    passes: int | None
    """Passes per campaign on the judge seeds; by default enough for as many tests as the run had."""
