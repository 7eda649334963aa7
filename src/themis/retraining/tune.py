"""Tuning: a copy of the model is trained on its faults and on clean inputs; the weights of the best epoch are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.compute import rng
from themis.errors import ModelError, StoreError, first_line, warn
from themis.measure.captured import CaptureError
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.perturb.attack import with_steps
from themis.perturb.perturbation import check_fits
from themis.retraining.batches import Batches, TrainingBatch, hold_out
from themis.retraining.captured_step import Step, can_capture, capture
from themis.retraining.frontier import SHARES, CleanScore, FrontierPoint, HeldOut, choose_share, point_at
from themis.retraining.grading import Loss, choose_loss, distances, own_loss, picture_kind, settled_oracle
from themis.retraining.material import Material
from themis.retraining.recipe import Recipe
from themis.retraining.weights import (
    State,
    Weights,
    channels_last,
    check_trainable,
    choose_parameters,
    interpolate,
    load,
    put_weights,
    save,
    take_weights,
    trainable_copy,
    training_key,
)
from themis.target.ledger import Ledger, ledger_of, remember
from themis.target.target import Target

FOR_DROPOUT = 100
MAX_FIRST_FALL = 0.1
"""If the clean score on the held-out seeds falls by more in the first epoch, the learning rate is too high."""
LOWER_RATES = (0.1, 0.01)
"""Shares of the learning rate chosen by the task, which are tried in turn while the first epoch breaks the model."""


@dataclass(frozen=True)
class Epoch:
    """One epoch, measured on the held-out seeds; number 0 is the original model."""

    number: int
    clean: float
    """Score on clean inputs, 0..1."""
    disturbed: float
    loss: float
    """Mean of the clean and the disturbed loss."""
    training_loss: float | None
    learning_rate: float
    """The rate of its first step."""
    seconds: float

    @property
    def score(self) -> float:
        """The criterion of the best epoch: the mean of the clean and the disturbed score."""
        return (self.clean + self.disturbed) / 2


@dataclass(frozen=True)
class TrainedModel:
    """A copy of a model that was trained with one random seed, at a point of the way to the trained weights."""

    random_seed: int
    target: Target = field(repr=False)
    """The original target with a copy of its module."""
    ledger: Ledger = field(repr=False)
    """All seeds that were used, including those held out."""
    history: tuple[Epoch, ...] = field(repr=False)
    best_epoch: int
    frontier: tuple[FrontierPoint, ...] = field(repr=False)
    """Shares of the way to the weights of the best epoch, measured on the seeds that training held out."""
    share: float
    """The share of the way that the weights are at; 0 for those of the original model."""
    ends: tuple[Weights, Weights] = field(repr=False)
    """The weights at both ends of the frontier."""
    weights: Path | None = None

    @property
    def best(self) -> int:
        """The epoch that the weights are on the way to; 0 if they are those of the original model."""
        return self.best_epoch if self.share else 0

    @property
    def point(self) -> FrontierPoint:
        """The point of the frontier that the weights are at."""
        return point_at(self.frontier, self.share)

    @property
    def held_out(self) -> float:
        """The score on the seeds that training held out, clean and disturbed in equal parts."""
        return (self.point.clean + self.point.disturbed) / 2

    def at(self, share: float) -> TrainedModel:
        """The model with its weights moved to a share of the way, which changes the target's module."""
        put_weights(self.target.module, interpolate(*self.ends, share))
        return replace(self, share=share)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "random_seed": self.random_seed,
            "best_epoch": self.best,
            "share": self.share,
            "frontier": [asdict(point) for point in self.frontier],
            "held_out": self.held_out,
            "epochs": [asdict(epoch) for epoch in self.history],
            "weights": None if self.weights is None else str(self.weights),
        }


