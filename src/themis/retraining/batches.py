"""The contents of each batch and the held-out seeds: functions of the random seed and a counter, without state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.compute import rng
from themis.data.groups import join_copies
from themis.data.items import OtherInputs
from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.clean import place
from themis.measure.tests import Floats, Ints
from themis.oracle import Motion, Oracle
from themis.perturb import Context, Perturbation, perturb
from themis.retraining.grading import CHUNK, grade, ideal, losses, picture_kind
from themis.retraining.material import Material
from themis.retraining.recipe import Recipe
from themis.target.target import Target

FOR_HOLD_OUT, FOR_CLEAN, FOR_STORED, FOR_FRESH, FOR_TEST, FOR_FRESH_SEEDS, FOR_CASES, FOR_BLEND = range(101, 109)
"""Purposes of random numbers; campaigns use smaller numbers."""
N_HELD = 1_000
"""Searched seeds that are held out, at most, if the recipe does not ask for more."""
MAX_ANSWERS = MAX_GATHERED = 1 << 30
"""Bytes of a model's outputs that are kept, and of inputs that are gathered in one place, at most."""
MIN_BATCHES = 100
"""Batches per epoch at least if inputs are made anew: a few hundred seeds are worth showing more than once."""
MADE_AT_ONCE = 1024
"""Inputs that are made at a time, unless they depend on the weights, which change with each batch."""
N_BINS = 5
"""Equal parts of the range of each theta, over which errors are counted."""
KEPT_WEIGHT = 0.8
"""The weight of what was measured before, each time that fresh inputs are created."""


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


def hold_out(material: Material, recipe: Recipe) -> BatchSplit:
    """Hold out a share of the failing seeds, of the other seeds that were searched, and of the clean seeds.

    Of several copies of an input, all are held out or none, and so are the seeds of a group. A model may know the clean
    seeds by heart, so the searched ones show best what it loses: if there are no fewer clean seeds to learn from, up to
    half of the searched ones are held out. Consecutive random seeds hold out other seeds, as long as there are any.
    """
    hashes = material.hashes
    n_pool, n_clean = (len(np.unique(contents)) for contents in hashes)
    share = max(recipe.hold_out, min(0.5, N_HELD / n_pool)) if n_clean >= n_pool else recipe.hold_out
    if material.groups is None:
        pool, clean = (contents.view(np.int64) for contents in hashes)
        kinds = [(pool[np.unique(material.seed.numpy())], 1, share), (pool, 0, share)]
    else:
        joined = join_copies(np.concatenate(material.groups), np.concatenate(hashes))
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
        order = np.argsort(rng.mix(FOR_HOLD_OUT, new), kind="stable")
        first = recipe.random_seed * n % max(1, len(new))
        held = np.union1d(held, new[np.roll(order, -first)[:n]])
    in_pool, in_clean = np.isin(pool, held), np.isin(clean, held)
    if not in_pool.any() and not in_clean.any():
        raise DataError(
            f"some seeds must be held out to choose the best epoch, but there are only {len(seen)}: give more seeds"
        )
    held_groups, n_pool_groups = None, int((~in_pool).sum())
    if material.groups is not None:
        held_groups, n_pool_groups = np.concatenate([pool[in_pool], clean[in_clean]]), len(np.unique(pool[~in_pool]))
    masks = (~in_pool[material.seed.numpy()], ~in_pool, ~in_clean, in_pool, in_clean)
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
    """Uniform places in the box of theta, 0..1, and noise seeds; both depend on seed and counter only."""
    shares = [rng.uniform(random_seed, purpose, k, seed_id, counter) for k in range(len(perturbation.theta))]
    return np.stack(shares, -1).astype(np.float32), rng.mix(random_seed, purpose, -1, seed_id, counter)


def theta_at(perturbation: Perturbation, shares: Floats) -> Floats:
    """Theta at places in its box."""
    low, high = (np.array([getattr(t, end) for t in perturbation.theta], np.float32) for end in ("low", "high"))
    theta: Floats = (low + shares * (high - low)).astype(np.float32).clip(low, high)
    return theta


