"""The ledger: which seeds weights have been trained on. It travels with the weights, in their file and in memory."""

from __future__ import annotations

import base64
import binascii
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.data.seeds import Seeds
from themis.errors import DataError, ModelError, UsageError
from themis.runs.parts import Hashes, input_hashes, name_seeds, seed_hashes
from themis.runs.store.files import explained, write_file

KEY, COUNT = "themis_ledger", "themis_seeds"
"""Where the metadata of a file of weights holds the hashes, and how many there are."""
PLACE = "_themis_ledger"
"""The attribute of a module in memory."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """Contents of inputs that weights have been trained on, or that chose among them, as early stopping does."""

    hashes: Hashes = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Ascending, each once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "hashes", np.unique(np.asarray(self.hashes, np.uint64)))

    @staticmethod
    def of(*inputs: Seeds | Tensor) -> Ledger:
        """A ledger of seeds, and of inputs that were made of them."""
        some = [seed_hashes(each) if isinstance(each, Seeds) else input_hashes(each) for each in inputs]
        return Ledger(np.concatenate(some)) if some else Ledger()

    def __len__(self) -> int:
        return len(self.hashes)

    def merge(self, other: Ledger) -> Ledger:
        """What either has seen."""
        return Ledger(np.union1d(self.hashes, other.hashes))

    def knows(self, seeds: Seeds) -> NDArray[np.bool_]:
        """Of each seed, whether its content was trained on."""
        return np.isin(seed_hashes(seeds), self.hashes) if len(self) else np.zeros(len(seeds), np.bool_)

    def refuse(self, seeds: Seeds, what: str) -> None:
        """Refuse seeds if any was trained on; `what` they are."""
        is_known = self.knows(seeds)
        if is_known.any():
            raise DataError(
                f"{what} must be seeds that the weights were not trained on, {int(is_known.sum()):,} of {len(seeds):,} "
                f"were ({name_seeds(seeds, is_known)}): take the judge part of the split, or other data"
            )


def remember(module: nn.Module, ledger: Ledger) -> None:
    """Add to what a module in memory has been trained on; copies of it know too."""
    setattr(module, PLACE, ledger_of(module).merge(ledger))


@contextmanager
def searching_seen() -> Iterator[None]:
    """No warning of seeds that weights were trained on, where a campaign looks for what is left to learn from them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"[\d,]+ of [\d,]+ seeds are ones that the weights")
        yield


def ledger_of(target: Any, weights: Path | None = None) -> Ledger:
    """What a target or a module has been trained on, by what its modules remember and by its file of weights.

    A black box shows no weights: nothing is known of it.
    """
    ledger = Ledger() if weights is None else read_ledger(weights)
    module = target if isinstance(target, nn.Module) else getattr(target, "module", None)
    for each in () if module is None else module.modules():  # a retrained one may be inside of another
        ledger = ledger.merge(getattr(each, PLACE, Ledger()))
    return ledger


def write_weights(path: Path, module: nn.Module, ledger: Ledger, about: dict[str, str]) -> None:
    """Write a module's weights as safetensors, whole or not at all; the same weights make the same bytes.

    ledger: what they have been trained on, beside what the module remembers. about: said in the file in plain text.
    """
    from themis.runs.store.tensors import serialize

    path = Path(path)
    if not isinstance(module, nn.Module):
        raise UsageError(f"weights must be those of an nn.Module, got {type(module).__name__}: pass target.module")
    if path.suffix != ".safetensors":
        raise UsageError(f"the file of weights must end in .safetensors, got {path.name}: rename it")
    state = module.state_dict()
    if others := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        raise ModelError(f"weights must be tensors, {others[0]} is a {type(state[others[0]]).__name__}: make it one")
    if taken := {KEY, COUNT} & about.keys():
        raise UsageError(f"about must leave the names of the ledger free, got {min(taken)!r}: rename it")
    ledger = ledger.merge(ledger_of(module))
    encoded = base64.b64encode(ledger.hashes.astype("<u8").tobytes()).decode()
    metadata = {"format": "pt", **about, COUNT: str(len(ledger)), KEY: encoded}
    # Copies: weights that modules share may not share memory in such a file.
    content = serialize({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
    with explained(path):
        write_file(path, _with_metadata(content, metadata))


def read_ledger(weights: Path) -> Ledger:
    """What weights in a file have been trained on; nothing is known of weights that were not written here."""
    metadata = read_about(weights)
    if KEY not in metadata and COUNT not in metadata:
        return Ledger()
    try:
        hashes = np.frombuffer(base64.b64decode(metadata[KEY], validate=True), "<u8").astype(np.uint64)
        is_whole = len(hashes) == int(metadata[COUNT]) and bool((hashes[1:] > hashes[:-1]).all())
    except (KeyError, ValueError, TypeError, binascii.Error):
        is_whole = False
    if not is_whole:
        raise DataError(
            f"{weights} must say which seeds it was trained on as it was written, its ledger is damaged: restore it "
            "from a copy"
        )
    return Ledger(hashes)


def read_about(weights: Path) -> dict[str, str]:
    """What a file of weights says of itself; nothing where it is no safetensors file."""
    path = Path(weights)
    if not path.is_file():
        raise DataError(f"the weights file must exist, {path} does not: check the path")
    if path.suffix != ".safetensors":
        return {}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size)) if size < path.stat().st_size else None
        metadata: dict[str, str] = header.get("__metadata__", {})  # type: ignore[union-attr]
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{path} must be a safetensors file, its header cannot be read: restore it") from error
    return metadata


def _with_metadata(content: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with metadata in a fixed order: the library writes it in another one each time."""
    size = int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(content[8 : 8 + size])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
