"""The training and test splits of the zoo's models.

Each function `(folder, split) -> Seeds` reads one split. All inputs lie in 0..1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from themis.data import Seeds, datasets
from themis.data.features import Features
from themis.data.files import read_npz
from themis.errors import DataError

SplitName = Literal["train", "test"]
ReadSplit = Callable[[Path, SplitName], Seeds]
RAISED = tuple(
    f"count_{keyword}"
    for keyword in ("action", "endobj", "font", "javascript", "js", "objstm", "startxref", "trailer", "xref")
)
"""Features of a PDF file that may be raised.

They count keywords in the bytes of a file, and more of them can be added where no reader looks. None may be lowered:
the removed keyword might be what makes the file malicious. All other features are fixed: metadata, sizes, times and
positions, and every count that determines another feature (`count_obj` is part of `ratio_size_obj`, `count_stream` of
`count_stream_diff`, images and boxes of their sums, `count_page`, `count_eof` and `count_acroform` of `pos_...`, and
obfuscated names are counted twice).
"""


def read_mnist(folder: Path, split: SplitName) -> Seeds:
    """60,000 training and 10,000 test digits."""
    return datasets.read_mnist(folder, split=split)


def read_cifar10(folder: Path, split: SplitName) -> Seeds:
    """50,000 training and 10,000 test pictures."""
    return datasets.read_cifar10(folder, split=split)


def read_pdf(folder: Path, split: SplitName) -> Seeds:
    """Features of PDF files on `FeatureAxes`: Contagio's for training, those from Google and VirusTotal for testing."""
    table = datasets.read_pdf(folder).inputs[:]
    seeds = datasets.read_pdf(folder, split="contagio" if split == "train" else "other")
    axes, raw = FeatureAxes(table), Features.of(table, _feature_names(folder / "pdf_features.npz"))
    features = replace(raw, change=tuple("raise" if name in RAISED else "fixed" for name in raw.names), axes=axes)
    placed = Seeds(axes.place(seeds.inputs[:]), seeds.labels, seeds.seed_id)
    return placed.with_features(features).with_classes(seeds.classes)


def read_drebin(folder: Path, split: SplitName) -> Seeds:
    """Features of Android apps; no test app has a duplicate in the training split.

    An app still works if it gets more permissions and calls, but may break if some are removed: features only rise.
    """
    seeds = _choose_split(datasets.read_drebin(folder), datasets.read_drebin(folder, split="test"), split)
    features = Features.of(seeds.inputs, _feature_names(folder / "drebin215.npz"))
    return seeds.with_features(features.set("*", kind="binary", change="raise"))


def read_udacity(folder: Path, split: SplitName) -> Seeds:
    """One test drive: every fifth block of 100 frames is for testing, the others are for training."""
    return _choose_split(datasets.read_udacity(folder), datasets.read_udacity(folder, split="test"), split)


def read_imagenet(folder: Path, split: SplitName) -> Seeds:
    """One test picture per class; there is no training split."""
    if split == "train":
        raise DataError(
            f"{folder} must hold a training split, but it has only one test picture per class: train elsewhere"
        )
    return datasets.read_imagenet(folder)


class FeatureAxes:
    """Features of a table, each on its own logarithmic axis: 0 is its lowest value in the data, 1 its highest.

    Counts, sizes and times differ by twelve orders of magnitude, so that no single pair of bounds fits the raw values,
    and on linear axes an outlier would squeeze all other rows into one point. On logarithmic axes noise is relative to
    the value, and no test leaves the range of a feature.
    """

    def __init__(self, table: Tensor) -> None:
        self.low = table.amin(0)
        self.reach = torch.log1p(table.amax(0) - self.low)

    def place(self, raw: Tensor) -> Tensor:
        """Raw values `[rows, features]` as places in 0..1; a feature with a single value is always 0."""
        reach = torch.where(self.reach > 0, self.reach, 1).to(raw)
        return torch.log1p(raw - self.low.to(raw)) / reach

    def as_dict(self) -> dict[str, list[float]]:
        """The parameters of the formula: a raw value is low + expm1(place * reach)."""
        return {"low": self.low.tolist(), "reach": self.reach.tolist()}

    def value(self, places: Tensor) -> Tensor:
        """The raw values at `places`; differentiable."""
        return self.low.to(places) + torch.expm1(places * self.reach.to(places))


class StandardPdf:
    """Preprocessing of the PDF net: raw features, standardised by their mean and spread over Contagio's files."""

    def __init__(self, folder: Path) -> None:
        self.axes = FeatureAxes(datasets.read_pdf(folder).inputs[:])
        contagio = datasets.read_pdf(folder, split="contagio").inputs[:].double()
        spread = contagio.std(0, correction=0)
        self.mean, self.spread = contagio.mean(0), torch.where(spread > 0, spread, 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        return (self.axes.value(inputs) - self.mean.to(inputs)) / self.spread.to(inputs)


def _feature_names(file: Path) -> tuple[str, ...] | None:
    """The names of a table's features, if its file has them."""
    names = read_npz(file, ("feature_names",)).get("feature_names")
    return None if names is None else tuple(map(str, names))


def _choose_split(full: Seeds, test: Seeds, split: SplitName) -> Seeds:
    return test if split == "test" else full[~torch.isin(full.seed_id, test.seed_id)]