class Disturber:
    """Seeds, joined from parts, and how they are disturbed.

    An attack uses the current weights of the model and aims away from the labels.
    """

    def __init__(self, target: Target, parts: Sequence[tuple[Seeds, Tensor]], oracle: Oracle) -> None:
        """parts: data, and the rows of it that count."""
        self.target, self.oracle, device = target, oracle, target.device
        used = [(seeds, rows) for seeds, rows in parts if len(rows)]
        given = [(seeds.inputs, rows) for seeds, rows in used]
        if all(isinstance(inputs, Tensor) for inputs, _ in given):
            n_bytes = sum(inputs[:1].nbytes * len(rows) for inputs, rows in given)
            if n_bytes <= MAX_GATHERED:
                gathered = torch.cat([inputs[rows] for inputs, rows in given])
                given = [(gathered, torch.arange(len(gathered)))]
        self.parts = [(place(inputs, device), rows.to(device)) for inputs, rows in given]
        labels = [seeds.labels[rows] for seeds, rows in used if seeds.labels is not None]  # material always has labels
        self.labels = torch.cat(labels).to(device)
        self.seed_id = torch.cat([seeds.seed_id[rows] for seeds, rows in used])
        self.any = used[0][0]
        self.others = None if self.any.others is None else _join_others([seeds[rows] for seeds, rows in used], device)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Tensor:
        """The inputs of the seeds in some rows."""
        if len(self.parts) == 1:
            inputs, own = self.parts[0]
            return inputs.index_select(0, own[rows]) if isinstance(inputs, Tensor) else inputs[own[rows]]
        (first, of_first), (second, of_second) = self.parts
        is_first = rows < len(of_first)
        taken = torch.empty(len(rows), *first.shape[1:], device=self.target.device)
        taken[is_first] = first[of_first[rows[is_first]]]
        taken[~is_first] = second[of_second[rows[~is_first] - len(of_first)]]
        return taken

    def forward(self, target: Target, inputs: Tensor, rows: Tensor) -> Tensor:
        """A target's outputs for inputs made from the seeds in some rows, with the other inputs of these seeds."""
        target.side_inputs.others = None if self.others is None else self.others.part(rows)
        return target.forward(inputs)

    def __call__(
        self, perturbation: Perturbation, rows: Tensor, theta: Tensor, noise_seed: Tensor, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Disturbed inputs of the seeds in `rows`, and their labels; `inputs` replace those of the seeds."""
        inputs, labels, oracle = self.take(rows) if inputs is None else inputs, self.labels[rows], self.oracle
        features = self.any.features if perturbation.inputs == "table" else None
        with self.target.opened() if perturbation.passes else nullcontext(), torch.no_grad():
            if perturbation.passes:
                perfect = ideal(oracle, self.forward(self.target, inputs, rows), labels)
                context = Context.of_task(self.target, oracle, perfect, labels, features)
            else:
                motion = Motion() if oracle.is_spatial else None
                context = Context(self.target.bounds, features=features, motion=motion)
            disturbed = perturb(perturbation, inputs, theta, noise_seed, context)
            return disturbed, oracle.move_labels(labels, context.motion) if context.motion else labels


def _join_others(parts: Sequence[Seeds], device: torch.device) -> OtherInputs:
    """The other inputs of seeds in several parts, which have the same ones."""
    others = [part.others for part in parts if part.others is not None]
    first = others[0]
    if len(others) < len(parts) or any(each.keys != first.keys for each in others):
        listed = ", ".join(map(repr, first.keys))
        raise DataError(f"all seeds must have the same inputs, {listed}: give training data with all of them")
    joined = {key: torch.cat([each.tensors[key] for each in others]) for key in first.tensors}
    return replace(first, tensors=joined).to(device)


class TrainingBatch(NamedTuple):
    """Inputs to train on: clean ones first, then stored disturbed ones, then fresh ones."""

    inputs: Tensor
    labels: Tensor
    rows: Tensor
    """Those of their seeds, among all that are trained on."""
    answers: Tensor
    """The old model's answers to the inputs before they were disturbed; none if they do not count."""
    share: Tensor
    """How much of the loss of each input compares with these answers, and not with labels, `[inputs]`."""
    factor: Tensor
    """What that part of the loss is multiplied by."""

    def part(self, part: slice) -> TrainingBatch:
        """Some of the inputs."""
        return TrainingBatch(*(values[part] for values in self))


class Batches:
    """The batches of every epoch; all inputs are on the target's device if they fit.

    If inputs are pictures of one class or number each, the old model's answers to the clean pictures are learnt from
    too, as far as they are correct. For this, pictures are blended with others: the old model may know its training
    pictures by heart, and its answers to blends say more. For other tasks, labels alone turned out to be as good.
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
        self.seeds = Disturber(target, [(material.clean, split.clean), (material.pool, split.pool)], oracle)
        """The seeds that are trained on."""
        self.stored = place(material.disturbed, self.device)
        self.stored_labels = material.disturbed_labels.to(self.device)
        self.stored_seed = len(split.clean) + np.searchsorted(split.pool.numpy(), material.seed.numpy())
        self.steering = Steering(perturbations, self.seeds.labels.cpu(), recipe.steer)
        self.kind = picture_kind(oracle, material.pool)
        self.has_answers = recipe.distill > 0 and self.kind != ""
        self.blend = recipe.blend if self.has_answers else 0.0
        n_disturbed = self.n_stored + self.n_fresh
        self.n = recipe.batches or max(
            -(-len(split.disturbed) // n_disturbed) if n_disturbed else 0,
            -(-len(self.seeds) // self.n_clean) if self.n_clean else 0,
            MIN_BATCHES if self.n_fresh else 0,
        )
        """Batches per epoch."""
        self.is_attack = any(perturbation.passes for perturbation in perturbations)
        self.n_block = 1 if self.is_attack else max(1, MADE_AT_ONCE // recipe.batch_size)
        """Batches that are made at once."""

    def favour(self, errors: Sequence[float]) -> None:
        """Disturb the searched or the clean seeds more often, whichever the original model answers incorrectly.

        errors: on the searched and on the clean seeds held out. Pictures of one class each are all drawn alike. Seeds
        of a group count as one: a few scenes, however long, do not stand for all others.
        """
        n_clean, n_pool = len(self.split.clean), len(self.split.pool)
        if n_clean and n_pool and len(errors) == 2 and self.kind != "class":
            share = self.steering.steer * self.split.n_pool_groups / n_pool
            self.steering.favour(np.repeat(list(reversed(errors)), [n_clean, n_pool]), share)

    def epoch(self, number: int) -> Iterator[TrainingBatch]:
        """The batches of an epoch, the first of which is 1."""
        first = (number - 1) * self.n
        clean = self._rows(len(self.seeds), self.n_clean, first, FOR_CLEAN)
        stored = self._rows(len(self.split.disturbed), self.n_stored, first, FOR_STORED)
        self.steering.fold()
        for k in range(0, self.n, self.n_block):
            n = min(self.n_block, self.n - k)
            block = self._block(clean[k : k + n], stored[k : k + n], first + k)
            for j in range(n):
                kinds = [made.part(slice(j * size, (j + 1) * size)) for size, made in block]
                yield TrainingBatch(*(torch.cat(values) for values in zip(*kinds, strict=True)))

    def _block(self, clean: Ints, stored: Ints, first: int) -> list[tuple[int, TrainingBatch]]:
        """Batches that are made at once, by kind, and how many inputs of a kind are in each of them."""
        n, block = len(clean), []
        if self.n_clean:
            rows = self._on(clean.reshape(-1))
            inputs = self._blended(rows, np.arange(n * self.n_clean) + first * self.n_clean, FOR_CLEAN)
            made = self._weighted(inputs, self.seeds.labels[rows], inputs, rows, is_clean=True)
            block.append((self.n_clean, made))
        if self.n_stored:
            at = self.split.disturbed[torch.from_numpy(stored.reshape(-1))]
            rows, at = self._on(self.stored_seed[at.numpy()]), self._on(at)
            block.append((self.n_stored, self._weighted(self.stored[at], self.stored_labels[at], None, rows)))
        if self.n_fresh:
            block.append((self.n_fresh, self._fresh(np.arange(n * self.n_fresh) + first * self.n_fresh)))
        return block

    def observe(self, outputs: Tensor, labels: Tensor) -> None:
        """Learn from the answers to a batch, in which fresh inputs come last, what breaks the model as it is now."""
        if self.n_fresh and self.steering.steer:
            self.steering.observe(1 - grade(self.oracle, outputs[-self.n_fresh :], labels[-self.n_fresh :]))

    def _fresh(self, counter: Ints) -> TrainingBatch:
        """Disturbed inputs: for each counter, a seed, a perturbation and theta are drawn."""
        random_seed = self.recipe.random_seed
        self.steering.fold(n_left=0 if self.is_attack else 1)
        draws = [rng.uniform(random_seed, purpose, counter) for purpose in (FOR_FRESH_SEEDS, FOR_CASES)]
        row, case = self.steering.choose_rows(draws[0]), self.steering.choose_cases(draws[1])
        rows, seed_id = self._on(row), self.seeds.seed_id[torch.from_numpy(row)].numpy()
        originals = self._blended(rows, counter, FOR_FRESH)
        bins = np.zeros((len(counter), self.steering.n_dimensions), dtype=np.int64)
        parts = []
        for k, perturbation in enumerate(self.perturbations):
            here = np.flatnonzero(case == k)
            if not len(here):
                continue
            shares, noise_seed = uniform_shares(perturbation, seed_id[here], counter[here], random_seed, FOR_FRESH)
            shares, bins[here, : shares.shape[1]] = self.steering.warp(k, shares)
            at, theta, noise = self._on(here), self._on(theta_at(perturbation, shares)), self._on(noise_seed)
            parts.append((at, *self.seeds(perturbation, rows[at], theta, noise, originals[at])))
        self.steering.expect(row, case, bins)
        places, disturbed, labels = (torch.cat(values) for values in zip(*parts, strict=True))
        order = places.argsort()
        return self._weighted(disturbed[order], labels[order], originals, rows)

    def _weighted(
        self, inputs: Tensor, labels: Tensor, originals: Tensor | None, rows: Tensor, is_clean: bool = False
    ) -> TrainingBatch:
        """Inputs of training seeds with the old model's answers; they are disturbed `originals`, or disturbed seeds."""
        if not self.has_answers:
            none = torch.zeros(0, device=self.device)
            return TrainingBatch(inputs, labels, rows, none, none, none)
        trust, known = self._known
        share = self.recipe.distill * trust[rows]
        if known is not None and not (self.blend and originals is not None):
            answers = known[rows]
        else:
            answers = self._ask(self.seeds.take(rows) if originals is None else originals, rows)
        factor = torch.full_like(share, 1 + self.recipe.anchor * is_clean)
        return TrainingBatch(inputs, labels, rows, answers, share, factor)

    def _blended(self, rows: Tensor, counter: Ints, purpose: int) -> Tensor:
        """Each input with another picture blended in, unless the old model answers one of them incorrectly."""
        inputs = self.seeds.take(rows)
        if not self.blend:
            return inputs
        draws = [rng.uniform(self.recipe.random_seed, FOR_BLEND, purpose, k, counter) for k in range(2)]
        others = self._on((draws[0] * len(self.seeds)).astype(np.int64))
        trust, _ = self._known
        amount = self.blend * self._on(draws[1].astype(np.float32)) * trust[rows] * trust[others]
        return torch.lerp(inputs, self.seeds.take(others), amount.to(inputs).view(-1, 1, 1, 1))

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor | None]:
        """How likely the old model makes the labels of the training seeds, 0..1, and its answers if they fit."""
        trust, answers, fits = [], [], True
        for rows in torch.split(torch.arange(len(self.seeds), device=self.device), CHUNK):
            outputs = self._ask(self.seeds.take(rows), rows)
            fits = outputs.nbytes / len(outputs) * len(self.seeds) <= MAX_ANSWERS
            trust.append((-losses(self.oracle, outputs, self.seeds.labels[rows])).exp().float())
            answers += [outputs] if fits else []
        return torch.cat(trust), torch.cat(answers) if fits else None

    def _ask(self, inputs: Tensor, rows: Tensor) -> Tensor:
        """The old model's answers to inputs made from the seeds in some rows."""
        chunks = zip(torch.split(inputs, CHUNK), torch.split(rows, CHUNK), strict=True)
        with torch.no_grad():
            return torch.cat([self.seeds.forward(self.old, *chunk).float() for chunk in chunks])

    def _rows(self, n: int, n_per_batch: int, first: int, purpose: int) -> Ints:
        """The rows in each batch of an epoch, `[batches, n_per_batch]`, out of `n`."""
        if not n_per_batch:
            return np.zeros((self.n, 0), dtype=np.int64)
        steps = walk(n, first * n_per_batch, self.n * n_per_batch, self.recipe.random_seed, purpose)
        return steps.reshape(self.n, n_per_batch)

    def _on(self, values: Tensor | Floats | Ints) -> Tensor:
        return torch.as_tensor(values, device=self.device)


