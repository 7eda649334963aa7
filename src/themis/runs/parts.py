"""The three parts of the seeds: searched for faults, trained on, and kept to judge by.

A seed's part is a function of its content and the split's own random seed alone. So two copies of a picture are in one
part, and the data may be reordered or cut: what was to judge never becomes material.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.rows import Rows, as_array
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, StoreError, UsageError
from themis.compute.rng import uniform
from themis.settings import check_shares
from themis.runs.store.schema import PARTS as FILE

if TYPE_CHECKING:
    from themis.runs.run import Run
    from themis.runs.store.reader import Reader

PARTS = ("search", "train", "judge")
STEP_BYTES = 16 << 20
"""Inputs that are hashed at a time."""
N_NAMED = 5
"""Seeds that a message names at most."""

Hashes = NDArray[np.uint64]


@dataclass(frozen=True)
class Parts:
    """Seeds in three parts: faults are searched on the first, the model trained on it and the second."""

    search: Seeds
    train: Seeds
    judge: Seeds
    """Never searched for material nor trained on: what is reported comes from these."""


@dataclass(frozen=True, eq=False)
class Split:
    """Which part each seed is in, with the hash of its content: what a run records."""

    seed_id: NDArray[np.int64]
    hashes: Hashes
    part: NDArray[np.uint8]
    """Places in `PARTS`."""

    @staticmethod
    def of(seeds: Seeds, shares: Sequence[float], random_seed: int = 0) -> Split:
        """Split seeds; of many, the parts have about the shares asked for."""
        shares, hashes = check_shares(shares), seed_hashes(seeds)
        made = Split(seeds.seed_id.numpy(), hashes, choose_part(hashes, shares, random_seed))
        for name, n in made.counts().items():
            if not n:
                raise DataError(
                    f"every part must hold a seed, {name} got none of {len(seeds):,} seeds with a split of "
                    f"{', '.join(f'{each:g}' for each in shares)}: give more seeds, or a larger share"
                )
        return made

    def counts(self) -> dict[str, int]:
        """Seeds in each part."""
        return {name: int((self.part == k).sum()) for k, name in enumerate(PARTS)}

    def parts(self, seeds: Seeds) -> Parts:
        """The parts of the seeds that were split."""
        return Parts(*(seeds[torch.from_numpy(np.flatnonzero(self.part == k))] for k in range(len(PARTS))))

    def search(self, seeds: Seeds) -> Seeds:
        """Of data that was read again, the seeds with the identity of those in the search part."""
        found = np.isin(seeds.seed_id.numpy(), self.seed_id[self.part == PARTS.index("search")])
        if not found.any():
            raise DataError(f"the data must hold the seeds that were searched, it has {len(seeds)} others: give those")
        return seeds[torch.from_numpy(np.flatnonzero(found))].held()

    def as_bytes(self) -> bytes:
        """A safetensors file."""
        from themis.runs.store.tensors import serialize

        arrays = {"seed_id": self.seed_id, "hash": self.hashes.view(np.int64), "part": self.part}
        return serialize({name: torch.from_numpy(np.ascontiguousarray(each)) for name, each in arrays.items()})

    def describe(self) -> dict[str, Any]:
        """What the record of a run says of it."""
        return {**self.counts(), "sha256": hashlib.sha256(self.as_bytes()).hexdigest()}


def split(seeds: Seeds, shares: tuple[float, float, float], random_seed: int = 0) -> Parts:
    """Split seeds into search, train and judge by their content."""
    return Split.of(seeds, shares, random_seed).parts(seeds)


def choose_part(hashes: Hashes, shares: Sequence[float], random_seed: int) -> NDArray[np.uint8]:
    """The part of each content: a function of it, the shares and the random seed, never of the other seeds."""
    edges = np.cumsum(shares)[:-1]
    return np.searchsorted(edges, uniform(random_seed, hashes.view(np.int64)), side="right").astype(np.uint8)


def seed_hashes(seeds: Seeds) -> Hashes:
    """A hash of each seed's input; labels and indices do not count. Inputs are read a part at a time."""
    return input_hashes(seeds.inputs)


def input_hashes(inputs: Tensor | Rows) -> Hashes:
    """A hash of each input's content `[inputs]`, whatever its shape, type or device.

    A picture of 8 bits has one hash in 0..1 and in 0..255, and whichever way it was divided.
    """
    hashes = np.empty(len(inputs), np.uint64)
    for first, block in _blocks(inputs):
        digests = [hashlib.blake2b(each, digest_size=8).digest() for each in _contents(block)]
        hashes[first : first + len(block)] = np.frombuffer(b"".join(digests), "<u8")
    return hashes


