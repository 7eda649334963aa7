"""Tuning: a copy of the model is trained on its faults and on clean inputs; the best epoch's weights are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn

from themis.compute import rng
from themis.data.hashes import seed_hashes
from themis.errors import ModelError
from themis.experiments.retraining.batches import Batches, hold_out
from themis.experiments.retraining.checkpoint import State, load, put_weights, save, take_weights, training_key
from themis.experiments.retraining.copies import check_trainable, choose_parameters, copied
from themis.experiments.retraining.heldout import HeldOut
from themis.experiments.retraining.losses import Loss, choose_loss, name_loss
from themis.experiments.retraining.material import Material, answers
from themis.experiments.retraining.recipe import Recipe
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits
from themis.runs.weights import write_weights
from themis.target.ledger import Ledger, ledger_of, remember
from themis.target.target import Target

BEST = "best.safetensors"
"""Where the best weights go when a training fails."""
FOR_DROPOUT = 100
MOMENTUM = 0.9
SHARES = (1.0, 0.7, 0.5, 0.3)
"""Of the recipe's share, how far towards the trained weights is gone: the first at which the clean score holds."""


@dataclass(frozen=True)
class Epoch:
    """One epoch, measured on the seeds held out; number 0 is the untouched model."""

    number: int
    clean: float
    """Score on clean inputs, 0..1."""
    disturbed: float
    loss: float
    """Mean of the clean and the disturbed one."""
    training_loss: float | None
    learning_rate: float
    """Of its first step."""
    seconds: float
    share: float = 1.0
    """Of the way from the untouched weights to the trained ones: less than all where the clean score would fall."""
    is_kept: bool = True
    """Whether the clean score holds, of searched seeds and of clean ones."""

    @property
    def score(self) -> float:
        """What the best epoch has most of: clean and disturbed count alike."""
        return (self.clean + self.disturbed) / 2

    def is_better(self, other: Epoch) -> bool:
        """Whether its clean score holds and its score is higher, or the same with a lower loss."""
        return self.is_kept and (self.score, -self.loss) > (other.score, -other.loss)


@dataclass(frozen=True)
class Tuned:
    """A model that was trained. `target` is as the one given, around a copy of its module with the best weights."""

    target: Target
    history: tuple[Epoch, ...]
    best: int
    """Number of the epoch whose weights it has; 0 is the untouched model's."""
    ledger: Ledger
    """All seeds that were seen, those held out included."""


def tune(
    target: Target,
    material: Material,
    perturbation: Perturbation,
    recipe: Recipe,
    *,
    oracle: Oracle,
    folder: Path | None = None,
    on_epoch: Callable[[Epoch], None] | None = None,
    loss: Loss | None = None,
) -> Tuned:
    """Train a copy of the target's model; the one given is left as it is.

    perturbation: what fresh inputs, and the seeds held out, are disturbed by. oracle: the task. folder: where a
    checkpoint is kept after each epoch; a training that was stopped goes on from it to the same weights. on_epoch: told
    of each epoch. loss: of outputs and labels, in place of the task's own.
    """
    tell = on_epoch or (lambda epoch: None)
    check_trainable(target)
    check_fits(perturbation, material.pool.shape[1:])
    of_pool, of_clean = seed_hashes(material.pool), seed_hashes(material.clean)
    split = hold_out(material, (of_pool, of_clean), recipe)
    seen = Ledger(np.union1d(of_pool, of_clean)).merge(Ledger.of(material.disturbed))
    ledger = seen.merge(ledger_of(target))
    oracle = _settled(oracle, target, material)
    key = training_key(target, material, perturbation, recipe, oracle, ledger, "" if loss is None else name_loss(loss))
    loss = choose_loss(oracle, loss)
    with copied(target) as trained:
        chosen = choose_parameters(trained.module, recipe.layers)
        held_out = HeldOut(trained, material, split, perturbation, oracle, loss, recipe)
        batches = Batches(trained, material, split, perturbation, oracle, recipe)
        training = _Training(trained, chosen, batches, held_out, recipe, loss)
        state = None if folder is None else load(folder, key)
        if state is not None:
            training.restore(state)
        else:
            training.begin()
        for epoch in training.history:
            tell(epoch)
        while not training.is_done:
            try:
                training.step()
            except ModelError as error:
                raise _failure(error, training, folder, ledger) from error
            if folder is not None:
                save(folder, {"key": key, **training.state()})
            tell(training.history[-1])
        put_weights(trained.module, training.best_weights)
        remember(trained.module, ledger)
    return Tuned(trained, tuple(training.history), training.best, ledger)


