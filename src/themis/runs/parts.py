"""Splits seeds into three parts: one is searched for faults, one is added for training, one is kept for judging.

A seed's part depends only on its content and on the random seed of the split. Copies of a picture are therefore in the
same part, and a seed kept for judging is never trained on, even if the data is reordered or shortened. Seeds that
belong together, such as frames of a video, are in the same part if their groups are given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.compute.rng import uniform
from themis.data.groups import Hashes, Ints, join_copies, read_groups, seed_hashes
from themis.data.seeds import Seeds, list_seeds, read_seeds
from themis.errors import DataError, StoreError, UsageError
from themis.runs.store.schema import PARTS_FILE
from themis.settings import check_shares

if TYPE_CHECKING:
    from themis.runs.run import Run
    from themis.runs.store.reader import Reader

PARTS = ("search", "train", "judge")


@dataclass(frozen=True)
class Parts:
    """Seeds in three parts: `search` is searched for faults, `search` and `train` are trained on."""

    search: Seeds
    train: Seeds
    judge: Seeds
    """Neither searched nor trained on; reported results come from these."""


@dataclass(frozen=True, eq=False)
class SeedSplit:
    """The part of each seed and the hash of its content, as a run records them."""

    seed_id: NDArray[np.int64]
    hashes: Hashes
    part: NDArray[np.uint8]
    """Indices into `PARTS`."""

    @staticmethod
    def of(seeds: Seeds, shares: Sequence[float], random_seed: int = 0, groups: Ints | None = None) -> SeedSplit:
        """Split seeds into parts of about the requested shares; seeds of one group stay together."""
        shares, hashes = check_shares(shares), seed_hashes(seeds)
        split = SeedSplit(seeds.seed_id.numpy(), hashes, choose_part(hashes, shares, random_seed, groups))
        if empty := [name for name, n in split.counts().items() if not n]:
            held = "" if groups is None else f" in {len(np.unique(join_copies(groups, hashes))):,} groups"
            raise DataError(
                f"every part must hold a seed, but {empty[0]} got none of {len(seeds):,} seeds{held} with a split of "
                f"{', '.join(f'{share:g}' for share in shares)}: give more seeds or smaller groups, or a larger share"
            )
        return split

    def counts(self) -> dict[str, int]:
        """Number of seeds in each part."""
        return {name: int((self.part == k).sum()) for k, name in enumerate(PARTS)}

    def parts(self, seeds: Seeds) -> Parts:
        """The parts of `seeds`, which must be the seeds that were split."""
        return Parts(*(seeds[torch.from_numpy(np.flatnonzero(self.part == k))] for k in range(len(PARTS))))

    def search(self, seeds: Seeds) -> Seeds:
        """The seeds of the search part, taken from data that was read again."""
        is_searched = np.isin(seeds.seed_id.numpy(), self.seed_id[self.part == PARTS.index("search")])
        if not is_searched.any():
            raise DataError(f"the data must hold the searched seeds, got {len(seeds)} other seeds: give the run's data")
        return seeds[torch.from_numpy(np.flatnonzero(is_searched))].in_memory()

    def as_bytes(self) -> bytes:
        """The content of a safetensors file."""
        from themis.runs.store.tensors import content_of

        arrays = {"seed_id": self.seed_id, "hash": self.hashes.view(np.int64), "part": self.part}
        return b"".join(content_of({name: torch.from_numpy(array) for name, array in arrays.items()}))

    def describe(self) -> dict[str, Any]:
        """The entry in the record of a run."""
        return {**self.counts(), "sha256": hashlib.sha256(self.as_bytes()).hexdigest()}


def split(seeds: Seeds, shares: tuple[float, float, float], random_seed: int = 0, groups: Ints | None = None) -> Parts:
    """Split seeds into search, train and judge by their content; seeds of one group stay together."""
    return SeedSplit.of(seeds, shares, random_seed, groups).parts(seeds)


def choose_part(
    hashes: Hashes, shares: Sequence[float], random_seed: int, groups: Ints | None = None
) -> NDArray[np.uint8]:
    """The index of each seed's part `[seeds]`; without groups it does not depend on the other seeds.

    There are few groups, so they are put in random order, which is cut where the parts have the requested shares.
    """
    edges = np.cumsum(shares)[:-1]
    if groups is None:
        return np.searchsorted(edges, uniform(random_seed, hashes.view(np.int64)), side="right").astype(np.uint8)
    names, row, count = np.unique(join_copies(groups, hashes), return_inverse=True, return_counts=True)
    order = np.argsort(uniform(random_seed, names), kind="stable")
    middle = (np.cumsum(count[order]) - count[order] / 2) / len(hashes)
    part = np.empty(len(names), np.uint8)
    part[order] = np.searchsorted(edges, middle, side="right")
    return part[row]


def read_parts(run: Run | Reader | str | Path, seeds: Seeds) -> Parts:
    """The parts of a run's data, of which `seeds` are all seeds; raises an error if the data has changed."""
    from themis.runs.run import Run
    from themis.runs.store.reader import Reader

    if isinstance(run, str | Path):
        with closing(Reader(run)) as reader:
            return read_parts(reader, seeds)
    settings = vars(run.start.settings) if isinstance(run, Run) else run.record["settings"]
    if settings.get("split") is None:
        raise UsageError(
            "the run's seeds must have been split before its campaign, but all of them were searched and none is left "
            "for judging: run it again with a split, such as --split 0.5,0.2,0.3, or name other data to judge by with "
            "--judge"
        )
    seeds = read_seeds(seeds, settings["max_seeds"])
    groups = None if settings.get("split_by") is None else read_groups(settings["split_by"], seeds)
    if isinstance(run, Run):
        parts = split(seeds, settings["split"], settings["split_seed"], groups)
        _check_same(parts.search, run.handle.seeds)
        return parts
    recorded = read_split(run)
    _check_same(seeds, recorded)
    expected = choose_part(recorded.hashes, settings["split"], settings["split_seed"], groups)
    if not np.array_equal(expected, recorded.part):
        raise StoreError(
            f"{run.path / PARTS_FILE} must hold the split that follows from the run's settings, but it holds a "
            f"different one: restore the folder from a copy{'' if groups is None else ', or the file of the groups'}"
        )
    return recorded.parts(seeds)


