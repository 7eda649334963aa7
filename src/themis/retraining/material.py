"""Material: the inputs that a model learns from, disturbed ones with the labels of their seeds, and clean ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.groups import Hashes, seed_hashes
from themis.data.seeds import Seeds
from themis.errors import DataError, warn
from themis.measure.calculator import Calculator, Limits
from themis.measure.chunk import columns_of
from themis.measure.sweep import clean_outputs
from themis.measure.tests import Ints, Tests
from themis.oracle import Changed, Motion, Oracle
from themis.perturb import Perturbation
from themis.perturb.perturbation import check_fits, check_gradient
from themis.retraining.grading import CHUNK, Loss, settled_oracle
from themis.runs.faults import Faults
from themis.target.target import AnyTarget

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader


@dataclass(frozen=True)
class Material:
    """Disturbed inputs with the labels of their seeds, and clean inputs."""

    disturbed: Tensor  # [inputs, ...], raw; none if all disturbed inputs are made anew
    disturbed_labels: Tensor
    seed: Tensor  # the row in `pool` of the seed of each disturbed input, or of each fault
    pool: Seeds
    """The search part, with labels."""
    clean: Seeds
    """The train part, with labels."""
    groups: tuple[Ints, Ints] | None = None
    """What the seeds of the pool and the clean seeds belong to; None if each stands for itself."""
    loss: Loss | None = None
    """A function of outputs and labels that replaces the task's own loss."""

    def __len__(self) -> int:
        return len(self.seed)

    @cached_property
    def hashes(self) -> tuple[Hashes, Hashes]:
        """Those of the contents of the pool and of the clean seeds."""
        return seed_hashes(self.pool), seed_hashes(self.clean)


def of_faults(
    run_faults: Faults,
    pool: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    *,
    clean: Seeds | None = None,
    run: Reader | None = None,
    has_inputs: bool = True,
) -> Material:
    """Material from a campaign's faults: every input is identical to the one that the campaign tested.

    pool: the seeds that the campaign searched. clean: the train part; by default none. run: the campaign's folder,
    whose stored inputs are used if an attack created them. has_inputs: False if no input of a fault is trained on: to
    make them again may take long and much memory.
    """
    if not len(run_faults):
        raise DataError(
            "retraining needs faults to learn from, but the run has none: raise its magnitude or its budget"
        )
    columns = run_faults.columns
    ids, seed = columns["id"].tolist(), rows_of(columns["seed_id"], pool)
    if not has_inputs:
        pool, clean = _labelled(pool, clean, target)
        assert pool.labels is not None  # from the data, or the clean answers
        return Material(torch.empty(0, *pool.shape[1:]), pool.labels[:0], torch.from_numpy(seed), pool, clean)
    stored = {} if run is None or not perturbation.passes else run.tensors(ids)
    tests = Tests(columns["id"], seed, columns["theta"], columns["noise_seed"], columns["kind"])
    material = of_tests(tests, pool, perturbation, target, clean, (columns["position"], columns["chunk"]))
    for k, id in enumerate(ids):
        if id in stored:
            material.disturbed[k] = stored[id].inputs[0]
    return material


def of_tests(
    tests: Tests,
    pool: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    clean: Seeds | None = None,
    places: tuple[Ints, Ints] | None = None,
) -> Material:
    """Material from any tests of the pool, whether they were faults or not.

    places: each test's row in its forward pass, and the size of that pass; the last bits of an attack depend on them.
    """
    check_fits(perturbation, pool.shape[1:])
    check_gradient(perturbation, target)
    oracle = settled_oracle(target, pool)
    pool, clean = _labelled(pool, clean, target)
    with target.opened(), torch.no_grad():
        rows = np.unique(tests.seed)
        tested = pool[torch.from_numpy(rows)].in_memory()
        if places is None or not perturbation.passes:
            number = np.arange(len(tests))
            places = number % CHUNK, np.full(len(tests), CHUNK)
        assert tested.labels is not None  # from the data, or the clean answers
        within = replace(tests, seed=np.searchsorted(rows, tests.seed))
        disturbed, labels = torch.empty(len(tests), *pool.shape[1:]), tested.labels[torch.from_numpy(within.seed)]
        for at, inputs, motion in _disturb(within, tested, perturbation, target, oracle, places):
            disturbed[at] = inputs.cpu()
            if motion:
                labels[at] = oracle.move_labels(labels[at].to(target.device), motion).cpu()
    return Material(disturbed, labels, torch.from_numpy(tests.seed), pool, clean)