class _Training:
    """A training between two epochs."""

    def __init__(
        self,
        target: Target,
        parameters: list[nn.Parameter],
        batches: Batches,
        held_out: HeldOut,
        recipe: Recipe,
        loss: Loss,
    ) -> None:
        self.target, self.batches, self.held_out, self.recipe, self.loss = target, batches, held_out, recipe, loss
        self.optimiser, self.parameters = _optimiser(recipe, parameters), parameters
        self.start = [each.detach().clone() for each in parameters]
        self.history: list[Epoch] = []
        self.before: tuple[float, ...] = ()
        self.best, self.best_weights = 0, take_weights(target.module)

    @property
    def is_done(self) -> bool:
        last, patience = len(self.history) - 1, self.recipe.patience
        return last >= self.recipe.epochs or (patience is not None and last - self.best >= patience)

    def begin(self) -> None:
        """Measure the untouched model."""
        began = perf_counter()
        clean, disturbed = self.held_out.clean(), self.held_out.disturbed()
        self.before = clean.of_parts
        loss = (clean.loss + disturbed.loss) / 2
        self.history.append(Epoch(0, clean.score, disturbed.score, loss, None, 0.0, perf_counter() - began))

    def step(self) -> None:
        """Train for an epoch and measure what came of it."""
        began, number = perf_counter(), len(self.history)
        rate = self.recipe.rate((number - 1) * self.batches.n, self.recipe.epochs * self.batches.n)
        with _drawing_from(int(rng.mix(self.recipe.random_seed, FOR_DROPOUT, number)), self.target.device):
            training_loss, mean = self._train(number)
        shares = self._shares()
        for share in shares:
            with _in_place(self.parameters, list(torch._foreach_lerp(self.start, mean, share))):
                clean = self.held_out.clean()
                is_kept = self._is_kept(clean.of_parts)
                if not is_kept and share != shares[-1]:
                    continue
                disturbed = self.held_out.disturbed()
                loss, seconds = (clean.loss + disturbed.loss) / 2, perf_counter() - began
                epoch = Epoch(number, clean.score, disturbed.score, loss, training_loss, rate, seconds, share, is_kept)
                if epoch.is_better(self.history[self.best]):
                    self.best, self.best_weights = number, take_weights(self.target.module)
                break
        self.history.append(epoch)

    def _shares(self) -> list[float]:
        if self.recipe.statistics == "update":  # statistics half of the way are those of no model
            return [1.0]
        return [each * self.recipe.share for each in (SHARES if self.recipe.keep_clean is not None else SHARES[:1])]

    def _is_kept(self, clean: tuple[float, ...]) -> bool:
        """Whether the clean score holds on searched seeds and on clean ones, each by itself."""
        most = self.recipe.keep_clean
        return most is None or all(now >= then - most - 1e-9 for now, then in zip(clean, self.before, strict=True))

    def _train(self, number: int) -> tuple[float, list[Tensor]]:
        """The mean loss of an epoch, and the mean over its steps of each parameter."""
        sums = [torch.zeros_like(each) for each in self.parameters]
        n, total = self.batches.n, torch.zeros((), dtype=torch.float64, device=self.target.device)
        _training_mode(self.target.module, self.recipe.statistics == "update")
        for k, (inputs, labels) in enumerate(self.batches.epoch(number)):
            for group in self.optimiser.param_groups:
                group["lr"] = self.recipe.rate((number - 1) * n + k, self.recipe.epochs * n)
            loss = self.loss(self.target.forward(inputs), labels).mean()
            self.optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimiser.step()
            total += loss.detach()
            with torch.no_grad():
                torch._foreach_add_(sums, [each.detach() for each in self.parameters])
        self.target.module.eval()
        mean = float(total) / n
        if not math.isfinite(mean):
            is_low = self.recipe.schedule == "one-cycle"
            raise ModelError(
                f"the loss must be finite, it was not in epoch {number}: lower learning_rate, now "
                f"{self.recipe.learning_rate:g}{'' if is_low else ', or take schedule one-cycle, which begins low'}"
            )
        return mean, [each / n for each in sums]

    def state(self) -> State:
        """All that a training goes on from."""
        return {
            "weights": take_weights(self.target.module),
            "optimiser": self.optimiser.state_dict(),
            "history": [asdict(each) for each in self.history],
            "before": list(self.before),
            "best": self.best,
            "best_weights": self.best_weights,
        }

    def restore(self, state: State) -> None:
        """Go on from a state."""
        put_weights(self.target.module, state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.history = [Epoch(**each) for each in state["history"]]
        self.before = tuple(state["before"])
        self.best, self.best_weights = state["best"], state["best_weights"]


@contextmanager
def _in_place(parameters: list[nn.Parameter], others: list[Tensor]) -> Iterator[None]:
    """Other values in the place of parameters, for a while."""
    own = [each.data for each in parameters]
    for each, other in zip(parameters, others, strict=True):
        each.data = other
    try:
        yield
    finally:
        for each, data in zip(parameters, own, strict=True):
            each.data = data


def _training_mode(module: nn.Module, updates_statistics: bool) -> None:
    module.train()
    for each in module.modules():
        if isinstance(each, nn.modules.batchnorm._NormBase) and not updates_statistics:
            each.eval()


def _optimiser(recipe: Recipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=MOMENTUM, nesterov=True, weight_decay=decay)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, rate, weight_decay=decay)


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    """What draws from torch's own generator, as dropout, draws from this seed; the generator is left as it was."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def _settled(oracle: Oracle, target: Target, material: Material) -> Oracle:
    """The oracle as it is, or settled by the clean seeds where that was not done."""
    is_open = oracle.spec() == "auto" or (
        getattr(oracle, "tolerance", 0) is None or getattr(oracle, "threshold", 0) is None
    )
    if not is_open:
        return oracle
    with target.opened(), torch.no_grad():
        outputs = answers(material.pool, target)
    labels = material.pool.labels
    return oracle.settle(outputs, None if labels is None else labels.to(outputs.device))


def _failure(error: ModelError, training: _Training, folder: Path | None, ledger: Ledger) -> ModelError:
    """The error with where the best weights are."""
    if folder is None:
        return ModelError(f"{error}; pass folder=... to keep the best weights until then")
    put_weights(training.target.module, training.best_weights)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / BEST, training.target.module, ledger, {"epoch": str(training.best)})
    return ModelError(f"{error}; the best weights, of epoch {training.best}, are in {folder / BEST}")
