"""An entry of the zoo: how to build a model, what it is tested on, and which accuracy it should have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Generator, Tensor, nn

from themis.target.target import Normalize
from themis_lab.zoo.splits import ReadSplit

Preprocess = Callable[[Tensor], Tensor]
Augment = Callable[[Tensor, Tensor, Generator], tuple[Tensor, Tensor]]
Metric = Literal["accuracy", "mse"]


@dataclass(frozen=True)
class PublishedFigure:
    """The published accuracy or error of the weights on `rows`; a measured one may differ by `tolerance`."""

    value: float
    tolerance: float
    rows: str


@dataclass(frozen=True)
class TrainingRecipe:
    """How an entry is trained: `max_rate` is the peak learning rate of a one-cycle schedule."""

    epochs: int
    batch: int
    max_rate: float
    optimiser: Literal["adam", "sgd"] = "adam"
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    augment: Augment | None = None


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    folder: its folder under THEMIS_DATA. read: reads its data there. weights: glob pattern of its weights file there,
    or a function that finds it elsewhere. source: where the weights come from. normalise: the preprocessing of its
    target; fit: derives the preprocessing from the data instead. n_elements, n_channels: number of neurons at both
    granularities; paper_neurons: the number in the paper's table.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    folder: str
    read: ReadSplit
    weights: str | Callable[[], Path | None]
    source: str
    input_shape: tuple[int, ...]
    n_parameters: int
    n_elements: int
    n_channels: int
    paper_neurons: int | None
    normalise: Normalize | None = None
    fit: Callable[[Path], Preprocess] | None = None
    bounds: tuple[float, float] = (0.0, 1.0)
    oracle: str = "auto"
    metric: Metric = "accuracy"
    stated: PublishedFigure | None = None
    recipe: TrainingRecipe | None = None

    @property
    def is_optional(self) -> bool:
        """Whether its weights may be missing: none could be obtained, or they come with an optional package."""
        return self.stated is None or callable(self.weights)