def tune(
    target: Target,
    material: Material,
    perturbation: Perturbation | Mapping[str, Perturbation],
    recipe: Recipe,
    *,
    folder: Path | None = None,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    fresh_from: Perturbation | None = None,
) -> TrainedModel:
    """Train a copy of the target's model, whose oracle defines the task; the original is not changed.

    perturbation: disturbs fresh inputs and held-out seeds; several have names. folder: for a checkpoint after each
    epoch, from which an interrupted training resumes to the same weights. on_epoch: called after each epoch.
    fresh_from: disturbs fresh inputs in place of the perturbation, which then disturbs held-out seeds only.
    """
    check_trainable(target)
    cases = {perturbation.name: perturbation} if isinstance(perturbation, Perturbation) else perturbation
    shape = tuple(material.pool.shape[1:])
    for case in cases.values():
        check_fits(case, shape)
    cases = {name: case.fitted(shape) for name, case in cases.items()}
    split = hold_out(material, recipe)
    ledger = Ledger(np.concatenate(material.hashes)).merge(Ledger.of(material.disturbed)).merge(ledger_of(target))
    oracle = settled_oracle(target, material.pool)
    is_given = recipe.learning_rate is not None  # a rate that the user chose stays
    recipe = recipe.for_task(picture_kind(oracle, material.pool))
    lower_rates = [] if is_given else [recipe.peak_rate * share for share in LOWER_RATES]
    key = training_key(target, material, cases, recipe, oracle, ledger)
    loss = choose_loss(oracle, material.loss, target.module)
    with trainable_copy(target) as trained, target.opened(), ExitStack() as stack:
        parameters = choose_parameters(trained.module, recipe.layers)
        for parameter in trained.module.parameters():
            parameter.requires_grad_(any(parameter is chosen for chosen in parameters))
        held_out = HeldOut(trained, material, split, cases, oracle, loss, recipe)
        if trained.device.type == "cuda" and picture_kind(oracle, material.pool):
            stack.enter_context(channels_last(trained.module, held_out.answer))
        sources = [with_steps(each, recipe.attack_steps) for each in ([fresh_from] if fresh_from else cases.values())]

        def begin(rate: float, state: State | None = None) -> _Training:
            own = replace(recipe, learning_rate=rate)
            batches = Batches(target, trained, material, split, sources, oracle, own)
            training = _Training(trained, parameters, batches, held_out, own, loss)
            training.start(state, folder)
            return training

        state = None if folder is None else load(folder, key)
        training = begin(recipe.peak_rate if state is None else state.get("learning_rate", recipe.peak_rate), state)
        for epoch in training.history:
            on_epoch(epoch)
        while training.has_epochs_left:
            is_first = len(training.history) == 1
            lower = next((rate for rate in lower_rates if is_first and rate < training.recipe.peak_rate), None)
            training.step(may_fail=lower is not None)
            if not (is_first and training.has_broken(lower)):
                lower = None
            if lower is None and folder is not None:
                save(folder, {"key": key, **training.state()})
            on_epoch(training.history[-1])
            if lower is not None:
                training.move(0.0)
                training = begin(lower)
        if training.measure_frontier() and folder is not None:
            save(folder, {"key": key, **training.state()})
        share = recipe.share
        if share is None:
            share = choose_share(training.frontier, recipe.tolerance, recipe.confidence)
        training.move(share)
        remember(trained.module, ledger)
    history, frontier, ends = training.history, training.frontier, (training.original, training.best_weights)
    return TrainedModel(
        recipe.random_seed, trained, ledger, tuple(history), training.best, tuple(frontier), share, ends
    )


