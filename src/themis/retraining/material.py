"""Material: the inputs that a model learns from, disturbed ones with the labels of their seeds, and clean ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError, warn
from themis.measure.chunk import chunk_size
from themis.measure.tests import Ints, Tests
from themis.oracle import Changed, Motion, Oracle
from themis.perturb import Context, Perturbation, perturb
from themis.perturb.perturbation import check_fits, check_gradient
from themis.retraining.grading import CHUNK, Loss, clean_outputs, settled_oracle
from themis.runs.faults import Faults
from themis.target.target import AnyTarget

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader


@dataclass(frozen=True)
class Material:
    """Disturbed inputs with the labels of their seeds, and clean inputs."""

    disturbed: Tensor  # [inputs, ...], raw
    disturbed_labels: Tensor
    seed: Tensor  # the row of each disturbed input's seed in `pool`
    pool: Seeds
    """The search part, with labels."""
    clean: Seeds
    """The train part, with labels."""
    groups: tuple[Ints, Ints] | None = None
    """What the seeds of the pool and the clean seeds belong to; None if each stands for itself."""
    loss: Loss | None = None
    """A function of outputs and labels that replaces the task's own loss."""

    def __len__(self) -> int:
        return len(self.disturbed)


def of_faults(
    run_faults: Faults,
    pool: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    *,
    limit: int | None = None,
    clean: Seeds | None = None,
    run: Reader | None = None,
) -> Material:
    """Material from a campaign's faults: every input is identical to the one that the campaign tested.

    pool: the seeds that the campaign searched. limit: the number of faults at most, spread over seeds and outcomes.
    clean: the train part; by default none. run: the campaign's folder, whose stored inputs are used if an attack
    created them.
    """
    if not len(run_faults):
        raise DataError(
            "retraining needs faults to learn from, but the run has none: raise its magnitude or its budget"
        )
    columns = run_faults.columns
    chosen = spread_out(columns["seed_id"], columns["answer"], columns["id"], limit)
    columns = {name: column[chosen] for name, column in columns.items()}
    seed, ids = rows_of(columns["seed_id"], pool), columns["id"].tolist()
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
    clean = pool[torch.zeros(0, dtype=torch.int64)] if clean is None else clean
    oracle = settled_oracle(target, pool)
    with target.opened(), torch.no_grad():
        if not (pool.has_labels and (clean.has_labels or not len(clean))):
            pool, clean = _label_with_answers(pool, target, oracle), _label_with_answers(clean, target, oracle)
        rows = np.unique(tests.seed)
        tested = pool[torch.from_numpy(rows)].in_memory()
        within = replace(tests, seed=np.searchsorted(rows, tests.seed))
        if perturbation.passes:
            places = places or _default_places(len(tests), target)
            disturbed, labels = _attack(within, tested, perturbation, target, oracle, places)
        else:
            disturbed, labels = _disturb(within, tested, perturbation, target, oracle)
    return Material(disturbed, labels, torch.from_numpy(tests.seed), pool, clean)


def spread_out(seed_id: Ints, answer: Ints, score: NDArray[Any], limit: int | None) -> Ints:
    """The indices of the faults to take, ascending: one per seed first, then other outcomes, then repeated ones.

    Within each of these, outcomes alternate and smaller scores come first. A campaign passes the number of the test as
    the score, so that earlier faults are preferred.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, or None for all faults, got {limit}")
    if limit is None or len(seed_id) <= limit:
        return np.arange(len(seed_id))
    repeat = rank(score, answer, seed_id)
    turn = rank(score, seed_id, repeat)
    among = rank(score, answer, turn, repeat)
    return np.sort(np.lexsort((score, among, turn, repeat))[:limit])


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


def _label_with_answers(seeds: Seeds, target: AnyTarget, oracle: Oracle) -> Seeds:
    """Seeds with the model's clean answers as labels, if the oracle compares answers with those."""
    if not isinstance(oracle, Changed):
        raise DataError(
            f"retraining needs labels, but some seeds have none and oracle {oracle.spec()!r} does not define the "
            "correct answer: "
            "give (inputs, labels), or use oracle='changed', whose label is the clean answer"
        )
    if not len(seeds):
        return seeds
    warn(f"{len(seeds):,} seeds have no labels, so the model's own clean answers are used as labels")
    return seeds.with_labels(oracle.reference(clean_outputs(seeds, target), None).cpu())