class Steering:
    """The error of the model by perturbation, part of the range of each theta, and class, over recent fresh inputs."""

    def __init__(self, perturbations: Sequence[Perturbation], labels: Tensor, steer: float) -> None:
        """labels: those of the seeds that are trained on. steer: the share of the draws that follows the errors."""
        self.weight = np.ones(len(labels))
        self.steer, self.n_dimensions = steer, max(len(perturbation.theta) for perturbation in perturbations)
        is_class = labels.ndim == 1 and not labels.is_floating_point()
        self.label = np.unique(labels.numpy(), return_inverse=True)[1] if is_class else np.zeros(len(labels), np.int64)
        n_cases, n_classes = len(perturbations), int(self.label.max()) + 1
        shapes = {"case": (n_cases,), "theta": (n_cases, self.n_dimensions, N_BINS), "label": (n_classes,)}
        self.wrong = {name: np.ones(shape) for name, shape in shapes.items()}
        self.total = {name: np.ones(shape) for name, shape in shapes.items()}
        self._observed: list[tuple[tuple[Ints, Ints, Ints], list[Tensor]]] = []
        """Of fresh inputs that were made at once: where they are, and the errors so far."""

    def favour(self, error: Floats, share: float) -> None:
        """Let a share of the draws follow the clean error of the original model, given for each seed."""
        if error.sum() > 0:
            self.weight = (1 - share) / len(error) + share * error / error.sum()

    def choose_rows(self, draws: Any) -> Ints:
        """Rows of the seeds that are trained on, for uniform draws in 0..1."""
        return _choose(self.weight * self._weights("label")[self.label], draws)

    def choose_cases(self, draws: Any) -> Ints:
        """Perturbations, for uniform draws in 0..1."""
        return _choose(self._weights("case"), draws)

    def warp(self, case: int, shares: Floats) -> tuple[Floats, Ints]:
        """Uniform places in the box of theta, moved to where errors are; and the bins that they are in."""
        weights = self._weights("theta")[case]
        warped = np.empty_like(shares)
        for k in range(shares.shape[1]):
            ends = np.concatenate([[0.0], np.cumsum(weights[k])])
            warped[:, k] = np.interp(shares[:, k] * ends[-1], ends, np.linspace(0, 1, N_BINS + 1))
        bins: Ints = (warped * N_BINS).astype(np.int64).clip(0, N_BINS - 1)
        return warped, bins

    def expect(self, row: Ints, case: Ints, bins: Ints) -> None:
        """Note which fresh inputs come next, in the order in which their errors will be observed."""
        self._observed.append(((row, case, bins), []))

    def observe(self, errors: Tensor) -> None:
        """The error of each fresh input of a batch, 0..1."""
        self._observed[-1][1].append(errors.detach())

    def fold(self, n_left: int = 0) -> None:
        """Count the errors that were observed, except those on the last `n_left` blocks of fresh inputs."""
        while len(self._observed) > n_left:
            expected, observed = self._observed.pop(0)
            if not observed:
                continue
            errors = torch.cat(observed).double().cpu().numpy()
            row, case, bins = (values[: len(errors)] for values in expected)
            by_theta = case[:, None], np.arange(self.n_dimensions), bins
            for name, at in {"case": (case,), "theta": by_theta, "label": (self.label[row],)}.items():
                self.wrong[name] *= KEPT_WEIGHT
                self.total[name] *= KEPT_WEIGHT
                np.add.at(self.wrong[name], at, errors[:, None] if name == "theta" else errors)
                np.add.at(self.total[name], at, 1.0)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The errors, from which a training resumes."""
        self.fold()
        groups = (("wrong", self.wrong), ("total", self.total))
        return {key: {name: torch.from_numpy(counts.copy()) for name, counts in group.items()} for key, group in groups}

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue with stored errors."""
        for name in self.wrong:
            self.wrong[name], self.total[name] = (state[key][name].numpy().copy() for key in ("wrong", "total"))

    def _weights(self, name: str) -> Any:
        """Shares of the draws, along the last axis."""
        error = self.wrong[name] / self.total[name]
        n = error.shape[-1]
        share = error / np.maximum(error.sum(-1, keepdims=True), 1e-12)
        return (1 - self.steer) / n + self.steer * share


def _choose(weights: Any, draws: Any) -> Ints:
    """Indices with probabilities in proportion to weights, for uniform draws in 0..1."""
    cumulative = np.cumsum(weights)
    indices: Ints = np.searchsorted(cumulative, draws * cumulative[-1], side="right").clip(max=len(cumulative) - 1)
    return indices
