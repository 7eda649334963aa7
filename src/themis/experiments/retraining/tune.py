"""Tuning: a copy of the model is trained on its faults and on clean inputs; the weights of the best epoch are kept."""

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
from themis.errors import ModelError, StoreError, first_line
from themis.experiments.retraining.batches import Batches, hold_out
from themis.experiments.retraining.checkpoint import State, load, put_weights, save, take_weights, training_key
from themis.experiments.retraining.copies import check_trainable, choose_parameters, trainable_copy
from themis.experiments.retraining.heldout import HeldOut
from themis.experiments.retraining.losses import Loss, choose_loss, name_loss
from themis.experiments.retraining.material import Material, clean_outputs
from themis.experiments.retraining.recipe import Recipe
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits
from themis.runs.weights import write_weights
from themis.target.ledger import Ledger, ledger_of, remember
from themis.target.target import Target

BEST = "best.safetensors"
"""The file of the best weights if a training fails."""
FOR_DROPOUT = 100
MOMENTUM = 0.9
SHARES = (1.0, 0.7, 0.5, 0.3)
"""Fractions of the recipe's share that are tried in turn, until the clean score holds."""


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
    share: float = 1.0
    """How far the weights are from the original ones towards the trained ones: less than 1 to keep the clean score."""
    is_kept: bool = True
    """Whether the clean score holds, on searched seeds and on clean seeds."""

    @property
    def score(self) -> float:
        """The criterion of the best epoch: the mean of the clean and the disturbed score."""
        return (self.clean + self.disturbed) / 2

    def is_better(self, other: Epoch) -> bool:
        """Whether its clean score holds and its score is higher, or the same with a lower loss."""
        return self.is_kept and (self.score, -self.loss) > (other.score, -other.loss)


