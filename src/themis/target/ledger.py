"""The ledger of inputs that weights were trained on. It is kept with the weights, in their file and in memory."""

from __future__ import annotations

import base64
import binascii
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.data.groups import Hashes, input_hashes, seed_hashes
from themis.data.seeds import Seeds, list_seeds
from themis.errors import DataError, warn

HASHES_KEY, COUNT_KEY = "themis_ledger", "themis_seeds"
"""Keys in the metadata of a weights file, for the hashes and their number."""
LEDGER_ATTRIBUTE = "_themis_ledger"
"""The attribute of a module with its ledger."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """Hashes of the inputs that weights were trained on or chosen by, as in early stopping."""

    hashes: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Ascending and distinct."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashes", np.unique(np.asarray(self.hashes, np.uint64)))

    @staticmethod
    def of(*inputs: Seeds | Tensor) -> Ledger:
        """A ledger of seeds and of inputs made from them."""
        parts = [seed_hashes(part) if isinstance(part, Seeds) else input_hashes(part) for part in inputs]
        return Ledger(np.concatenate(parts)) if parts else Ledger()

    def __len__(self) -> int:
        return len(self.hashes)

    def merge(self, other: Ledger) -> Ledger:
        """The inputs in either ledger."""
        return Ledger(np.union1d(self.hashes, other.hashes))

    def knows(self, seeds: Seeds) -> NDArray[np.bool_]:
        """Whether each seed's content was trained on `[seeds]`."""
        return np.isin(seed_hashes(seeds), self.hashes) if len(self) else np.zeros(len(seeds), np.bool_)

    def refuse(self, seeds: Seeds, subject: str) -> None:
        """Raise an error if any of the seeds was trained on; `subject` names the seeds in the message."""
        is_known = self.knows(seeds)
        if is_known.any():
            raise DataError(
                f"{subject} must be seeds that the weights were not trained on, but {int(is_known.sum()):,} of "
                f"{len(seeds):,} were ({list_seeds(seeds, is_known)}): take the judge part of the split, or other data"
            )

    def warn(self, seeds: Seeds) -> None:
        """Warn if any of the seeds was trained on, because rates found on them flatter the model."""
        n = int(self.knows(seeds).sum())
        if n:
            warn(
                f"the weights were retrained on {n:,} of {len(seeds):,} seeds, so rates found on them flatter the "
                "model: take the judge part of the split, or other data"
            )


@contextmanager
def allow_trained_seeds() -> Iterator[None]:
    """Silence `Ledger.warn` for a campaign that searches training seeds on purpose, to find what is left to learn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"the weights were retrained on [\d,]+ of [\d,]+ seeds")
        yield


def remember(module: nn.Module, ledger: Ledger) -> None:
    """Add to the ledger of a module in memory, which copies of the module keep."""
    setattr(module, LEDGER_ATTRIBUTE, ledger_of(module).merge(ledger))


def ledger_of(target: Any, weights: Path | None = None) -> Ledger:
    """The ledger of a target or a module, from its modules and from its weights file.

    The weights of a black box are not visible, so its ledger is empty.
    """
    ledger = Ledger() if weights is None else read_ledger(weights)
    root = target if isinstance(target, nn.Module) else getattr(target, "module", None)
    for module in () if root is None else root.modules():  # a retrained module may be part of a larger one
        ledger = ledger.merge(getattr(module, LEDGER_ATTRIBUTE, Ledger()))
    return ledger


def ledger_metadata(ledger: Ledger) -> dict[str, str]:
    """The metadata of a weights file from which `read_ledger` restores the ledger."""
    encoded = base64.b64encode(ledger.hashes.astype("<u8").tobytes()).decode()
    return {COUNT_KEY: str(len(ledger)), HASHES_KEY: encoded}


def read_ledger(weights: Path) -> Ledger:
    """The ledger in a weights file; empty if Themis did not write the file."""
    metadata = read_metadata(weights)
    if HASHES_KEY not in metadata and COUNT_KEY not in metadata:
        return Ledger()
    try:
        hashes = np.frombuffer(base64.b64decode(metadata[HASHES_KEY], validate=True), "<u8").astype(np.uint64)
        is_intact = len(hashes) == int(metadata[COUNT_KEY]) and bool((hashes[1:] > hashes[:-1]).all())
    except (KeyError, ValueError, TypeError, binascii.Error):
        is_intact = False
    if not is_intact:
        raise DataError(f"{weights} must list the seeds that it was trained on, but its ledger is damaged: restore it")
    return Ledger(hashes)


def read_metadata(weights: Path) -> dict[str, str]:
    """The metadata of a weights file; empty if it is not a safetensors file."""
    path = Path(weights)
    if not path.is_file():
        raise DataError(f"the weights file must exist, but {path} does not: check the path")
    if path.suffix != ".safetensors":
        return {}
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:  # type: ignore[no-untyped-call, unused-ignore]
            return dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} must be a safetensors file, but its header cannot be read: restore it") from error
