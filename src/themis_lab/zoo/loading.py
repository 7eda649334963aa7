"""Targets and data of the zoo's entries, training, and comparison with published accuracy."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from themis.data import Seeds
from themis.errors import DataError, UsageError, nearest, warn
from themis.target.activations import Granularity
from themis.target.loaders import Trust, load_weights
from themis.target.target import Target
from themis_lab.zoo.datasets import data_folder
from themis_lab.zoo.table import ZOO, Entry

if TYPE_CHECKING:
    from themis.data import Seeds
    from themis_lab.zoo.table import Entry, TrainingRecipe


RANDOM_SEED = 0
"""Seed of random weights, so that they are the same in every process."""
MEASURING_BATCH = 100


@dataclass(frozen=True)
class MeasuredFigure:
    """The accuracy or error of an entry on its test data."""

    entry: Entry
    measured: float
    n_inputs: int

    @property
    def agrees(self) -> bool | None:
        """Whether it agrees with the published figure within its tolerance; None if there is none."""
        stated = self.entry.stated
        return None if stated is None else abs(self.measured - stated.value) <= stated.tolerance + 1e-9


def choose_entry(name: str) -> Entry:
    """The entry called `name`."""
    if name not in ZOO:
        raise UsageError(f"the zoo has no model {name!r}: {nearest(name, ZOO)}")
    return ZOO[name]


def folder_of(entry: Entry) -> Path:
    """The folder with an entry's files, under THEMIS_DATA."""
    return data_folder() / entry.folder


def find_weights(name: str) -> Path | None:
    """An entry's weights file, if there is one."""
    entry = choose_entry(name)
    if callable(entry.weights):
        return entry.weights()
    if not os.environ.get("THEMIS_DATA"):
        return None
    return min((file for file in folder_of(entry).glob(entry.weights) if file.is_file()), default=None)


def load(
    name: str,
    weights: str | Path | None = None,
    *,
    layers: str | Sequence[str] = "auto",
    neurons: Granularity = "element",
    oracle: str = "auto",
    trust: Trust | None = None,
) -> Target:
    """The target of an entry, with the given weights, those under THEMIS_DATA or, with a warning, random ones."""
    entry = choose_entry(name)
    file = find_weights(name) if weights is None else Path(weights)
    module = build(entry)
    if file is None:
        warn(
            f"{name} has random weights, because there is no file of trained weights ({entry.source}): results say "
            "nothing about a trained model"
        )
    else:
        load_weights(module, file, trust)
    if oracle == "auto":  # a net with random weights may answer nothing correctly
        oracle = "changed" if file is None and entry.metric == "accuracy" else entry.oracle
    preprocess = entry.normalise if entry.fit is None else entry.fit(folder_of(entry))
    return Target(module, bounds=entry.bounds, preprocess=preprocess, layers=layers, neurons=neurons, oracle=oracle)


def build(entry: Entry, random_seed: int = RANDOM_SEED) -> nn.Module:
    """The net in evaluation mode, with weights drawn from `random_seed`; torch's global generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random_seed)
        return entry.build().eval()


def move(module: nn.Module, device: str | None) -> None:
    """Move a net to a device, if one is given."""
    try:
        module.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--device must be available, but {device!r} is not: {reason}") from error


def data(name: str, split: str = "test") -> Seeds:
    """The data of an entry, read from THEMIS_DATA."""
    entry = choose_entry(name)
    seeds = entry.read(folder_of(entry), split=split)
    if not seeds.has_labels:
        raise DataError(
            f"the data of {name} must have labels, but there are none in {folder_of(entry)}: add the file of labels"
        )
    return seeds


def verify(name: str, weights: str | Path | None = None, *, device: str | None = None) -> MeasuredFigure:
    """Measure an entry on its test data: accuracy, or mean squared error."""
    entry = choose_entry(name)
    target = load(name, weights)
    move(target.module, device)
    return measure(entry, target, data(name))


def measure(entry: Entry, target: Target, seeds: Seeds) -> MeasuredFigure:
    """Measure an entry on labelled data."""
    assert seeds.labels is not None  # the zoo's data has them
    total = 0.0
    with target.opened(), torch.no_grad():
        for start in range(0, len(seeds), MEASURING_BATCH):
            rows = torch.arange(start, min(start + MEASURING_BATCH, len(seeds)))
            outputs, labels = target.forward(seeds.take(rows).to(target.device)).cpu(), seeds.labels[rows]
            if entry.metric == "mse":
                total += float((outputs.squeeze(1).double() - labels).square().sum())
            else:
                total += int((outputs.argmax(1) == labels).sum())
    return MeasuredFigure(entry, total / len(seeds), len(seeds))


class Collection:
    """The loader `zoo`: the models that `--zoo NAME` and `--model zoo:NAME` name, with their data and weights."""

    names = tuple(ZOO)
    load = staticmethod(load)
    data = staticmethod(data)
    find_weights = staticmethod(find_weights)

    def __call__(self, name: str) -> Target:
        return load(name)


collection = Collection()


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
    _fit(entry, replace(recipe, epochs=epochs), module, preprocess, seeds, random_seed, log)
    figure = measure(entry, Target(module, bounds=entry.bounds, preprocess=preprocess), data(name))
    return module.cpu(), figure


def _fit(
    entry: Entry,
    recipe: TrainingRecipe,
    module: nn.Module,
    preprocess: Callable[[Tensor], Tensor] | None,
    seeds: Seeds,
    random_seed: int,
    log: Log,
) -> None:
    assert seeds.labels is not None  # the zoo's data has them
    rng = torch.Generator().manual_seed(random_seed)
    device = next(module.parameters()).device
    n_batches = len(seeds) // recipe.batch  # a smaller last batch would disturb the batch normalisation
    optimiser = _optimiser(recipe, module)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, recipe.max_rate, total_steps=recipe.epochs * n_batches)
    module.train()
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(random_seed)  # for dropout
        for epoch in range(1, recipe.epochs + 1):
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
            log(f"epoch {epoch} of {recipe.epochs}: loss {total / n_batches:.4f}, {perf_counter() - start:.1f} s")
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