def read_parts(run: Run | Reader | str | Path, seeds: Seeds) -> Parts:
    """The recorded parts of a run's data that was read again; other data than the recorded is refused.

    seeds: all of them, as they were before the split.
    """
    from themis.runs.run import Run
    from themis.runs.store.reader import Reader

    if isinstance(run, str | Path):
        with closing(Reader(run)) as reader:
            return read_parts(reader, seeds)
    settings = vars(run.start.settings) if isinstance(run, Run) else run.record["settings"]
    if settings.get("split") is None:
        raise UsageError(
            "the run's seeds must have been split before its campaign, all were searched, so none is left to judge by: "
            "run it again with a split, as --split 0.5,0.2,0.3"
        )
    seeds = read_seeds(seeds, settings["max_seeds"])
    if isinstance(run, Run):
        from themis.runs.analysis.bench import _campaign

        parts = split(seeds, settings["split"], settings["split_seed"])
        _check_same(parts.search, _campaign(run)[1])
        return parts
    recorded = read_split(run)
    _check_same(seeds, recorded)
    if not np.array_equal(choose_part(recorded.hashes, settings["split"], settings["split_seed"]), recorded.part):
        raise StoreError(
            f"{run.path / FILE} must hold the split that the run's settings make, it holds another: restore the folder "
            "from a copy"
        )
    return recorded.parts(seeds)


def read_split(run: Reader) -> Split:
    """The split that a run recorded before its campaign."""
    from themis.runs.store.tensors import deserialize

    path, known = run.path / FILE, run.record.get("parts")
    if known is None:
        raise UsageError(f"the run in {run.path} must have split its seeds, it has not: run it again with --split")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{path} must hold the run's split, it cannot be read: {error.strerror}; restore it from a copy"
        ) from error
    if hashlib.sha256(content).hexdigest() != known["sha256"]:
        raise StoreError(f"{path} must be as the run wrote it, it has been changed: restore it from a copy")
    arrays = {name: tensor.numpy() for name, tensor in deserialize(content, path).items()}
    return Split(arrays["seed_id"], arrays["hash"].view(np.uint64), arrays["part"])


def name_seeds(seeds: Seeds, which: NDArray[np.bool_]) -> str:
    """Some seeds by their identity, the first few."""
    ids = seeds.seed_id.numpy()[which]
    return f"seed{'s' * (len(ids) > 1)} {', '.join(map(str, ids[:N_NAMED]))}{', ...' * (len(ids) > N_NAMED)}"


def _check_same(seeds: Seeds, known: Split | Seeds) -> None:
    """Refuse data that is not the one that was split."""
    rule = "the data must be the one that was split before the campaign"
    if not np.array_equal(seeds.seed_id, known.seed_id):
        raise DataError(f"{rule}, of {len(known.seed_id):,} seeds, got {len(seeds):,} others: give the run's data")
    differs = seed_hashes(seeds) != (known.hashes if isinstance(known, Split) else seed_hashes(known))
    if differs.any():
        raise DataError(
            f"{rule}, {int(differs.sum()):,} of {len(seeds):,} have another content ({name_seeds(seeds, differs)}): "
            "give the run's data"
        )


def _blocks(inputs: Tensor | Rows) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """All inputs as rows of numbers, some at a time, each with the place of its first."""
    n = len(inputs)
    step = max(1, STEP_BYTES * n // max(1, math.prod(inputs.shape) * 4))
    for first in range(0, n, step):
        rows = as_array(inputs[torch.arange(first, min(first + step, n))])
        yield first, np.asarray(rows, np.float32).reshape(len(rows), -1)


def _contents(block: NDArray[np.float32]) -> Iterator[bytes]:
    """What is hashed of each row: the bytes of a picture of 8 bits, the numbers of anything else."""
    scaled = block * np.float32(255)
    is_unit = ((block >= 0) & (block <= 1) & (np.abs(scaled - np.rint(scaled)) < 1e-3)).all(1)
    is_raw = ((block >= 0) & (block <= 255) & (block == np.rint(block))).all(1) & ~is_unit
    plain = (block + np.float32(0)).astype("<f4")  # of both zeros one
    for k in range(len(block)):
        if is_unit[k] or is_raw[k]:
            yield np.rint(scaled[k] if is_unit[k] else block[k]).astype(np.uint8).tobytes()
        else:
            yield plain[k].tobytes()
