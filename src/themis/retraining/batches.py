"""The contents of each batch and the held-out seeds: functions of the random seed and a counter, without state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute import rng
from themis.data.groups import Hashes, join_copies
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.inputs import place
from themis.measure.tests import Floats, Ints
from themis.oracle import Changed, Motion, Oracle, Regression, Wrong
from themis.perturb import Context, Perturbation, perturb
from themis.retraining.grading import CHUNK, Loss, grade, ideal, losses
from themis.retraining.material import Material
from themis.retraining.recipe import Recipe
from themis.retraining.steering import Steering
from themis.target.target import Target

FOR_HOLD_OUT, FOR_CLEAN, FOR_STORED, FOR_FRESH, FOR_TEST, FOR_FRESH_SEEDS, FOR_CASES, FOR_BLEND = range(101, 109)
"""Purposes of random numbers; campaigns use smaller numbers."""
N_HELD = 1_000
"""Searched seeds that are held out, at most, if the recipe does not ask for more."""
MAX_ANSWERS = 1 << 30
"""Bytes of a model's outputs that are kept, at most."""
MADE_AT_ONCE = 1024
"""Inputs that are made at a time, unless they depend on the weights, which change with each batch."""


@dataclass(frozen=True)
class BatchSplit:
    """Rows that are trained on, and rows of the pool and of the clean seeds that are held out."""

    held_groups: Ints | None  # of the pool, then of the clean seeds; None if each seed stands for itself
    n_pool_groups: int  # groups of the pool that are trained on, or its seeds if each stands for itself
    disturbed: Tensor  # rows of the material's disturbed inputs
    pool: Tensor  # rows of its pool, used as clean inputs
    clean: Tensor  # rows of its clean seeds
    held_pool: Tensor
    held_clean: Tensor


def hold_out(
    material: Material,
    hashes: tuple[Hashes, Hashes],
    recipe: Recipe,
    groups: tuple[Ints, Ints] | None = None,
) -> BatchSplit:
    """Hold out a share of the failing seeds, of the other seeds that were searched, and of the clean seeds.

    hashes: those of the contents of the pool and of the clean seeds. Of several copies of an input, all are held out or
    none, and so are the seeds of a group. A model may know the clean seeds by heart, so the searched ones show best
    what it loses: if there are no fewer clean seeds to learn from, up to half of the searched ones are held out.
    """
    n_pool, n_clean = (len(np.unique(contents)) for contents in hashes)
    share = recipe.hold_out
    if n_clean >= n_pool:
        share = max(share, min(0.5, N_HELD / n_pool))
    if groups is None:
        pool, clean = (contents.view(np.int64) for contents in hashes)
        failing = pool[np.unique(material.seed.numpy())]
        kinds = [(failing, 1, share), (pool, 0, share)]
    else:
        joined = join_copies(np.concatenate(groups), np.concatenate(hashes))
        pool, clean = np.split(joined, [len(hashes[0])])
        kinds = [(pool, 1, share)]
        if len(np.unique(pool)) < 2:
            raise DataError(
                f"the searched seeds must be in at least 2 groups, one to learn from and one to hold out, but all "
                f"{len(pool):,} belong to the same: search more seeds, or make the groups smaller"
            )
    held = seen = np.zeros(0, np.int64)
    for candidates, n_trained, held_share in [*kinds, (clean, 1, recipe.hold_out)]:  # n_trained must not be held out
        new = np.setdiff1d(candidates, seen)
        seen = np.union1d(seen, new)
        n = min(max(1, round(held_share * len(new))), max(0, len(new) - n_trained))
        order = np.argsort(rng.mix(recipe.random_seed, FOR_HOLD_OUT, new), kind="stable")
        held = np.union1d(held, new[order[:n]])
    in_pool, in_clean = np.isin(pool, held), np.isin(clean, held)
    if not in_pool.any() and not in_clean.any():
        raise DataError(
            f"some seeds must be held out to choose the best epoch, but there are only {len(seen)}: give more seeds"
        )
    is_trained = ~in_pool[material.seed.numpy()]
    masks = (is_trained, ~in_pool, ~in_clean, in_pool, in_clean)
    held_groups = None if groups is None else np.concatenate([pool[in_pool], clean[in_clean]])
    n_pool_groups = len(pool[~in_pool]) if groups is None else len(np.unique(pool[~in_pool]))
    split = BatchSplit(held_groups, n_pool_groups, *(torch.from_numpy(np.flatnonzero(mask)) for mask in masks))
    if recipe.mix > 0 and recipe.fresh < 1 and not len(split.disturbed):
        raise DataError(
            "retraining needs disturbed inputs to learn from, but there are none: run a campaign that finds faults"
        )
    if not len(split.clean) + len(split.pool):
        raise DataError("retraining needs seeds to train on, but all are held out: give more seeds")
    return split


