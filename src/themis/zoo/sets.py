"""The splits that the zoo's models were trained on and are tested with.

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

Split = Literal["train", "test"]
Read = Callable[[Path, Split], Seeds]
RAISED = tuple(
    f"count_{each}"
    for each in ("action", "endobj", "font", "javascript", "js", "objstm", "startxref", "trailer", "xref")
)
"""Features of a PDF file that may be raised.

They count keywords in the bytes of a file, and one more of each can be put where no reader looks. None may be lowered:
what is in a malicious file may be what makes it one. All else is fixed: metadata, sizes, times and places, and every
count from which another feature follows (`count_obj` is in `ratio_size_obj`, `count_stream` in `count_stream_diff`,
images and boxes in their sums, `count_page`, `count_eof` and `count_acroform` in `pos_...`, and names written in
disguise are counted twice).
"""


def read_mnist(folder: Path, split: Split) -> Seeds:
    """60,000 digits to train on, 10,000 to test with."""
    return datasets.read_mnist(folder, split=split)


def read_cifar10(folder: Path, split: Split) -> Seeds:
    """50,000 pictures to train on, 10,000 to test with."""
    return datasets.read_cifar10(folder, split=split)


def read_pdf(folder: Path, split: Split) -> Seeds:
    """Features of PDF files, on `FeatureAxes`: Contagio's to train on, those of Google and VirusTotal to test with."""
    everything = datasets.read_pdf(folder).inputs[:]
    seeds = datasets.read_pdf(folder, split="contagio" if split == "train" else "other")
    axes, raw = FeatureAxes(everything), Features.of(everything, _names(folder / "pdf_features.npz"))
    features = replace(raw, change=tuple("raise" if name in RAISED else "fixed" for name in raw.names), axes=axes)
    placed = Seeds(axes.place(seeds.inputs[:]), seeds.labels, seeds.seed_id)
    return placed.with_features(features).with_classes(seeds.classes)


def read_drebin(folder: Path, split: Split) -> Seeds:
    """Apps to test with that are unlike all of those to train on.

    An app can be given more permissions and calls, and still does what it did; taken away they may be missed.
    """
    seeds = _part(datasets.read_drebin(folder), datasets.read_drebin(folder, split="test"), split)
    features = Features.of(seeds.inputs, _names(folder / "drebin215.npz"))
    return seeds.with_features(features.set("*", kind="binary", change="raise"))


def read_udacity(folder: Path, split: Split) -> Seeds:
    """One drive: every fifth block of 100 frames is to test with, the others are to train on."""
    return _part(datasets.read_udacity(folder), datasets.read_udacity(folder, split="test"), split)


def read_imagenet(folder: Path, split: Split) -> Seeds:
    """One picture of each class to test with; there is nothing to train on."""
    if split == "train":
        raise DataError(f"{folder} must hold pictures to train on, it has one a class to test with: train elsewhere")
    return datasets.read_imagenet(folder)


class FeatureAxes:
    """Features of a table, each on a logarithmic axis of its own: 0 is its lowest value in the data, 1 its highest.

    Counts, sizes and times differ by twelve orders of magnitude: no single pair of bounds fits the raw values, and on
    linear axes an outlier leaves all other rows in one point. On these, noise is relative to the value, and no test
    leaves the range of a feature.
    """

    def __init__(self, table: Tensor) -> None:
        self.low = table.amin(0)
        self.reach = torch.log1p(table.amax(0) - self.low)

    def place(self, raw: Tensor) -> Tensor:
        """Raw values `[rows, features]` as places in 0..1; a feature with one value only is always 0."""
        reach = torch.where(self.reach > 0, self.reach, 1).to(raw)
        return torch.log1p(raw - self.low.to(raw)) / reach

    def as_dict(self) -> dict[str, list[float]]:
        """The formula's numbers: a raw value is low + expm1(place * reach)."""
        return {"low": self.low.tolist(), "reach": self.reach.tolist()}

    def value(self, places: Tensor) -> Tensor:
        """The raw values at `places`; differentiable."""
        return self.low.to(places) + torch.expm1(places * self.reach.to(places))


class StandardPdf:
    """What the PDF net expects: raw features, less their mean over Contagio's files, in units of their spread there."""

    def __init__(self, folder: Path) -> None:
        self.axes = FeatureAxes(datasets.read_pdf(folder).inputs[:])
        contagio = datasets.read_pdf(folder, split="contagio").inputs[:].double()
        spread = contagio.std(0, correction=0)
        self.mean, self.spread = contagio.mean(0), torch.where(spread > 0, spread, 1)

    def __call__(self, inputs: Tensor) -> Tensor:
        return (self.axes.value(inputs) - self.mean.to(inputs)) / self.spread.to(inputs)


def _names(file: Path) -> tuple[str, ...] | None:
    """The names of a table's features, where its file has them."""
    names = read_npz(file, ("feature_names",)).get("feature_names")
    return None if names is None else tuple(map(str, names))


def _part(everything: Seeds, test: Seeds, split: Split) -> Seeds:
    return test if split == "test" else everything[~torch.isin(everything.seed_id, test.seed_id)]
