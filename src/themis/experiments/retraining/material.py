"""Material: what a model learns from, disturbed inputs with their seeds' labels and clean ones beside them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError
from themis.measure.chunk import chunk_size, padded
from themis.measure.inputs import check_bounds
from themis.measure.tests import Floats, Ints
from themis.oracle import Changed, Oracle, choose_oracle
from themis.perturb import Context, Perturbation, perturb
from themis.perturb.perturbation import check_fits, check_gradient
from themis.runs.faults import Faults
from themis.target.target import AnyTarget

if TYPE_CHECKING:
    from themis.runs.store.reader import Reader

AT_ONCE = 256
"""Inputs that are disturbed, or answered, at a time where nothing else says how many."""


@dataclass(frozen=True)
class Material:
    """What is trained on: disturbed inputs with their seeds' labels, and clean ones."""

    disturbed: Tensor  # [inputs, ...], raw
    disturbed_labels: Tensor
    seed: Tensor  # of each disturbed input, a row of `pool`
    pool: Seeds
    """The search part, with labels."""
    clean: Seeds
    """The train part, with labels."""
    is_labelled: bool = True
    """Whether the labels are the data's; if not they are the untouched model's clean answers."""

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
    oracle: Oracle | None = None,
    run: Reader | None = None,
) -> Material:
    """Material from a campaign's faults: each one's input as the campaign saw it, to the bit.

    pool: the seeds that the campaign searched. limit: at most so many faults, spread over seeds and outcomes. clean:
    the train part; by default none. oracle: the campaign's, settled; by default the target's. run: the campaign's
    folder, whose kept inputs are taken where an attack made them.
    """
    if not len(run_faults):
        raise DataError("retraining needs faults to learn from, the run has none: raise its magnitude or its budget")
    columns = run_faults.columns
    at = spread_out(columns["seed_id"], columns["answer"], columns["id"], limit)
    seed = rows_of(columns["seed_id"][at], pool)
    kept = {} if run is None or not perturbation.passes else run.tensors(columns["id"][at].tolist())
    places = (columns["position"][at], columns["chunk"][at])
    made = of_tests(
        seed, columns["theta"][at], columns["noise_seed"][at], pool, perturbation, target, clean, oracle, places
    )
    for k, id in enumerate(columns["id"][at].tolist()):
        if id in kept:
            made.disturbed[k] = kept[id].inputs[0]
    return made


def of_tests(
    seed: Ints,
    theta: Floats,
    noise_seed: Ints,
    pool: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    clean: Seeds | None = None,
    oracle: Oracle | None = None,
    places: tuple[Ints, Ints] | None = None,
) -> Material:
    """Material from any tests, whether they broke the model or not.

    seed: a row of `pool` each. places: row and size of the forward pass that each test stood in: an attack's last bits
    depend on them.
    """
    check_fits(perturbation, pool.shape[1:])
    check_gradient(perturbation, target)
    clean = pool[torch.zeros(0, dtype=torch.int64)] if clean is None else clean
    is_labelled = pool.has_labels and (clean.has_labels or not len(clean))
    with target.opened(), torch.no_grad():
        if oracle is None:
            oracle = choose_oracle(target.oracle).settle(answers(pool, target), _on(target, pool.labels))
        if not is_labelled:
            pool, clean = _answered(pool, target, oracle), _answered(clean, target, oracle)
        rows = np.unique(seed)
        failing, within = pool[torch.from_numpy(rows)].in_memory(), np.searchsorted(rows, seed)
        if perturbation.passes:
            places = places or _in_turn(len(seed), target)
            disturbed = _attacked(within, theta, noise_seed, failing, perturbation, target, oracle, places)
        else:
            disturbed = _disturbed(within, theta, noise_seed, failing, perturbation, target)
    assert failing.labels is not None  # of the data, or answered above
    labels = failing.labels[torch.from_numpy(within)]
    return Material(disturbed, labels, torch.from_numpy(seed), pool, clean, is_labelled)