class _Training:
    """The state of a training between two epochs."""

    def __init__(
        self,
        target: Target,
        parameters: list[nn.Parameter],
        batches: Batches,
        held_out: HeldOut,
        recipe: Recipe,
        loss: Loss | None,
    ) -> None:
        self.target, self.recipe, self.loss = target, recipe, loss
        self.batches, self.held_out = batches, held_out
        self.captures = can_capture(target.module, parameters)
        self.optimiser, self.parameters = _optimiser(recipe, parameters, self.captures), parameters
        self.sums = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        """The sum of each parameter over the steps of an epoch, and of the loss."""
        self.total = torch.zeros((), dtype=torch.float64, device=target.device)
        self._chosen_step: Step | None = None
        self.original = take_weights(target.module)
        self.history: list[Epoch] = []
        self.before: CleanScore
        """That of the original model, which is measured first."""
        self.frontier: list[FrontierPoint] = []
        """The original model, the trained one, and after the last epoch the points between them."""
        self.best, self.best_weights = 0, self.original

    @property
    def has_epochs_left(self) -> bool:
        last, patience = len(self.history) - 1, self.recipe.patience
        return last < self.recipe.epochs and (not last or patience is None or last - self.best < patience)

    def start(self, state: State | None, folder: Path | None) -> None:
        """Measure the original model as epoch 0, or resume from a state, which is in this folder."""
        start = perf_counter()
        if state is None:
            self.before = self.held_out.clean()
            self.frontier = [self.held_out.point(0.0, self.before, self.before)]
            self._add_epoch(self.frontier[0], None, 0.0, start)
        else:
            try:
                self._restore(state)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
                raise StoreError(
                    f"{folder} must hold the checkpoint of a training, but it is damaged ({first_line(error)}): remove "
                    "it to start again"
                ) from error
        self.batches.favour(self.before.errors)

    def step(self, may_fail: bool = False) -> None:
        """Train for one epoch and measure the result; the loss must be finite unless training `may_fail`."""
        start, number = perf_counter(), len(self.history)
        rate = self.recipe.rate((number - 1) * self.batches.n, self.recipe.epochs * self.batches.n)
        device = self.target.device
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):  # dropout draws from it
            torch.manual_seed(int(rng.mix(self.recipe.random_seed, FOR_DROPOUT, number)))
            training_loss, mean = self._train(number)
        if not (may_fail or math.isfinite(training_loss)):
            raise ModelError(
                f"the loss must be finite, but it was not in epoch {number}: lower learning_rate, now "
                f"{self.recipe.learning_rate}"
            )
        trained = [parameter.data.clone() for parameter in self.parameters]
        _set(self.parameters, mean)
        point, best = self.held_out.point(1.0, self.held_out.clean(), self.before), self.history[self.best]
        self._add_epoch(point, training_loss, rate, start)
        epoch = self.history[-1]
        if number == 1 or (epoch.score, -epoch.loss) > (best.score, -best.loss):
            self.best, self.best_weights = number, take_weights(self.target.module)
            self.frontier[1:] = [point]
        _set(self.parameters, trained)

    def _add_epoch(self, point: FrontierPoint, training_loss: float | None, rate: float, start: float) -> None:
        scores = point.clean, point.disturbed, point.loss
        self.history.append(Epoch(len(self.history), *scores, training_loss, rate, perf_counter() - start))

    def has_broken(self, lower: float | None) -> bool:
        """Whether the only epoch so far has broken the model; if so, warn, and name the lower rate that comes next."""
        before, first = self.history
        assert first.training_loss is not None  # only that of the original model is None
        if math.isfinite(first.training_loss) and before.clean - first.clean <= MAX_FIRST_FALL:
            return False
        remedy = "lower it" if lower is None else f"training begins again with {lower:g}"
        warn(
            f"with learning_rate {self.recipe.peak_rate:g}, the first epoch took the clean score on the held-out seeds "
            f"from {before.clean:.1%} to {first.clean:.1%}: {remedy}"
        )
        return True

    def measure_frontier(self) -> bool:
        """Measure missing shares of the way from the original weights to those of the best epoch, if there are any."""
        wanted = {*SHARES, *([] if self.recipe.share is None else [self.recipe.share])}
        missing = sorted(wanted - {point.share for point in self.frontier})
        for share in missing:
            self.move(share)
            self.frontier.append(self.held_out.point(share, self.held_out.clean(), self.before))
        self.frontier.sort(key=lambda point: point.share)
        return bool(missing)

    def move(self, share: float) -> None:
        """Set the weights to a share of the way from the original ones to those of the best epoch."""
        put_weights(self.target.module, interpolate(self.original, self.best_weights, share))

    def _train(self, number: int) -> tuple[float, list[Tensor]]:
        """Train for one epoch; returns the mean loss, and the mean of each parameter over the steps."""
        n = self.batches.n
        for total in (self.total, *self.sums):
            total.zero_()
        self.target.module.train()
        for submodule in self.target.module.modules():
            if isinstance(submodule, nn.modules.batchnorm._NormBase) and self.recipe.statistics == "keep":
                submodule.eval()
        for k, batch in enumerate(self.batches.epoch(number)):
            rate = self.recipe.rate((number - 1) * n + k, self.recipe.epochs * n)
            for group in self.optimiser.param_groups:
                if self.captures:
                    group["lr"].fill_(rate)  # where the graph finds it
                else:
                    group["lr"] = rate
            outputs = self._choose_step(batch)(batch)
            if self.loss is not None:
                self.batches.observe(outputs, batch.labels)
        self.target.module.eval()
        return float(self.total) / n, [total / n for total in self.sums]

    def _choose_step(self, batch: TrainingBatch) -> Step:
        """The training step: as a CUDA graph if it can be captured, which is decided with the first batch."""
        if self._chosen_step is None:
            self._chosen_step = self._step
            if self.captures:
                sums, device = [self.total, *self.sums], self.target.device
                with suppress(CaptureError):
                    self._chosen_step = capture(self._step, batch, self.target.module, self.optimiser, sums, device)
        return self._chosen_step

    def _step(self, batch: TrainingBatch) -> Tensor:
        """Train on one batch, in as many parts as the recipe says; returns the outputs."""
        n, recipe = len(batch.inputs), self.recipe
        size = -(-n // recipe.accumulate)
        answers = []
        self.optimiser.zero_grad()
        for first in range(0, n, size):
            part = batch.part(slice(first, first + size))
            with torch.autocast(self.target.device.type, torch.bfloat16, recipe.autocast, cache_enabled=False):
                if self.loss is None:
                    loss = own_loss(self.target, part.inputs, part.labels)
                else:
                    outputs = self.batches.seeds.forward(self.target, part.inputs, part.rows)
            if self.loss is not None:
                outputs = outputs.float() if recipe.autocast else outputs
                loss = mean_loss(self.loss, self.batches.oracle, outputs, part)
                answers.append(outputs.detach())
            loss = loss * (len(part.inputs) / n)
            loss.backward()  # type: ignore[no-untyped-call]
            self.total += loss.detach()
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_add_(self.sums, [parameter.detach() for parameter in self.parameters])
        return torch.cat(answers) if answers else batch.labels

    def state(self) -> State:
        """The state from which a training resumes."""
        return {
            "learning_rate": self.recipe.learning_rate,
            "weights": take_weights(self.target.module),
            "optimiser": self.optimiser.state_dict(),
            "history": [asdict(epoch) for epoch in self.history],
            "before": self.before._asdict(),
            "best": self.best,
            "best_weights": self.best_weights,
            "steering": self.batches.steering.state(),
            "frontier": [asdict(point) for point in self.frontier],
        }

    def _restore(self, state: State) -> None:
        put_weights(self.target.module, state["weights"])
        groups = self.optimiser.state_dict()["param_groups"]  # the stored ones may be those of another device
        self.optimiser.load_state_dict({**state["optimiser"], "param_groups": groups})
        for parameter, stored in self.optimiser.state.items():  # in the layout that parameters have on this device
            alike = {name: value for name, value in stored.items() if value.shape == parameter.shape}
            stored.update({name: torch.empty_like(parameter).copy_(value) for name, value in alike.items()})
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.before = CleanScore(**state["before"])
        self.best, self.best_weights = state["best"], state["best_weights"]
        self.batches.steering.restore(state["steering"])
        self.frontier = [FrontierPoint(**point) for point in state["frontier"]]


def mean_loss(loss: Loss, oracle: Oracle, outputs: Tensor, batch: TrainingBatch) -> Tensor:
    """The mean loss of a batch: from the labels, and from the old model's answers as far as they count."""
    each = loss(outputs, batch.labels)
    if not len(batch.answers):
        return each.mean()
    each = each if each.ndim < 2 else each.flatten(1).mean(1)
    distance = distances(oracle, outputs, batch.answers)
    return ((1 - batch.share) * each + batch.share * batch.factor * distance).mean()


def _set(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


def _optimiser(recipe: Recipe, parameters: list[nn.Parameter], captures: bool) -> torch.optim.Optimizer:
    """The recipe's optimiser; if its step is to be captured, its rate is a tensor, and so is all of its state."""
    rate: float | Tensor = recipe.peak_rate
    options: dict[str, Any] = {"weight_decay": recipe.weight_decay}
    if captures:
        rate = torch.tensor(rate, dtype=torch.float32, device=parameters[0].device)
        options["fused"] = True
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=0.9, nesterov=True, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, rate, capturable=captures, **options)