def walk(n: int, start: int, count: int, random_seed: int, purpose: int) -> Ints:
    """Steps `start` to `start + count` of an endless walk over `n` rows, which are shuffled again for each lap."""
    steps = np.arange(start, start + count)
    lap, within = np.divmod(steps, n)
    orders = [
        np.argsort(rng.uniform(random_seed, purpose, number, np.arange(n)), kind="stable")
        for number in range(int(lap[0]), int(lap[-1]) + 1)
    ]
    rows: Ints = np.stack(orders)[lap - lap[0], within]
    return rows


def uniform_shares(
    perturbation: Perturbation, seed_id: Ints, counter: Ints, random_seed: int, purpose: int
) -> tuple[Floats, Ints]:
    """Uniform places in the box of theta, 0..1, and noise seeds, as functions of seed and counter."""
    shares = [rng.uniform(random_seed, purpose, k, seed_id, counter) for k in range(len(perturbation.theta))]
    return np.stack(shares, -1).astype(np.float32), rng.mix(random_seed, purpose, -1, seed_id, counter)


def theta_at(perturbation: Perturbation, shares: Floats) -> Floats:
    """Theta at places in its box."""
    low, high = (np.array([getattr(t, end) for t in perturbation.theta], np.float32) for end in ("low", "high"))
    theta: Floats = (low + shares * (high - low)).astype(np.float32).clip(low, high)
    return theta


