"""Tuning: a copy of the model is trained on its faults and on clean inputs; the weights of the best epoch are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.compute import rng
from themis.data.groups import seed_hashes
from themis.errors import ModelError, StoreError, first_line, warn
from themis.measure.captured import CaptureError
from themis.oracle import Changed, Oracle, Regression, Wrong
from themis.perturb import Perturbation
from themis.perturb.attack import in_steps
from themis.perturb.perturbation import check_fits
from themis.retraining.batches import (
    Batches,
    HeldOut,
    HeldOutScore,
    TrainingBatch,
    hold_out,
    show_classes,
    show_numbers,
)
from themis.retraining.captured_step import Step, can_capture, capture
from themis.retraining.checkpoint import State, load, put_weights, save, take_weights, training_key
from themis.retraining.copies import check_trainable, choose_parameters, trainable_copy
from themis.retraining.frontier import SHARES, FrontierPoint, choose_point, measure_falls, with_losses
from themis.retraining.grading import Loss, choose_loss, distances, settled_oracle
from themis.retraining.material import Material
from themis.retraining.recipe import Recipe
from themis.runs.store.tensors import write_weights
from themis.target.ledger import Ledger, ledger_of, remember
from themis.target.target import Target

BEST_FILE = "best.safetensors"
"""The file of the best weights if a training fails."""
FOR_DROPOUT = 100
MOMENTUM = 0.9
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

    def is_better(self, other: Epoch) -> bool:
        """Whether its score is higher, or the same with a lower loss."""
        return (self.score, -self.loss) > (other.score, -other.loss)


@dataclass(frozen=True)
class Tuned:
    """A trained model. `target` is the original target with a copy of its module that has the chosen weights."""

    target: Target
    history: tuple[Epoch, ...]
    best: int
    """Number of the epoch that its weights are on the way to; 0 if they are those of the original model."""
    frontier: tuple[FrontierPoint, ...]
    chosen: int
    """The index of the point of the frontier that the weights are at; 0 for those of the original model."""
    ledger: Ledger
    """All seeds that were used, including those held out."""
    ends: tuple[dict[str, Tensor], dict[str, Tensor]] = field(repr=False)
    """The weights at both ends of the frontier."""


def tune(
    target: Target,
    material: Material,
    perturbation: Perturbation | Mapping[str, Perturbation],
    recipe: Recipe,
    *,
    folder: Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    fresh_from: Perturbation | None = None,
) -> Tuned:
    """Train a copy of the target's model, whose oracle defines the task; the original is not changed.

    perturbation: disturbs fresh inputs and held-out seeds; several have names. folder: for a checkpoint after each
    epoch, from which an interrupted training resumes to the same weights. on_epoch: called after each epoch.
    fresh_from: disturbs fresh inputs in place of the perturbation, which then disturbs held-out seeds only.
    """
    report = on_epoch or (lambda epoch: None)
    check_trainable(target)
    if isinstance(perturbation, Perturbation):
        perturbation = {perturbation.name: perturbation}
    shape = tuple(material.pool.shape[1:])
    for case in perturbation.values():
        check_fits(case, shape)
    perturbations = {name: case.fitted(shape) for name, case in perturbation.items()}
    pool_hashes, clean_hashes = seed_hashes(material.pool), seed_hashes(material.clean)
    split = hold_out(material, (pool_hashes, clean_hashes), recipe, material.groups)
    used = Ledger(np.union1d(pool_hashes, clean_hashes)).merge(Ledger.of(material.disturbed))
    ledger = used.merge(ledger_of(target))
    oracle = settled_oracle(target, material.pool)
    shares = LOWER_RATES if recipe.learning_rate is None else ()
    recipe = recipe.for_task(show_classes(oracle, material.pool), show_numbers(oracle, material.pool))
    rate = _rate(recipe)
    lower_rates = [rate * share for share in shares]
    key = training_key(target, material, perturbations, recipe, oracle, ledger)
    loss = choose_loss(oracle, material.loss)
    with trainable_copy(target) as trained, target.opened():
        parameters = choose_parameters(trained.module, recipe.layers)
        held_out = HeldOut(trained, material, split, perturbations, oracle, loss, recipe)
        sources = list(perturbations.values()) if fresh_from is None else [fresh_from]
        sources = [in_steps(source, recipe.attack_steps) for source in sources]

        def begin(rate: float) -> _Training:
            own = replace(recipe, learning_rate=rate)
            batches = Batches(target, trained, material, split, sources, oracle, own)
            return _Training(trained, parameters, batches, held_out, own, loss)

        state = None if folder is None else load(folder, key)
        training = begin(rate if state is None else state.get("learning_rate", rate))
        if state is not None:
            try:
                training.restore(state)
            except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
                raise StoreError(
                    f"{folder} must hold the checkpoint of a training, but it is damaged ({first_line(error)}): remove "
                    "it to start again"
                ) from error
        else:
            training.measure_original()
        for epoch in training.history:
            report(epoch)
        while training.has_epochs_left:
            try:
                training.step()
            except ModelError as error:
                raise _failure(error, training, folder, ledger) from error
            lower = training.find_lower(lower_rates)
            if lower is not None:
                report(training.history[-1])
                training.move(0.0)
                training = begin(lower)
                training.measure_original()
                continue
            if folder is not None:
                save(folder, {"key": key, **training.state()})
            report(training.history[-1])
        if training.measure_frontier() and folder is not None:
            save(folder, {"key": key, **training.state()})
        chosen = training.choose()
        training.move(training.frontier[chosen].share)
        remember(trained.module, ledger)
    best = training.best if chosen else 0
    ends = (training.original, training.best_weights)
    return Tuned(trained, tuple(training.history), best, tuple(training.frontier), chosen, ledger, ends)


class _Training:
    """The state of a training between two epochs."""

    def __init__(
        self,
        target: Target,
        parameters: list[nn.Parameter],
        batches: Batches,
        held_out: HeldOut,
        recipe: Recipe,
        loss: Loss,
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
        self.before = HeldOutScore(0.0, 0.0, ())
        self.frontier: list[FrontierPoint] = []
        self.best, self.best_weights = 0, self.original

    @property
    def has_epochs_left(self) -> bool:
        last, patience = len(self.history) - 1, self.recipe.patience
        return last < self.recipe.epochs and (not last or patience is None or last - self.best < patience)

    def measure_original(self) -> None:
        """Measure the original model as epoch 0."""
        start = perf_counter()
        self.before = self.held_out.clean()
        self.batches.favour(self.before.grades)
        point = self._measure(0.0)
        self.history.append(Epoch(0, point.clean, point.disturbed, point.loss, None, 0.0, perf_counter() - start))

    def step(self) -> None:
        """Train for one epoch and measure the result."""
        start, number = perf_counter(), len(self.history)
        rate = self.recipe.rate((number - 1) * self.batches.n, self.recipe.epochs * self.batches.n)
        with _torch_seed(int(rng.mix(self.recipe.random_seed, FOR_DROPOUT, number)), self.target.device):
            training_loss, mean = self._train(number)
        with _temporarily(self.parameters, mean):
            point = self._measure(1.0)
            seconds = perf_counter() - start
            epoch = Epoch(number, point.clean, point.disturbed, point.loss, training_loss, rate, seconds)
            if number == 1 or epoch.is_better(self.history[self.best]):
                self.best, self.best_weights = number, take_weights(self.target.module)
        self.history.append(epoch)

    def find_lower(self, rates: Sequence[float]) -> float | None:
        """The rate among `rates` to begin again with if the first epoch has broken the model; None to go on.

        Warns of a broken model, whether or not there is a lower rate.
        """
        before, *epochs = self.history
        if len(epochs) != 1 or before.clean - epochs[0].clean <= MAX_FIRST_FALL:
            return None
        rate = _rate(self.recipe)
        lower = max((other for other in rates if other < rate), default=None)
        remedy = "lower it" if lower is None else f"training begins again with {lower:g}"
        warn(
            f"with learning_rate {rate:g}, the first epoch took the clean score on the held-out seeds from "
            f"{before.clean:.1%} to {epochs[0].clean:.1%}: {remedy}"
        )
        return lower

    def measure_frontier(self) -> bool:
        """Measure missing shares of the way from the original weights to those of the best epoch, if there are any."""
        wanted = {*SHARES, *([] if self.recipe.share is None else [self.recipe.share])}
        missing = sorted(wanted - {point.share for point in self.frontier})
        for share in missing:
            self.move(share)
            self.frontier.append(self._measure(share))
        self.frontier = list(with_losses(sorted(self.frontier, key=lambda point: point.share)))
        return bool(missing)

    def choose(self) -> int:
        """The index of the point of the frontier that the recipe asks for."""
        if self.recipe.share is None:
            return choose_point(self.frontier, self.recipe.tolerance)
        return [point.share for point in self.frontier].index(self.recipe.share)

    def move(self, share: float) -> None:
        """Set the weights to a share of the way from the original ones to those of the best epoch."""
        put_weights(self.target.module, interpolate(self.original, self.best_weights, share))

    def _measure(self, share: float) -> FrontierPoint:
        clean, disturbed = self.held_out.clean(), self.held_out.disturbed()
        scores = {name: case.score for name, case in disturbed.items()}
        loss = (clean.loss + fmean(case.loss for case in disturbed.values())) / 2
        falls = measure_falls(self.before, clean)
        return FrontierPoint(share, clean.score, fmean(scores.values()), scores, loss, falls)

    def _train(self, number: int) -> tuple[float, list[Tensor]]:
        """Train for one epoch; returns the mean loss, and the mean of each parameter over the steps."""
        n = self.batches.n
        for total in (self.total, *self.sums):
            total.zero_()
        _training_mode(self.target.module, self.recipe.statistics == "update")
        for k, batch in enumerate(self.batches.epoch(number)):
            self._set_rate(self.recipe.rate((number - 1) * n + k, self.recipe.epochs * n))
            self.batches.observe(self._choose_step(batch)(batch), batch.labels)
        self.target.module.eval()
        mean = float(self.total) / n
        if not math.isfinite(mean):
            starts_low = self.recipe.schedule == "one-cycle"
            raise ModelError(
                f"the loss must be finite, but it was not in epoch {number}: lower learning_rate, now "
                f"{self.recipe.learning_rate}{'' if starts_low else ', or use schedule one-cycle, which starts low'}"
            )
        return mean, [total / n for total in self.sums]

    def _set_rate(self, rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # where the graph finds it
            else:
                group["lr"] = rate

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
            part = batch.rows(slice(first, first + size))
            with torch.autocast(self.target.device.type, torch.bfloat16, recipe.autocast, cache_enabled=False):
                outputs = self.target.forward(part.inputs)
            outputs = outputs.float() if recipe.autocast else outputs
            loss = mean_loss(self.loss, self.batches.oracle, outputs, part) * (len(part.inputs) / n)
            loss.backward()  # type: ignore[no-untyped-call]
            self.total += loss.detach()
            answers.append(outputs.detach())
        self.optimiser.step()
        with torch.no_grad():
            torch._foreach_add_(self.sums, [parameter.detach() for parameter in self.parameters])
        return torch.cat(answers)

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

    def restore(self, state: State) -> None:
        """Resume from a state."""
        put_weights(self.target.module, state["weights"])
        groups = self.optimiser.state_dict()["param_groups"]  # the stored ones may be those of another device
        self.optimiser.load_state_dict({**state["optimiser"], "param_groups": groups})
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.before = HeldOutScore(**state["before"])
        self.batches.favour(self.before.grades)
        self.best, self.best_weights = state["best"], state["best_weights"]
        self.batches.steering.restore(state["steering"])
        self.frontier = [FrontierPoint(**point) for point in state["frontier"]]


def mean_loss(loss: Loss, oracle: Oracle, outputs: Tensor, batch: TrainingBatch) -> Tensor:
    """The mean loss of a batch: from the labels, and from the old model's answers as far as they count."""
    each = loss(outputs, batch.labels)
    if not len(batch.answers):
        return each.mean()
    assert isinstance(oracle, Changed | Wrong | Regression)  # otherwise answers do not count
    each = each if each.ndim < 2 else each.flatten(1).mean(1)
    distance = distances(oracle, outputs, batch.answers)
    return ((1 - batch.share) * each + batch.share * batch.factor * distance).mean()


