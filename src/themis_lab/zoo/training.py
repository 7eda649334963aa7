"""Training an entry according to its recipe."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from themis.errors import DataError, UsageError
from themis.target.target import Target
from themis_lab.zoo.loading import MeasuredFigure, build, choose_entry, data, folder_of, measure, move

if TYPE_CHECKING:
    from themis.data import Seeds
    from themis_lab.zoo.entry import Entry, TrainingRecipe

Log = Callable[[str], None]


def train(
    name: str,
    *,
    epochs: int | None = None,
    random_seed: int = 0,
    device: str | None = None,
    log: Log = lambda text: None,
) -> tuple[nn.Module, MeasuredFigure]:
    """Train an entry from scratch; returns the net, on the CPU, and its accuracy or error on the test data."""
    entry = choose_entry(name)
    recipe = entry.recipe
    if recipe is None:
        raise UsageError(f"the zoo has no training data for {name}, only test pictures: train it elsewhere")
    epochs = recipe.epochs if epochs is None else epochs
    if epochs < 1:
        raise UsageError(f"epochs must be 1 or more, got {epochs}")
    seeds = data(name, "train").in_memory()
    if len(seeds) < recipe.batch:
        raise DataError(f"the training data must hold at least one batch of {recipe.batch} inputs, got {len(seeds)}")
    module = build(entry, random_seed)
    move(module, device)
    preprocess = entry.normalise if entry.fit is None else entry.fit(folder_of(entry))
    log(f"{entry.title}: {len(seeds):,} inputs, epochs: {epochs}, batches of {recipe.batch}")
    _fit(entry, recipe, module, preprocess, seeds, epochs, random_seed, log)
    figure = measure(entry, Target(module, entry.bounds, preprocess), data(name))
    return module.cpu(), figure


def _fit(
    entry: Entry,
    recipe: TrainingRecipe,
    module: nn.Module,
    preprocess: Callable[[Tensor], Tensor] | None,
    seeds: Seeds,
    epochs: int,
    random_seed: int,
    log: Log,
) -> None:
    assert seeds.labels is not None  # the zoo's data has them
    rng = torch.Generator().manual_seed(random_seed)
    device = next(module.parameters()).device
    n_batches = len(seeds) // recipe.batch  # a smaller last batch would disturb the batch normalisation
    optimiser = _optimiser(recipe, module)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.max_rate, total_steps=epochs * n_batches)
    module.train()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(random_seed)  # for dropout
        for epoch in range(1, epochs + 1):
            start, total = perf_counter(), 0.0
            for rows in torch.randperm(len(seeds), generator=rng)[: n_batches * recipe.batch].view(n_batches, -1):
                inputs, labels = seeds.take(rows).to(device), seeds.labels[rows].to(device)
                if recipe.augment is not None:
                    inputs, labels = recipe.augment(inputs, labels, rng)
                outputs = module(inputs if preprocess is None else preprocess(inputs))
                optimiser.zero_grad()
                loss = _loss(entry, recipe, outputs, labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
                total += float(loss.detach())
            log(f"epoch {epoch} of {epochs}: loss {total / n_batches:.4f}, {perf_counter() - start:.1f} s")
    module.eval()


def _optimiser(recipe: TrainingRecipe, module: nn.Module) -> torch.optim.Optimizer:
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(
            module.parameters(), recipe.max_rate, momentum=0.9, nesterov=True, weight_decay=recipe.weight_decay
        )
    return torch.optim.Adam(module.parameters(), recipe.max_rate, weight_decay=recipe.weight_decay)


def _loss(entry: Entry, recipe: TrainingRecipe, outputs: Tensor, labels: Tensor) -> Tensor:
    if entry.metric == "mse":
        return F.mse_loss(outputs.squeeze(1), labels)
    return F.cross_entropy(outputs, labels, label_smoothing=recipe.label_smoothing)