def spread_out(seed_id: Ints, answer: Ints, score: NDArray[Any], limit: int | None) -> Ints:
    """Which faults are taken, ascending: each seed once, then its other outcomes, then more of the same.

    Within these the outcomes take turns, and the smallest score is first; a campaign's is the test's number, so that
    what was found first counts.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"limit must be at least 1, or None for all faults, got {limit}")
    if limit is None or len(seed_id) <= limit:
        return np.arange(len(seed_id))
    again = rank(score, answer, seed_id)
    turn = rank(score, seed_id, again)
    among = rank(score, answer, turn, again)
    return np.sort(np.lexsort((score, among, turn, again))[:limit])


def rows_of(seed_id: Ints, pool: Seeds) -> Ints:
    """Where seeds stand in the pool."""
    known = pool.seed_id.numpy()
    order = np.argsort(known, kind="stable")
    at: Ints = order[np.searchsorted(known, seed_id, sorter=order).clip(max=len(known) - 1)]
    missing = known[at] != seed_id
    if missing.any():
        raise DataError(
            f"the pool must hold every fault's seed, {len(np.unique(seed_id[missing]))} are not in its {len(known)}, "
            f"first seed {int(seed_id[missing][0])}: give the seeds that the campaign searched"
        )
    return at


def rank(score: NDArray[Any], *keys: Ints) -> Ints:
    """How many rows with the same keys have a smaller score than each, or the same and come before it."""
    order = np.lexsort((score, *keys))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = np.any([np.diff(key[order]) != 0 for key in keys], axis=0)
    starts = np.flatnonzero(is_first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts[np.cumsum(is_first) - 1]
    return rank


def _answered(seeds: Seeds, target: AnyTarget, oracle: Oracle) -> Seeds:
    """Seeds with the model's clean answers for labels, where that is what an answer is held against."""
    if not isinstance(oracle, Changed):
        raise DataError(
            f"retraining needs labels, some seeds have none and oracle {oracle.spec()!r} does not say what is right: "
            "give (inputs, labels), or use oracle='changed', whose label is the clean answer"
        )
    if not len(seeds):
        return seeds
    warnings.warn(
        f"the model's own clean answers are taken for right, {len(seeds):,} seeds have no labels",
        RuntimeWarning,
        stacklevel=4,
    )
    return labelled(seeds, oracle.reference(answers(seeds, target), None).cpu())


def labelled(seeds: Seeds, labels: Tensor) -> Seeds:
    """The same seeds with other labels."""
    return seeds.with_labels(labels)


def answers(seeds: Seeds, target: AnyTarget, size: int = AT_ONCE) -> Tensor:
    """A model's outputs to clean seeds, float32 on its device. The target must be open."""
    parts = []
    for first in range(0, len(seeds), size):
        rows = torch.arange(first, min(first + size, len(seeds)))
        inputs = seeds.take(padded(rows, size))
        check_bounds(inputs, target.bounds, seeds.seed_id[rows])
        parts.append(target.forward(inputs.to(target.device))[: len(rows)].float())
    return torch.cat(parts)


def _disturbed(
    seed: Ints, theta: Floats, noise_seed: Ints, seeds: Seeds, perturbation: Perturbation, target: AnyTarget
) -> Tensor:
    """Inputs disturbed where the model has no part in it."""
    features = seeds.features if perturbation.inputs == "table" else None
    made = torch.empty(len(seed), *seeds.shape[1:])
    for first in range(0, len(seed), AT_ONCE):
        at = slice(first, first + AT_ONCE)
        inputs, values, noise = (
            torch.from_numpy(np.ascontiguousarray(each[at])).to(target.device) for each in (seed, theta, noise_seed)
        )
        clean = seeds.take(inputs.cpu()).to(target.device)
        made[at] = perturb(perturbation, clean, values, noise, Context(target.bounds, features=features)).cpu()
    return made


def _in_turn(n: int, target: AnyTarget) -> tuple[Ints, Ints]:
    """Places for tests that had none."""
    size = AT_ONCE if target.device.type == "cpu" else chunk_size(1, target.device, None)
    return np.arange(n) % size, np.full(n, size)


def _attacked(
    seed: Ints,
    theta: Floats,
    noise_seed: Ints,
    seeds: Seeds,
    perturbation: Perturbation,
    target: AnyTarget,
    oracle: Oracle,
    places: tuple[Ints, Ints],
) -> Tensor:
    """Inputs that an attack on the model makes, each at its own row of a pass of its own size."""
    made = torch.empty(len(seed), *seeds.shape[1:])
    position, chunk = places
    for size in np.unique(chunk).tolist():
        clean_outputs = answers(seeds, target, size)
        tests = np.flatnonzero(chunk == size)
        turn = rank(tests, position[tests])
        for k in range(int(turn.max()) + 1):
            here = tests[turn == k]
            filled = np.full(size, here[0])  # rows that no test stood in: what is in them changes no other
            filled[position[here]] = here
            rows, values, noise = (
                torch.from_numpy(np.ascontiguousarray(each[filled])).to(target.device)
                for each in (seed, theta, noise_seed)
            )
            context = _attack(rows, seeds, clean_outputs[rows], perturbation, target, oracle)
            inputs = seeds.take(rows.cpu()).to(target.device)
            disturbed = perturb(perturbation, inputs, values, noise, context)
            made[torch.from_numpy(here)] = disturbed[torch.from_numpy(position[here]).to(target.device)].cpu()
    return made


def _attack(
    rows: Tensor, seeds: Seeds, clean_outputs: Tensor, perturbation: Perturbation, target: AnyTarget, oracle: Oracle
) -> Context:
    """What an attack on some seeds may use, as a campaign gives it."""
    labels = _on(target, None if seeds.labels is None else seeds.labels[rows.cpu()])

    def margin(outputs: Tensor) -> Tensor:
        return oracle.compare(clean_outputs, outputs, labels).margin

    features = seeds.features if perturbation.inputs == "table" else None
    return Context(target.bounds, target, oracle.reference(clean_outputs, labels), oracle.loss, margin, features)


def _on(target: AnyTarget, labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.to(target.device)