def _disturb(
    tests: Tests,
    seeds: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    oracle: Oracle,
    places: tuple[Ints, Ints],
) -> Iterator[tuple[Tensor, Tensor, Motion | None]]:
    """Some of the tests, with their inputs and how these have moved, until all were made as in a campaign."""
    position, chunk = places
    for size in np.unique(chunk).tolist():
        bench = Calculator.trace(target, seeds, perturbation, oracle, Limits(chunk=size))
        bench.take_clean(clean_outputs(target, seeds, size))
        own = np.flatnonzero(chunk == size)
        turn = rank(own, position[own])
        for k in range(int(turn.max()) + 1):
            current = own[turn == k]
            filled = np.full(size, current[0])  # the content of the other rows does not affect these
            filled[position[current]] = current
            made = bench.disturb(*columns_of(tests[filled], size, target.device), size)
            at = torch.from_numpy(position[current]).to(target.device)
            yield torch.from_numpy(current), made.disturbed[at], made.motion and made.motion[at]


def join_material(materials: Sequence[Material]) -> Material:
    """The material of several campaigns on the same seeds."""
    return replace(
        materials[0],
        disturbed=torch.cat([each.disturbed for each in materials]),
        disturbed_labels=torch.cat([each.disturbed_labels for each in materials]),
        seed=torch.cat([each.seed for each in materials]),
    )


def rows_of(seed_id: Ints, pool: Seeds) -> Ints:
    """The rows of seeds in the pool."""
    known = pool.seed_id.numpy()
    order = np.argsort(known, kind="stable")
    rows: Ints = order[np.searchsorted(known, seed_id, sorter=order).clip(max=len(known) - 1)]
    missing = known[rows] != seed_id
    if missing.any():
        raise DataError(
            f"the pool must hold the seed of every fault, but {len(np.unique(seed_id[missing]))} are not among its "
            f"{len(known)}, first seed {int(seed_id[missing][0])}: give the seeds that the campaign searched"
        )
    return rows


def rank(score: NDArray[Any], *keys: Ints) -> Ints:
    """The rank of each row among those with the same keys, by score and then by position."""
    order = np.lexsort((score, *keys))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    starts = np.flatnonzero(is_first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts[np.cumsum(is_first) - 1]
    return rank


def _labelled(pool: Seeds, clean: Seeds | None, target: AnyTarget) -> tuple[Seeds, Seeds]:
    """Both with labels, which are the model's clean answers if some have none and the oracle compares with those."""
    clean = pool[torch.zeros(0, dtype=torch.int64)] if clean is None else clean
    if pool.has_labels and (clean.has_labels or not len(clean)):
        return pool, clean
    oracle = settled_oracle(target, pool)
    if not isinstance(oracle, Changed):
        raise DataError(
            f"retraining needs labels, but some seeds have none and oracle {oracle.spec()!r} does not define the "
            "correct answer: give (inputs, labels), or use oracle='changed', whose label is the clean answer"
        )
    n = len(pool) + len(clean)
    warn(f"{n:,} seeds have no labels, so the model's own clean answers are used as labels")
    with target.opened(), torch.no_grad():
        outputs = [clean_outputs(target, seeds, CHUNK) for seeds in (pool, clean) if len(seeds)]
    answers = [oracle.reference(each, None).cpu() for each in outputs]
    return pool.with_labels(answers[0]), clean.with_labels(answers[1] if len(clean) else answers[0][:0])