class Disturber:
    """Disturbs seeds. An attack uses the current weights of the model and aims away from the labels."""

    def __init__(self, target: Target, seeds: Seeds, oracle: Oracle) -> None:
        assert seeds.labels is not None  # material always has labels
        self.target, self.oracle, self.seeds = target, oracle, seeds
        self.inputs, self.labels = place(seeds.inputs, target.device), seeds.labels.to(target.device)

    def __call__(
        self,
        perturbation: Perturbation,
        rows: Tensor,
        theta: Tensor,
        noise_seed: Tensor,
        inputs: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Disturbed inputs of the seeds in `rows`, and their labels; `inputs` replace those of the seeds."""
        inputs, labels, oracle = self.inputs[rows] if inputs is None else inputs, self.labels[rows], self.oracle
        features = self.seeds.features if perturbation.inputs == "table" else None
        with self.target.opened() if perturbation.passes else nullcontext(), torch.no_grad():
            if perturbation.passes:
                perfect = ideal(oracle, self.target.forward(inputs), labels)
                context = Context.of_task(self.target, oracle, perfect, labels, features)
            else:
                motion = Motion() if oracle.is_spatial else None
                context = Context(self.target.bounds, features=features, motion=motion)
            disturbed = perturb(perturbation, inputs, theta, noise_seed, context)
            return disturbed, oracle.move_labels(labels, context.motion) if context.motion else labels


def show_classes(oracle: Oracle, seeds: Seeds) -> bool:
    """Whether inputs are pictures that show one class each."""
    return isinstance(oracle, Changed | Wrong) and len(seeds.shape) == 4


def show_numbers(oracle: Oracle, seeds: Seeds) -> bool:
    """Whether inputs are pictures that show one number each, such as the angle to steer at."""
    return isinstance(oracle, Regression) and len(seeds.shape) == 4


def can_distill(oracle: Oracle, seeds: Seeds) -> bool:
    """Whether the old model's answers may count."""
    return show_classes(oracle, seeds) or show_numbers(oracle, seeds)


class TrainingBatch(NamedTuple):
    """Inputs to train on: clean ones first, then stored disturbed ones, then fresh ones."""

    inputs: Tensor
    labels: Tensor
    answers: Tensor
    """The old model's answers to the inputs before they were disturbed; none if they do not count."""
    share: Tensor
    """The share of the loss of each input, `[inputs]`, that compares with these instead of with labels."""
    factor: Tensor
    """How much more these count than labels."""

    def rows(self, part: slice) -> TrainingBatch:
        """Some of the inputs."""
        return TrainingBatch(*(values[part] for values in self))


class Batches:
    """The batches of every epoch; all inputs are on the target's device if they fit.

    If inputs are pictures of one class or number each, the old model's answer to the clean picture counts, as far as it
    is correct, and pictures are blended with others: the old model has learnt those of its training by heart, and its
    answers to blended ones say more. For other tasks, labels alone turned out to be as good.
    """

    def __init__(
        self,
        old: Target,
        target: Target,
        material: Material,
        split: BatchSplit,
        perturbations: Sequence[Perturbation],
        oracle: Oracle,
        recipe: Recipe,
    ) -> None:
        """`old`, whose answers count, must be open when batches are made; `target` is the model that is trained.

        recipe: with the values of the task.
        """
        assert recipe.steer is not None
        self.recipe, self.split, self.perturbations, self.device = recipe, split, perturbations, target.device
        self.old, self.oracle = old, oracle
        self.n_clean, self.n_stored, self.n_fresh = recipe.counts()
        self.parts = [
            (Disturber(target, seeds, oracle), rows)
            for seeds, rows in ((material.clean, split.clean), (material.pool, split.pool))
            if len(rows)
        ]
        """The seeds that are trained on, and their rows."""
        self.n_seeds = sum(len(rows) for _, rows in self.parts)
        self.stored = place(material.disturbed, self.device)
        self.labels = material.disturbed_labels.to(self.device)
        self.stored_seed = len(split.clean) + np.searchsorted(split.pool.numpy(), material.seed.numpy())
        labels = [part.labels[rows.to(self.device)].cpu() for part, rows in self.parts]
        self.steering = Steering(perturbations, torch.cat(labels), recipe.steer)
        self.shows_classes = show_classes(oracle, material.pool)
        self.has_answers = recipe.distill > 0 and can_distill(oracle, material.pool)
        self.blend = recipe.blend if self.has_answers else 0.0
        n_disturbed = self.n_stored + self.n_fresh
        n_needed = (
            -(-len(split.disturbed) // n_disturbed) if n_disturbed else 0,
            -(-self.n_seeds // self.n_clean) if self.n_clean else 0,
        )
        self.n = recipe.batches or max(n_needed)
        """Batches per epoch."""
        is_attack = any(perturbation.passes for perturbation in perturbations)
        self.n_block = 1 if is_attack else max(1, MADE_AT_ONCE // recipe.batch_size)
        """Batches that are made at once."""

    def favour(self, grades: Sequence[Tensor]) -> None:
        """Disturb the searched or the clean seeds more often, whichever the original model answers incorrectly.

        grades: on the searched and on the clean seeds held out. Pictures of one class each are all drawn alike. Seeds
        of a group count as one: a few scenes, however long, do not stand for all others.
        """
        if len(grades) == len(self.parts) == 2 and not self.shows_classes:
            errors = [1 - float(part.mean()) for part in reversed(grades)]
            share = self.steering.steer * (self.split.n_pool_groups / len(self.split.pool))
            self.steering.favour(np.repeat(errors, [len(rows) for _, rows in self.parts]), share)

    def epoch(self, number: int) -> Iterator[TrainingBatch]:
        """The batches of an epoch, the first of which is 1."""
        first = (number - 1) * self.n
        clean = self._rows(self.n_seeds, self.n_clean, first, FOR_CLEAN)
        stored = self._rows(len(self.split.disturbed), self.n_stored, first, FOR_STORED)
        for k in range(0, self.n, self.n_block):
            n = min(self.n_block, self.n - k)
            block: list[tuple[int, TrainingBatch]] = []
            if self.n_clean:
                counter = np.arange(n * self.n_clean) + (first + k) * self.n_clean
                block.append((self.n_clean, self._clean(clean[k : k + n].reshape(-1), counter)))
            if self.n_stored:
                block.append((self.n_stored, self._stored(stored[k : k + n].reshape(-1))))
            if self.n_fresh:
                counter = np.arange(n * self.n_fresh) + (first + k) * self.n_fresh
                block.append((self.n_fresh, self._fresh(counter)))
            for j in range(n):
                kinds = [made.rows(slice(j * size, (j + 1) * size)) for size, made in block]
                yield TrainingBatch(*(torch.cat(values) for values in zip(*kinds, strict=True)))

    def observe(self, outputs: Tensor, labels: Tensor) -> None:
        """Learn from the answers to a batch, in which fresh inputs come last, what breaks the model as it is now."""
        if self.n_fresh and self.steering.steer:
            self.steering.observe(1 - grade(self.oracle, outputs[-self.n_fresh :], labels[-self.n_fresh :]))

    def _clean(self, rows: Ints, counter: Ints) -> TrainingBatch:
        inputs, labels = self._take(rows)
        inputs = self._blended(inputs, rows, counter, FOR_CLEAN)
        return self._weighted(inputs, labels, inputs, rows, is_clean=True)

    def _stored(self, rows: Ints) -> TrainingBatch:
        disturbed = self.split.disturbed[torch.from_numpy(rows)]
        seeds, at = self.stored_seed[disturbed.numpy()], disturbed.to(self.device)
        return self._weighted(self.stored[at], self.labels[at], None, seeds)

    def _fresh(self, counter: Ints) -> TrainingBatch:
        """Disturbed inputs: for each counter, a seed, a perturbation and theta are drawn."""
        random_seed = self.recipe.random_seed
        self.steering.fold()
        draws = [rng.uniform(random_seed, purpose, counter) for purpose in (FOR_FRESH_SEEDS, FOR_CASES)]
        row, case = self.steering.choose_rows(draws[0]), self.steering.choose_cases(draws[1])
        originals = self._blended(self._take(row)[0], row, counter, FOR_FRESH)
        bins = np.zeros((len(counter), self.steering.n_dimensions), dtype=np.int64)
        parts: list[tuple[Ints, Tensor, Tensor]] = []
        for part, places, seeds in self._locate(row):
            for k, perturbation in enumerate(self.perturbations):
                is_case = case[places] == k
                here, rows = places[is_case], seeds[torch.from_numpy(is_case)]
                if not len(here):
                    continue
                seed_id = part.seeds.seed_id[rows].numpy()
                shares, noise_seed = uniform_shares(perturbation, seed_id, counter[here], random_seed, FOR_FRESH)
                shares, bins[here, : shares.shape[1]] = self.steering.warp(k, shares)
                theta = theta_at(perturbation, shares)
                seed, point, noise, place = (_on(self.device, values) for values in (rows, theta, noise_seed, here))
                parts.append((here, *part(perturbation, seed, point, noise, originals[place])))
        self.steering.expect(row, case, bins)
        return self._weighted(*self._in_order(parts), originals, row)

    def _weighted(
        self, inputs: Tensor, labels: Tensor, originals: Tensor | None, rows: Ints, is_clean: bool = False
    ) -> TrainingBatch:
        """Inputs of training seeds with the old model's answers; they are disturbed `originals`, or disturbed seeds."""
        if not self.has_answers:
            none = torch.zeros(0, device=self.device)
            return TrainingBatch(inputs, labels, none, none, none)
        (trust, known), seeds = self._known, _on(self.device, rows)
        share = self.recipe.distill * trust[seeds]
        if known is not None and not (self.blend and originals is not None):
            answers = known[seeds]
        else:
            answers = self._ask(self._take(rows)[0] if originals is None else originals)
        return TrainingBatch(inputs, labels, answers, share, torch.full_like(share, 1 + self.recipe.anchor * is_clean))

    def _blended(self, inputs: Tensor, rows: Ints, counter: Ints, purpose: int) -> Tensor:
        """Each picture with another one blended in, unless the old model answers one of them incorrectly."""
        if not self.blend or not len(rows):
            return inputs
        draws = [rng.uniform(self.recipe.random_seed, FOR_BLEND, purpose, k, counter) for k in range(2)]
        others = (draws[0] * self.n_seeds).astype(np.int64)
        trust, _ = self._known
        amount = self.blend * _on(self.device, draws[1].astype(np.float32))
        amount = amount * trust[_on(self.device, rows)] * trust[_on(self.device, others)]
        return torch.lerp(inputs, self._take(others)[0], amount.to(inputs).view(-1, 1, 1, 1))

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor | None]:
        """How likely the old model makes the labels of the training seeds, 0..1, and its answers if they fit."""
        trust, answers, fits = [], [], True
        for rows in np.array_split(np.arange(self.n_seeds), -(-self.n_seeds // CHUNK)):
            inputs, labels = self._take(rows)
            outputs = self._ask(inputs)
            fits = outputs.nbytes / len(outputs) * self.n_seeds <= MAX_ANSWERS
            trust.append((-losses(self.oracle, outputs, labels)).exp().float())
            answers += [outputs] if fits else []
        return torch.cat(trust), torch.cat(answers) if fits else None

    def _ask(self, inputs: Tensor) -> Tensor:
        """The old model's answers."""
        with torch.no_grad():
            return torch.cat([self.old.forward(chunk).float() for chunk in torch.split(inputs, CHUNK)])

    def _take(self, rows: Ints) -> tuple[Tensor, Tensor]:
        """Inputs and labels of seeds that are trained on."""
        parts = []
        for part, places, seeds in self._locate(rows):
            at = seeds.to(self.device)
            parts.append((places, part.inputs[at], part.labels[at]))
        return self._in_order(parts)

    def _in_order(self, parts: list[tuple[Ints, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Inputs and labels by place."""
        if len(parts) == 1:
            return parts[0][1:]
        order = _on(self.device, np.argsort(np.concatenate([places for places, _, _ in parts])))
        return torch.cat([inputs for _, inputs, _ in parts])[order], torch.cat([labels for *_, labels in parts])[order]

    def _locate(self, rows: Ints) -> Iterator[tuple[Disturber, Ints, Tensor]]:
        """For each part of the training seeds: the part, the places of its seeds in `rows`, and their rows in it."""
        offset = 0
        for part, trained in self.parts:
            places = np.flatnonzero((rows >= offset) & (rows < offset + len(trained)))
            yield part, places, trained[torch.from_numpy(rows[places] - offset)]
            offset += len(trained)

    def _rows(self, n: int, n_per_batch: int, first: int, purpose: int) -> Ints:
        """The rows in each batch of an epoch, `[batches, n_per_batch]`, out of `n`."""
        if not n_per_batch:
            return np.zeros((self.n, 0), dtype=np.int64)
        steps = walk(n, first * n_per_batch, self.n * n_per_batch, self.recipe.random_seed, purpose)
        return steps.reshape(self.n, n_per_batch)


def _on(device: torch.device, values: Tensor | NDArray[np.float32] | Ints) -> Tensor:
    return (values if isinstance(values, Tensor) else torch.from_numpy(values)).to(device)


MAX_TESTS = 2_000
"""Uniform tests of the held-out seeds after each epoch, at most."""
MAX_TESTS_PER_SEED = 20
"""Uniform tests per held-out seed, at most."""
N_ATTACKS = 256
"""Number of tests if each costs passes of its own: an attack is computed again for the model of each epoch."""
MAX_CLEAN = 10_000
"""Held-out seeds on which the clean score is measured, at most."""


class HeldOutScore(NamedTuple):
    """Mean grade and mean loss of a model on held-out seeds."""

    score: float
    loss: float
    grades: tuple[Tensor, ...]
    """The grades on searched seeds and on clean seeds, which a model may have memorised; each if there are any."""
    groups: tuple[Tensor, ...] = ()
    """What these seeds belong to, in the same order; none if each stands for itself."""


class HeldOut:
    """Runs the same tests of the held-out seeds after every epoch, with theta drawn uniformly."""

    def __init__(
        self,
        target: Target,
        material: Material,
        split: BatchSplit,
        perturbations: Mapping[str, Perturbation],
        oracle: Oracle,
        loss: Loss,
        recipe: Recipe,
    ) -> None:
        self.target, self.oracle, self.loss, self.perturbations = target, oracle, loss, perturbations
        self.parts = [
            Disturber(target, seeds, oracle)
            for seeds in (material.pool[split.held_pool], material.clean[split.held_clean])
            if len(seeds)
        ]
        held = (material.pool.seed_id[split.held_pool], material.clean.seed_id[split.held_clean])
        seed_id = torch.cat(held).numpy()
        n = len(seed_id)
        self.groups = None if split.held_groups is None else torch.from_numpy(split.held_groups)
        self.tests: dict[str, tuple[Tensor, ...]] = {}
        for name, perturbation in perturbations.items():
            n_tests = N_ATTACKS if perturbation.passes else min(MAX_TESTS, MAX_TESTS_PER_SEED * n)
            rows = walk(n, 0, max(n, n_tests), recipe.random_seed, FOR_TEST)
            self.clean_rows = torch.from_numpy(rows[: min(n, MAX_CLEAN)])
            rows, counter = rows[:n_tests], np.arange(n_tests)
            shares, noise_seed = uniform_shares(perturbation, seed_id[rows], counter, recipe.random_seed, FOR_TEST)
            tests = (rows, theta_at(perturbation, shares), noise_seed)
            self.tests[name] = tuple(map(torch.from_numpy, tests))

    def clean(self) -> HeldOutScore:
        """The score of the target on the clean inputs."""
        return self._measure(self.clean_rows)

    def disturbed(self) -> dict[str, HeldOutScore]:
        """The scores of the target on the disturbed inputs, by the name of the perturbation."""
        return {
            name: self._measure(rows, self.perturbations[name], *tests) for name, (rows, *tests) in self.tests.items()
        }

    def _measure(self, rows: Tensor, perturbation: Perturbation | None = None, *tests: Tensor) -> HeldOutScore:
        total_loss, offset, grades, groups = 0.0, 0, [], []
        with self.target.opened(), torch.no_grad():
            for part in self.parts:
                in_part = ((rows >= offset) & (rows < offset + len(part.labels))).nonzero()[:, 0]
                part_grades = []
                for chunk in torch.split(in_part, CHUNK):
                    seeds = (rows[chunk] - offset).to(self.target.device)
                    if perturbation is None:
                        inputs, labels = part.inputs[seeds], part.labels[seeds]
                    else:
                        theta, noise_seed = (values[chunk].to(seeds.device) for values in tests)
                        inputs, labels = part(perturbation, seeds, theta, noise_seed)
                    outputs = self.target.forward(inputs).float()
                    part_grades.append(grade(self.oracle, outputs, labels).double().cpu())
                    total_loss += float(self.loss(outputs, labels).double().mean()) * len(chunk)
                if len(in_part):
                    grades.append(torch.cat(part_grades))
                    groups += [] if self.groups is None else [self.groups[rows[in_part]]]
                offset += len(part.labels)
        score = float(torch.cat(grades).mean())
        return HeldOutScore(score, total_loss / len(rows), tuple(grades), tuple(groups))