def interpolate(old: dict[str, Tensor], new: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """Weights a share of the way from old to new ones; whole numbers, such as counts of batches, are the new ones."""
    if share in (0, 1):
        return old if share == 0 else new
    return {
        name: torch.lerp(old[name], tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


@contextmanager
def _temporarily(parameters: list[nn.Parameter], values: list[Tensor]) -> Iterator[None]:
    """Set parameters to other values and restore them on exit."""
    saved = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, data in zip(parameters, saved, strict=True):
            parameter.data = data


def _training_mode(module: nn.Module, updates_statistics: bool) -> None:
    module.train()
    for submodule in module.modules():
        if isinstance(submodule, nn.modules.batchnorm._NormBase) and not updates_statistics:
            submodule.eval()


def _rate(recipe: Recipe) -> float:
    assert recipe.learning_rate is not None  # it is chosen by the task
    return recipe.learning_rate


def _optimiser(recipe: Recipe, parameters: list[nn.Parameter], captures: bool) -> torch.optim.Optimizer:
    """The recipe's optimiser; if its step is to be captured, its rate is a tensor, and so is all of its state."""
    rate: float | Tensor = _rate(recipe)
    options: dict[str, Any] = {"weight_decay": recipe.weight_decay}
    if captures:
        rate = torch.tensor(rate, dtype=torch.float32, device=parameters[0].device)
        options["fused"] = True
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=MOMENTUM, nesterov=True, **options)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, rate, capturable=captures, **options)


@contextmanager
def _torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator, which dropout draws from, and restore it on exit."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def _failure(error: ModelError, training: _Training, folder: Path | None, ledger: Ledger) -> ModelError:
    """The error, extended by where the best weights are."""
    if folder is None:
        return ModelError(f"{error}; pass folder=... to keep the best weights found so far")
    put_weights(training.target.module, training.best_weights)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / BEST_FILE, training.target.module, ledger, {"epoch": str(training.best)})
    return ModelError(f"{error}; the best weights (epoch {training.best}) are in {folder / BEST_FILE}")