def read_split(run: Reader) -> SeedSplit:
    """The split that a run recorded before its campaign."""
    from themis.runs.store.tensors import deserialize, read_tensor_file

    path, entry = run.path / PARTS_FILE, run.record.get("parts")
    if entry is None:
        raise UsageError(f"the run in {run.path} must have split its seeds, but it did not: run it again with --split")
    content = read_tensor_file(path)
    if hashlib.sha256(content).hexdigest() != entry["sha256"]:
        raise StoreError(f"{path} must be the file that the run wrote, but it has been changed: restore it from a copy")
    arrays = {name: tensor.numpy() for name, tensor in deserialize(content, path).items()}
    is_split = all(
        name in arrays and arrays[name].dtype == dtype and arrays[name].shape == arrays["seed_id"].shape
        for name, dtype in (("seed_id", np.int64), ("hash", np.int64), ("part", np.uint8))
    )
    if not is_split or arrays["part"].max(initial=0) >= len(PARTS):
        raise StoreError(f"{path} must hold the part of each seed, but it does not: restore it from a copy")
    return SeedSplit(arrays["seed_id"], arrays["hash"].view(np.uint64), arrays["part"])


def _check_same(seeds: Seeds, known: SeedSplit | Seeds) -> None:
    """Raise an error if the data is not the data that was split."""
    rule = "the data must be the data that was split before the campaign"
    if not np.array_equal(seeds.seed_id, known.seed_id):
        raise DataError(f"{rule}, which had {len(known.seed_id):,} seeds, got {len(seeds):,} others: pass the run's")
    differs = seed_hashes(seeds) != (known.hashes if isinstance(known, SeedSplit) else seed_hashes(known))
    if differs.any():
        raise DataError(
            f"{rule}, {int(differs.sum()):,} of {len(seeds):,} seeds differ "
            f"({list_seeds(seeds, differs)}): give the run's data"
        )