def _disturb(
    tests: Tests, seeds: Seeds, perturbation: Perturbation, target: AnyTarget, oracle: Oracle
) -> tuple[Tensor, Tensor]:
    """Disturbed inputs and their labels, for perturbations that do not depend on the model."""
    features = seeds.features if perturbation.inputs == "table" else None
    context = Context(target.bounds, features=features, motion=Motion() if oracle.is_spatial else None)
    disturbed, labels = torch.empty(len(tests), *seeds.shape[1:]), _labels_of(seeds, tests.seed)
    for first in range(0, len(tests), CHUNK):
        chunk = slice(first, first + CHUNK)
        rows, values, noise = _on_device(tests[chunk], target)
        clean = seeds.take(rows.cpu()).to(target.device)
        disturbed[chunk] = perturb(perturbation, clean, values, noise, context).cpu()
        if context.motion:
            labels[chunk] = oracle.move_labels(labels[chunk].to(target.device), context.motion).cpu()
    return disturbed, labels


def _labels_of(seeds: Seeds, rows: Ints) -> Tensor:
    """A copy of the labels of the seeds `rows`."""
    assert seeds.labels is not None  # from the data, or the clean answers
    return seeds.labels[torch.from_numpy(rows)]


def _default_places(n: int, target: AnyTarget) -> tuple[Ints, Ints]:
    """Places for tests without recorded ones."""
    size = CHUNK if target.device.type == "cpu" else chunk_size(1, target.device, None)
    return np.arange(n) % size, np.full(n, size)


def _on_device(tests: Tests, target: AnyTarget) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds, theta and noise seeds of tests, on the target's device."""
    columns = (tests.seed, tests.theta, tests.noise_seed)
    seed, theta, noise_seed = (torch.from_numpy(np.ascontiguousarray(each)).to(target.device) for each in columns)
    return seed, theta, noise_seed


def _attack(
    all_tests: Tests,
    seeds: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    oracle: Oracle,
    places: tuple[Ints, Ints],
) -> tuple[Tensor, Tensor]:
    """Inputs that an attack on the model creates, each at its row of a pass of the recorded size; and labels."""
    disturbed, labels = torch.empty(len(all_tests), *seeds.shape[1:]), _labels_of(seeds, all_tests.seed)
    position, chunk = places
    for size in np.unique(chunk).tolist():
        outputs = clean_outputs(seeds, target, size)
        tests = np.flatnonzero(chunk == size)
        turn = rank(tests, position[tests])
        for k in range(int(turn.max()) + 1):
            current = tests[turn == k]
            filled = np.full(size, current[0])  # the content of the other rows does not affect these
            filled[position[current]] = current
            rows, values, noise = _on_device(all_tests[filled], target)
            context = _attack_context(rows, seeds, outputs[rows], perturbation, target, oracle)
            inputs = seeds.take(rows.cpu()).to(target.device)
            attacked = perturb(perturbation, inputs, values, noise, context)
            places_on_device = torch.from_numpy(position[current]).to(target.device)
            at = torch.from_numpy(current)
            disturbed[at] = attacked[places_on_device].cpu()
            if context.motion:
                motion = context.motion[places_on_device]
                labels[at] = oracle.move_labels(labels[at].to(target.device), motion).cpu()
    return disturbed, labels


def _attack_context(
    rows: Tensor, seeds: Seeds, outputs: Tensor, perturbation: Perturbation, target: AnyTarget, oracle: Oracle
) -> Context:
    """The context of an attack on some seeds, the same as in a campaign; outputs: their clean outputs."""
    labels = _on(target, None if seeds.labels is None else seeds.labels[rows.cpu()])
    features = seeds.features if perturbation.inputs == "table" else None
    return Context.of_task(target, oracle, outputs, labels, features)


def _on(target: AnyTarget, labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.to(target.device)
