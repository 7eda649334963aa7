"""Sensitivity convergence coverage (SCC): Themis's own coverage, as one of the criteria."""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar, Unpack

import torch
from torch import Tensor

from themis.compute import native
from themis.criteria import Laws
from themis.errors import UsageError
from themis.judge.coverage import MIN_UNMOVED_TESTS, PAPER_DRAWS, Rule
from themis.measure.moments import Moments
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.options import CriterionOptions
from themis_lab.criteria.readings import Layout, Readings

SENSITIVITIES_AT_ONCE = 2**20
"""Tests times neurons whose running sums are held at a time."""

TOP_NEURONS = 100
CHAIN_STEPS = 1000
ACCEPTANCE_RATE = 0.5
CHAIN_BATCH = 32
"""MindArmour's defaults: neurons per layer, steps of a chain, acceptance rate to exceed, tests per batch."""


class SCC(Criterion):
    """Neurons whose mean sensitivity `|value - clean value|` is known to `tolerance`, over all that are not dead.

    `themis` judges like campaigns do, in closed form and over every neuron: see `judge.coverage.Rule` for tolerance,
    draws and alpha. A neuron is dead as long as it never moved and was the same on every clean input; a neuron that
    never moved counts as unseen before 3,000 tests. The score can fall: further tests may show a wider spread. The
    order of the tests matters only for rounding. A test is left out if any of its sensitivities is not finite.

    `mindarmour` takes the neurons (100 per layer) that the first batch moves most. For each batch of 32 tests and each
    neuron, a Metropolis chain whose target is the standard normal starts at the batch's sensitivities and takes 1,000
    steps, uniform and as wide as their mean; the neuron counts if more than half are accepted. The score is the share
    over all batches so far, and only changes when a batch is full. It depends on the order and cannot be merged.
    """

    name = "scc"
    laws = Laws(bounded=True, monotone=False, order_free=True, mergeable=True)
    learns = False
    needs = frozenset({"clean"})
    default_neurons = "element"
    variants: ClassVar = {
        "themis": "themis.judge.coverage: Rule, cover (all neurons, exact judge)",
        "mindarmour": "github.com/mindspore-ai/mindarmour, fuzz_testing/sensitivity_convergence_coverage.py: "
        "SensitivityConvergenceCoverage",
    }

    def __init__(
        self,
        tolerance: float = 5e-4,
        draws: int = PAPER_DRAWS,
        alpha: float | None = 0.95,
        random_seed: int = 0,
        **options: Unpack[CriterionOptions],
    ) -> None:
        if not 0 < tolerance < math.inf:
            raise UsageError(f"scc: tolerance must be positive, got {tolerance}")
        if draws < 2:
            raise UsageError(f"scc: draws must be at least 2, got {draws}")
        if alpha is not None and not 0 < alpha < 1:
            raise UsageError(f"scc: alpha must be between 0 and 1, or None for the point value, got {alpha}")
        super().__init__(**options)
        self.tolerance, self.draws, self.alpha, self.random_seed = tolerance, draws, alpha, random_seed
        if self.variant == "mindarmour":
            self.laws = Laws(bounded=True, monotone=False, order_free=False, mergeable=False)

    def score(self) -> float:
        return int(self.state["converged"]) / max(int(self.state["judged"]), 1) if self.state else 0.0

    def _initial_state(self, readings: Readings) -> dict[str, Tensor]:
        n, device = readings.layout.n_neurons, readings.values.device
        state = {name: torch.zeros((), dtype=torch.int64, device=device) for name in ("count", "converged", "judged")}
        if self.variant == "mindarmour":
            return state | {"waiting": torch.zeros(0, n, device=device)}
        zeros = torch.zeros(n, dtype=torch.float64, device=device)
        state |= {name: zeros.clone() for name in ("shift", "sums", "squares")}
        flags = {name: torch.zeros(n, dtype=torch.bool, device=device) for name in ("moved", "varied")}
        return state | flags | {"clean": torch.zeros(n, dtype=readings.values.dtype, device=device)}

    def _update(self, readings: Readings) -> Tensor:
        if self.variant == "themis" and readings.clean is not None:
            return self._fold(readings)
        sensitivities = readings.sensitivities(self.name)  # raises an error without clean inputs
        is_kept = sensitivities.isfinite().all(1)
        raised = torch.zeros_like(is_kept)
        for rows in torch.split(is_kept.nonzero().squeeze(1), CHAIN_BATCH):
            raised[rows] = self._run_chains(sensitivities[rows], readings.layout)
        return raised

    # Themis

    def _fold(self, readings: Readings) -> Tensor:
        """Take in tests one after another; returns which of them raised the score."""
        old, values, clean, rows = self.state, readings.values, readings.clean, readings.clean_rows
        assert clean is not None
        first = clean[0] if rows is None else clean.index_select(0, rows[:1])[0]
        counts = old["count"] + torch.arange(1, len(values) + 1, device=values.device)
        state = old | {name: old[name].clone() for name in ("sums", "squares", "moved", "varied")}
        is_first = old["count"] == 0
        state["shift"] = torch.where(is_first, (values[0] - first).abs().double(), old["shift"])
        state["clean"] = torch.where(is_first, first, old["clean"])
        converged, judged, n_finite = converge(values, clean, rows, counts, self._limits(counts), state)
        earlier, judged_earlier = (
            torch.cat([old[name][None], numbers[:-1]])
            for name, numbers in (("converged", converged), ("judged", judged))
        )
        raised: Tensor = converged * judged_earlier.clamp(min=1) > earlier * judged.clamp(min=1)
        state |= {"count": counts[-1].clone(), "converged": converged[-1].clone(), "judged": judged[-1].clone()}
        is_finite = n_finite == values.shape[1]
        if bool(is_finite.all()):  # checked last, so that a GPU is waited for only once
            self.state = state
            return raised
        kept, raised = is_finite.nonzero().squeeze(1), torch.zeros_like(is_finite)
        if len(kept):
            raised[kept] = self._fold(readings[kept])
        return raised

    def _limits(self, counts: Tensor) -> Tensor:
        """The M2 below which a neuron has converged at each count of tests, float64; 0 where it cannot."""
        n = counts.double()
        return torch.where(n > 3, n * (n - 3) * self.draws * _variance(self.tolerance, self.draws, self.alpha), 0.0)

    def _merge_state(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = self.state
        merged = _moments(mine).merge(_moments(other))
        moved = mine["moved"] | other["moved"]
        varied = mine["varied"] | other["varied"]
        if int(mine["count"]) and int(other["count"]):
            varied = varied | (mine["clean"] != other["clean"])
        zeros = torch.zeros_like(merged.mean)
        counts = merged.count[None]
        is_converged = _is_converged(zeros[:, None], merged.m2[:, None], moved[:, None], counts, self._limits(counts))
        return {
            "count": merged.count,
            "converged": (is_converged[:, 0] & (moved | varied)).sum(),
            "judged": (moved | varied).sum(),
            "shift": merged.mean,
            "sums": zeros,
            "squares": merged.m2,
            "moved": moved,
            "varied": varied,
            "clean": mine["clean"] if int(mine["count"]) else other["clean"],
        }

    # MindArmour

    def _run_chains(self, sensitivities: Tensor, layout: Layout) -> Tensor:
        """Take in at most one batch of sensitivities; the test that fills a batch may raise the score."""
        state, raised = self.state, torch.zeros(len(sensitivities), dtype=torch.bool, device=sensitivities.device)
        if "neurons" in state:
            sensitivities = sensitivities[:, state["neurons"]]
        waiting = torch.cat([state["waiting"], sensitivities.float()])
        if len(waiting) >= CHAIN_BATCH:
            batch, last = waiting[:CHAIN_BATCH], CHAIN_BATCH - len(state["waiting"]) - 1
            waiting = waiting[CHAIN_BATCH:]
            if "neurons" not in state:
                state["neurons"] = _most_moved(batch, layout)
                batch, waiting = batch[:, state["neurons"]], waiting[:, state["neurons"]]
            number = int(state["count"])
            rates = _acceptance(batch, self.random_seed * 1_000_003 + number)
            before = self.score()
            state["count"] = state["count"] + 1
            state["converged"] = state["converged"] + (rates > ACCEPTANCE_RATE).sum()
            state["judged"] = state["judged"] + len(rates)
            raised[last] = self.score() > before
        state["waiting"] = waiting
        return raised


def converge(
    values: Tensor, clean: Tensor, rows: Tensor | None, counts: Tensor, limits: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """Take tests `[tests, neurons]` into `state`, in order; `counts [tests]` is the number of tests including each.

    rows: the row of `clean` that belongs to each test, if not the one with the same number. Returns int64 `[3, tests]`:
    how many neurons have converged and how many are judged after each test, and how many of its sensitivities are
    finite. Each neuron goes over the tests: in C on a CPU, in a kernel on a GPU, which agree to the bit; or in torch if
    neither is available, which adds in this order only on a CPU.
    """
    if values.dtype == clean.dtype == state["clean"].dtype == torch.float32:
        values, clean = values.contiguous(), clean.contiguous()
        if values.device.type == "cuda":
            from themis_lab.criteria import kernels_cuda

            if kernels_cuda.can_converge(values.device):
                return kernels_cuda.converge(values, clean, rows, counts, limits, state)
        if (library := native.library_for(values)) is not None:
            clean = clean if rows is None else clean[rows]
            n_tests, n = values.shape
            parts = [state[name] for name in ("shift", "clean", "sums", "squares", "moved", "varied")]
            found = torch.empty(-(-n // native.LANES), 3, n_tests, dtype=torch.int32)
            before = int(counts[0]) - 1
            library.themis_converge(values, clean, n_tests, n, before, MIN_UNMOVED_TESTS, limits, *parts, found)
            return found.sum(0)
    return converge_in_torch(values, clean, rows, counts, limits, state)


def converge_in_torch(
    values: Tensor, clean: Tensor, rows: Tensor | None, counts: Tensor, limits: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """`converge` in torch, a few neurons at a time."""
    clean = clean if rows is None else clean[rows]
    n_tests, n = values.shape
    totals = torch.zeros(3, n_tests, dtype=torch.int64, device=values.device)
    for start in range(0, n, max(1, SENSITIVITIES_AT_ONCE // n_tests)):
        part = slice(start, start + max(1, SENSITIVITIES_AT_ONCE // n_tests))
        sensitivities = (values[:, part] - clean[:, part]).abs().T.contiguous()
        has_moved = _from_first(sensitivities > 0, state["moved"][part])
        has_varied = _from_first((clean[:, part] != state["clean"][part]).T, state["varied"][part])
        deviations = sensitivities.double() - state["shift"][part, None]
        sums = _running_sum(state["sums"][part], deviations)
        squares = _running_sum(state["squares"][part], deviations.square())
        is_judged = has_moved | has_varied
        is_converged = _is_converged(sums, squares, has_moved, counts, limits) & is_judged
        totals += torch.stack([flags.sum(0) for flags in (is_converged, is_judged, sensitivities.isfinite())])
        for name, running in (("sums", sums), ("squares", squares), ("moved", has_moved), ("varied", has_varied)):
            state[name][part] = running[:, -1]
    return totals


@cache
def _variance(tolerance: float, draws: int, alpha: float | None) -> float:
    """The square of the standard error below which a neuron has converged."""
    rule = Rule(tolerance, draws, alpha)
    return (rule.limit / rule.factor) ** 2


def _running_sum(start: Tensor, values: Tensor) -> Tensor:
    """The running sums of `values [neurons, tests]` from `start [neurons]`, added in the order of the tests."""
    return torch.cat([start[:, None], values], 1).cumsum(1)[:, 1:]


def _from_first(is_true: Tensor, was_true: Tensor) -> Tensor:
    """Bool `[neurons, tests]`: true from the first true test on, and everywhere for neurons that `was_true`."""
    n_tests = is_true.shape[1]
    first = torch.where(is_true.any(1), is_true.to(torch.uint8).argmax(1), n_tests).masked_fill(was_true, 0)
    has_been: Tensor = torch.arange(n_tests, device=first.device) >= first[:, None]
    return has_been


def _is_converged(sums: Tensor, squares: Tensor, has_moved: Tensor, counts: Tensor, limits: Tensor) -> Tensor:
    """Bool `[neurons, counts]`, from the sums of deviations and of their squares at each count of tests."""
    m2 = (squares - (sums / counts).square() * counts).clamp(min=0)
    return (m2 < limits) & (has_moved | (counts >= MIN_UNMOVED_TESTS))


def _moments(state: dict[str, Tensor]) -> Moments:
    count = int(state["count"])
    if not count:
        return Moments.empty(len(state["sums"]), state["sums"].device)
    return Moments.from_sums(count, state["shift"], state["sums"], state["squares"])


def _most_moved(sensitivities: Tensor, layout: Layout) -> Tensor:
    """The `TOP_NEURONS` neurons of each layer with the largest sums, the last of equal ones, as flat indices."""
    totals = sensitivities.sum(0)
    slices = layout.slices().values()
    return torch.cat([columns.start + totals[columns].argsort(stable=True)[-TOP_NEURONS:] for columns in slices])


def _acceptance(sensitivities: Tensor, seed: int) -> Tensor:
    """The share of accepted steps of each neuron's chain, started from its sensitivities `[tests, neurons]`."""
    generator = torch.Generator(sensitivities.device).manual_seed(seed)
    at, width = sensitivities, sensitivities.mean(0)
    energy, accepted = at.square().sum(0) / 2, torch.zeros_like(width)
    for _ in range(CHAIN_STEPS):
        step = torch.rand(at.shape, generator=generator, device=at.device) - 0.5
        proposed = at + step * width
        proposed_energy = proposed.square().sum(0) / 2
        chance = torch.rand(width.shape, generator=generator, device=at.device)
        is_accepted = chance < (energy - proposed_energy).exp()
        at = torch.where(is_accepted, proposed, at)
        energy = torch.where(is_accepted, proposed_energy, energy)
        accepted += is_accepted
    return accepted / CHAIN_STEPS
