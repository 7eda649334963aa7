"""The options of a retraining, with defaults and rules: the recipe of training, and the plan of what is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError
from themis.options import check_count, check_known, check_numbers, check_rules, option
from themis.text import split_list

if TYPE_CHECKING:
    from themis.perturb import Perturbation

OPTIMISERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine")
FRONTIER_OPTIONS = ("tolerance", "confidence", "share")
"""Options that choose a point of the frontier after a training."""


def task_defaults(kind: str) -> dict[str, Any]:
    """The values of options that depend on the task, if they are not given; kind: that of `grading.picture_kind`."""
    return {"learning_rate": 3e-4 if kind == "class" else 1e-3, "steer": 0.0 if kind == "number" else 0.5}


@dataclass(frozen=True)
class Recipe:
    """Options of a retraining. Shares refer to a batch, or to seeds."""

    mix: float = option(0.5, "share of each batch that is disturbed; the rest is clean")
    fresh: float = option(
        1.0, "share of the disturbed inputs that is made anew from all training seeds; the rest are the run's faults"
    )
    steer: float | None = option(
        None,
        "how far fresh inputs follow the current errors: 0 draws theta, perturbation and class uniformly; by default "
        "0.5, and 0 for pictures of one number each",
    )
    attack_steps: int = option(
        2, "steps of pgd, pgd_l2 and apgd for fresh inputs; fewer steps leave time for more batches"
    )
    distill: float = option(
        0.9,
        "for pictures of one class or number each: share of the loss that compares with the old model's clean answer",
    )
    anchor: float = option(2.0, "how much more the old answers count for clean pictures than for disturbed ones")
    blend: float = option(0.5, "share of another picture that is blended into a picture, at most; 0 for none")
    epochs: int = option(10, "number of epochs at most; an epoch shows every disturbed and every clean input once")
    batches: int | None = option(
        None, "batches per epoch; by default as many as show every input once, and at least 100 if inputs are made anew"
    )
    batch_size: int = option(64, "inputs per batch")
    accumulate: int = option(1, "pass each batch to the model in this many parts, which takes less memory")
    autocast: bool = option(False, "train in bfloat16 where it is safe, which is faster on recent GPUs")
    optimiser: str = option("adam", "optimiser: sgd (with momentum), adam or adamw")
    learning_rate: float | None = option(
        None, "learning rate, or its peak; by default 3e-4 for pictures of one class each, 1e-3 for other tasks"
    )
    schedule: str = option("cosine", "learning rate over the steps: constant, or falling like a cosine")
    weight_decay: float = option(0.0, "weight decay of the optimiser")
    layers: list[str] | None = option(
        None, "glob patterns of the names of the parameters to train, such as fc*,conv2.*; by default all"
    )
    statistics: str = option("keep", "running means and variances of normalisation layers: keep, or update")
    hold_out: float = option(0.2, "share of the seeds that is held out of training and used to choose the best epoch")
    tolerance: float = option(
        0.0025, "how far the clean score may fall; limits how far the weights move towards the trained ones"
    )
    confidence: float = option(
        0.5,
        "how likely the clean score must be to stay within the tolerance: 0.5 is the best estimate, 0.95 is cautious",
    )
    share: float | None = option(
        None, "share of the way from the old weights to the trained ones; by default chosen on held-out seeds"
    )
    patience: int | None = option(5, "stop after this many epochs without an improvement on the held-out seeds")
    random_seed: int = option(0, "same seed, same weights")

    def __post_init__(self) -> None:
        check_numbers(self)
        self._check_layers()
        rules = {
            **{name: (0 <= getattr(self, name) <= 1, "lie in [0, 1]") for name in ("mix", "fresh", "distill")},
            "steer": (self.steer is None or 0 <= self.steer <= 1, "lie in [0, 1], or be None to choose it by the task"),
            "attack_steps": (self.attack_steps >= 1, "be at least 1"),
            "anchor": (0 <= self.anchor < math.inf, "be 0 or more"),
            "blend": (0 <= self.blend <= 0.5, "lie in [0, 0.5]: a picture keeps its label"),
            "epochs": (self.epochs >= 1, "be at least 1"),
            "batches": (self.batches is None or self.batches >= 1, "be at least 1, or None for all inputs"),
            "batch_size": (self.batch_size >= 2, "be at least 2, one clean and one disturbed input"),
            "accumulate": (1 <= self.accumulate <= self.batch_size, "lie between 1 and batch_size"),
            "autocast": (isinstance(self.autocast, bool), "be true or false"),
            "optimiser": (self.optimiser in OPTIMISERS, f"be one of {', '.join(OPTIMISERS)}"),
            "learning_rate": (
                self.learning_rate is None or 0 < self.learning_rate < math.inf,
                "be a positive number, or None to choose it by the task",
            ),
            "schedule": (self.schedule in SCHEDULES, f"be one of {', '.join(SCHEDULES)}"),
            "weight_decay": (0 <= self.weight_decay < math.inf, "be 0 or more"),
            "statistics": (self.statistics in ("keep", "update"), "be 'keep' or 'update'"),
            "hold_out": (0 < self.hold_out < 1, "lie in (0, 1): the best epoch is chosen on held-out seeds"),
            "tolerance": (0 <= self.tolerance <= 1, "lie in [0, 1], where 1 sets no limit"),
            "confidence": (0 < self.confidence < 1, "lie in (0, 1)"),
            "share": (
                self.share is None or 0 < self.share <= 1,
                "lie in (0, 1], where 1 uses the trained weights as they are, or be None to choose it by tolerance",
            ),
            "patience": (self.patience is None or self.patience >= 1, "be at least 1, or None to run all epochs"),
            "random_seed": (0 <= self.random_seed < 2**63, "lie in 0..2**63 - 1"),
        }
        check_rules(self, rules)

    def _check_layers(self) -> None:
        if self.layers is not None:
            names = [self.layers] if isinstance(self.layers, str) else list(self.layers)
            if not names or not all(isinstance(name, str) and name for name in names):
                raise UsageError(
                    f"layers must be glob patterns of the names of parameters, such as ['fc*'], got {self.layers!r}"
                )
            object.__setattr__(self, "layers", names)

    @staticmethod
    def of(**options: Any) -> Recipe:
        """A recipe from keyword options."""
        check_known(Recipe, options)
        return Recipe(**options)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def shortens(self, perturbations: Iterable[Perturbation]) -> bool:
        """Whether attacks take fewer steps in training than in a search; if not, `attack_steps` has no effect."""
        from themis.perturb.attack import with_steps

        return self.fresh > 0 and any(with_steps(each, self.attack_steps) is not each for each in perturbations)

    def counts(self) -> tuple[int, int, int]:
        """Clean, stored disturbed and fresh disturbed inputs per batch; a mix inside (0, 1) has both kinds."""
        disturbed = round(self.mix * self.batch_size)
        if 0 < self.mix < 1:
            disturbed = min(max(disturbed, 1), self.batch_size - 1)
        fresh = round(self.fresh * disturbed)
        return self.batch_size - disturbed, disturbed - fresh, fresh

    def for_task(self, kind: str) -> Recipe:
        """With the options that depend on the task, unless they were given."""
        chosen = {name: value for name, value in task_defaults(kind).items() if getattr(self, name) is None}
        return replace(self, **chosen)

    @property
    def peak_rate(self) -> float:
        """The learning rate, which must have been chosen by the task if it was not given."""
        assert self.learning_rate is not None
        return self.learning_rate

    def rate(self, step: int, total: int) -> float:
        """The learning rate of a step, 0 to `total` - 1."""
        fall = (1 + math.cos(math.pi * step / max(total, 1))) / 2
        return self.peak_rate * (fall if self.schedule == "cosine" else 1)


RESUMABLE_OPTIONS = (*FRONTIER_OPTIONS, "rounds", "strengths")
"""Options that may differ when a retraining is resumed: they change no finished training. The last two are obsolete."""


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

    def __post_init__(self) -> None:
        for name in ("random_seeds", "draws", *([] if self.passes is None else ["passes"])):
            check_count(name, getattr(self, name))

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