@dataclass(frozen=True)
class Tuned:
    """A trained model. `target` is the original target with a copy of its module that has the best weights."""

    target: Target
    history: tuple[Epoch, ...]
    best: int
    """Number of the epoch whose weights it has; 0 for those of the original model."""
    ledger: Ledger
    """All seeds that were used, including those held out."""


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
    """Train a copy of the target's model; the original is not changed.

    perturbation: disturbs fresh inputs and held-out seeds. oracle: defines the task. folder: for a checkpoint after
    each epoch, from which an interrupted training resumes to the same weights. on_epoch: called after each epoch. loss:
    a function of outputs and labels that replaces the task's own.
    """
    report = on_epoch or (lambda epoch: None)
    check_trainable(target)
    check_fits(perturbation, material.pool.shape[1:])
    pool_hashes, clean_hashes = seed_hashes(material.pool), seed_hashes(material.clean)
    split = hold_out(material, (pool_hashes, clean_hashes), recipe)
    used = Ledger(np.union1d(pool_hashes, clean_hashes)).merge(Ledger.of(material.disturbed))
    ledger = used.merge(ledger_of(target))
    oracle = _settle(oracle, target, material)
    key = training_key(target, material, perturbation, recipe, oracle, ledger, "" if loss is None else name_loss(loss))
    loss = choose_loss(oracle, loss)
    with trainable_copy(target) as trained:
        parameters = choose_parameters(trained.module, recipe.layers)
        held_out = HeldOut(trained, material, split, perturbation, oracle, loss, recipe)
        batches = Batches(trained, material, split, perturbation, oracle, recipe)
        training = _Training(trained, parameters, batches, held_out, recipe, loss)
        state = None if folder is None else load(folder, key)
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
        while not training.is_done:
            try:
                training.step()
            except ModelError as error:
                raise _failure(error, training, folder, ledger) from error
            if folder is not None:
                save(folder, {"key": key, **training.state()})
            report(training.history[-1])
        put_weights(trained.module, training.best_weights)
        remember(trained.module, ledger)
    return Tuned(trained, tuple(training.history), training.best, ledger)


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
        self.target, self.batches, self.held_out, self.recipe, self.loss = target, batches, held_out, recipe, loss
        self.optimiser, self.parameters = _optimiser(recipe, parameters), parameters
        self.original = [parameter.detach().clone() for parameter in parameters]
        self.history: list[Epoch] = []
        self.before: tuple[float, ...] = ()
        self.best, self.best_weights = 0, take_weights(target.module)

    @property
    def is_done(self) -> bool:
        last, patience = len(self.history) - 1, self.recipe.patience
        return last >= self.recipe.epochs or (patience is not None and last - self.best >= patience)

    def measure_original(self) -> None:
        """Measure the original model as epoch 0."""
        start = perf_counter()
        clean, disturbed = self.held_out.clean(), self.held_out.disturbed()
        self.before = clean.part_scores
        loss = (clean.loss + disturbed.loss) / 2
        self.history.append(Epoch(0, clean.score, disturbed.score, loss, None, 0.0, perf_counter() - start))

    def step(self) -> None:
        """Train for one epoch and measure the result."""
        start, number = perf_counter(), len(self.history)
        rate = self.recipe.rate((number - 1) * self.batches.n, self.recipe.epochs * self.batches.n)
        with _torch_seed(int(rng.mix(self.recipe.random_seed, FOR_DROPOUT, number)), self.target.device):
            training_loss, mean = self._train(number)
        shares = self._shares()
        for share in shares:
            with _temporarily(self.parameters, list(torch._foreach_lerp(self.original, mean, share))):
                clean = self.held_out.clean()
                is_kept = self._is_kept(clean.part_scores)
                if not is_kept and share != shares[-1]:
                    continue
                disturbed = self.held_out.disturbed()
                loss, seconds = (clean.loss + disturbed.loss) / 2, perf_counter() - start
                epoch = Epoch(number, clean.score, disturbed.score, loss, training_loss, rate, seconds, share, is_kept)
                if epoch.is_better(self.history[self.best]):
                    self.best, self.best_weights = number, take_weights(self.target.module)
                break
        self.history.append(epoch)

    def _shares(self) -> list[float]:
        if self.recipe.statistics == "update":  # interpolated statistics would fit neither model
            return [1.0]
        return [share * self.recipe.share for share in (SHARES if self.recipe.keep_clean is not None else SHARES[:1])]

    def _is_kept(self, clean: tuple[float, ...]) -> bool:
        """Whether the clean score holds on searched seeds and on clean seeds separately."""
        max_loss = self.recipe.keep_clean
        return max_loss is None or all(
            now >= then - max_loss - 1e-9 for now, then in zip(clean, self.before, strict=True)
        )

    def _train(self, number: int) -> tuple[float, list[Tensor]]:
        """Train for one epoch; returns the mean loss, and the mean of each parameter over the steps."""
        sums = [torch.zeros_like(parameter) for parameter in self.parameters]
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
                torch._foreach_add_(sums, [parameter.detach() for parameter in self.parameters])
        self.target.module.eval()
        mean = float(total) / n
        if not math.isfinite(mean):
            starts_low = self.recipe.schedule == "one-cycle"
            raise ModelError(
                f"the loss must be finite, but it was not in epoch {number}: lower learning_rate, now "
                f"{self.recipe.learning_rate:g}{'' if starts_low else ', or use schedule one-cycle, which starts low'}"
            )
        return mean, [total / n for total in sums]

    def state(self) -> State:
        """The state from which a training resumes."""
        return {
            "weights": take_weights(self.target.module),
            "optimiser": self.optimiser.state_dict(),
            "history": [asdict(epoch) for epoch in self.history],
            "before": list(self.before),
            "best": self.best,
            "best_weights": self.best_weights,
        }

    def restore(self, state: State) -> None:
        """Resume from a state."""
        put_weights(self.target.module, state["weights"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.before = tuple(state["before"])
        self.best, self.best_weights = state["best"], state["best_weights"]


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


def _optimiser(recipe: Recipe, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(parameters, rate, momentum=MOMENTUM, nesterov=True, weight_decay=decay)
    kind = torch.optim.Adam if recipe.optimiser == "adam" else torch.optim.AdamW
    return kind(parameters, rate, weight_decay=decay)


@contextmanager
def _torch_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator, which dropout draws from, and restore it on exit."""
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        yield


def _settle(oracle: Oracle, target: Target, material: Material) -> Oracle:
    """The oracle, settled on the clean outputs of the pool unless it already is."""
    is_unsettled = oracle.spec() == "auto" or (
        getattr(oracle, "tolerance", 0) is None or getattr(oracle, "threshold", 0) is None
    )
    if not is_unsettled:
        return oracle
    with target.opened(), torch.no_grad():
        outputs = clean_outputs(material.pool, target)
    labels = material.pool.labels
    return oracle.settle(outputs, None if labels is None else labels.to(outputs.device))


def _failure(error: ModelError, training: _Training, folder: Path | None, ledger: Ledger) -> ModelError:
    """The error, extended by where the best weights are."""
    if folder is None:
        return ModelError(f"{error}; pass folder=... to keep the best weights found so far")
    put_weights(training.target.module, training.best_weights)
    folder.mkdir(parents=True, exist_ok=True)
    write_weights(folder / BEST, training.target.module, ledger, {"epoch": str(training.best)})
    return ModelError(f"{error}; the best weights (epoch {training.best}) are in {folder / BEST}")
