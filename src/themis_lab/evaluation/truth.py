"""Ground truth: mutants whose failing thetas are all known, and the mutants that the tests of a technique kill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from themis.data.seeds import Seeds
from themis.errors import DataError
from themis.measure.tests import Bools, Floats, Ints
from themis.perturb import Perturbation
from themis.search import choose_policy
from themis.search.policy import Space
from themis.target.target import AnyTarget
from themis_lab.comparison.cells import PASSES_ALONE, CellRunner, ErrorRates
from themis_lab.comparison.plan import CampaignCell
from themis_lab.contest.cells import record_tests
from themis_lab.techniques import choose_technique
from themis_lab.zoo import Mutant, MutantSet, find_killed, make_mutants

Record = dict[str, Any]
MAX_DIMENSIONS = 2
"""Of theta, if its failing values are mapped."""
MUTANT_BATCH = 1024
"""Tests that mutants are run on at a time."""


def can_be_mapped(perturbation: Perturbation) -> bool:
    """Whether all thetas can be tried, because there is no noise and there are few dimensions."""
    return not perturbation.is_random and len(perturbation.theta) <= MAX_DIMENSIONS


@dataclass(frozen=True)
class ThetaGrid:
    """The box of theta, divided into `n ** dimensions` cells of the same size."""

    low: Floats
    high: Floats
    n: int

    @staticmethod
    def of(perturbation: Perturbation, n_cells: int) -> ThetaGrid:
        """The finest grid of at most `n_cells` cells."""
        low, high = (np.array([getattr(theta, end) for theta in perturbation.theta]) for end in ("low", "high"))
        return ThetaGrid(low, high, max(1, int(n_cells ** (1 / len(low)) + 1e-9)))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.n,) * len(self.low)

    def centres(self) -> Floats:
        """The theta in the middle of each cell, `[cells, dimensions]`."""
        place = (np.stack(np.unravel_index(np.arange(self.n ** len(self.low)), self.shape), -1) + 0.5) / self.n
        return (self.low + place * (self.high - self.low)).astype(np.float32)

    def locate(self, theta: Floats) -> Ints:
        """The cell of each theta."""
        place = ((theta - self.low) / (self.high - self.low) * self.n).astype(np.int64).clip(0, self.n - 1)
        cells: Ints = np.ravel_multi_index(tuple(place.T), self.shape)
        return cells

    def find_regions(self, is_failing: Bools) -> Ints:
        """The connected regions of failing cells of one seed, `[cells]`: numbered from 1; 0 where nothing fails."""
        from scipy.ndimage import label

        regions: Ints = label(is_failing.reshape(self.shape))[0].reshape(-1).astype(np.int64)
        return regions


@dataclass(frozen=True)
class GroundTruth:
    """A model with its mutants. `runner` searches the model; its plan and perturbation are those of a cell."""

    runner: CellRunner
    mutants: MutantSet

    @staticmethod
    def of(runner: CellRunner, judges: Seeds, per_operator: int) -> GroundTruth:
        """judges: the seeds by which mutants are filtered."""
        random_seed = runner.plan.random_seed
        return GroundTruth(
            runner, make_mutants(runner.target, judges, per_operator=per_operator, random_seed=random_seed)
        )

    def plant(self, number: int, n_planted: int) -> Mutant:
        """One of `n_planted` mutants, which are spread evenly over the operators."""
        n = len(self.mutants.kept)
        if n < n_planted:
            raise DataError(f"{n_planted} mutants must be planted, but only {n} were kept: raise mutants")
        return self.mutants.kept[number * n // n_planted]

    def map_failures(self, mutant: Mutant, magnitude: float, n_cells: int) -> Record:
        """All failing cells of a mutant, by trying the centre of every cell on every seed that it answers correctly.

        A cell is planted if the model itself does not fail there.
        """
        grid = self._grid(magnitude, n_cells)
        seed_id, fails = self._try_all(mutant.target, magnitude, grid)
        own_id, own_fails = self._try_all(self.runner.target, magnitude, grid)
        known = {seed: row for row, seed in enumerate(own_id.tolist())}
        columns: dict[str, list[Any]] = {name: [] for name in ("seed_id", "cell", "region", "is_planted")}
        for seed, failing in zip(seed_id.tolist(), fails, strict=True):
            (cells,) = failing.nonzero()
            is_own = own_fails[known[seed]][cells] if seed in known else np.ones(len(cells), dtype=bool)
            columns["seed_id"] += [seed] * len(cells)
            columns["cell"] += cells.tolist()
            columns["region"] += grid.find_regions(failing)[cells].tolist()
            columns["is_planted"] += (~is_own).tolist()
        return {
            "operator": mutant.operator,
            "accuracy": mutant.accuracy,
            "model_accuracy": self.mutants.accuracy,
            "seeds": len(seed_id),
            "cells": fails.shape[1],
            "failing": columns,
        }

    def search(self, mutant: Mutant, campaign: CampaignCell, passes: int, n_cells: int) -> Record:
        """The cells in which a technique finds faults of a mutant."""
        grid = self._grid(campaign.magnitude, n_cells)
        runner = self.runner.on(mutant.target)
        result, _ = runner.search(campaign, max_passes=passes, **PASSES_ALONE)
        found: Ints = np.zeros((0, 2), dtype=np.int64)
        if len(result.faults):
            columns = result.faults.columns
            found = np.unique(np.stack([columns["seed_id"], grid.locate(columns["theta"])], 1), axis=0)
        return {
            "tests": result.rounds[-1].tests,
            "passes": result.rounds[-1].passes,
            "found": {"seed_id": found[:, 0].tolist(), "cell": found[:, 1].tolist()},
        }

    def kill(self, campaign: CampaignCell, passes: int) -> Record:
        """The mutants that the tests of a technique kill, and those that the clean seeds kill."""
        policy = choose_policy(choose_technique(campaign.technique).policy)
        recorded = record_tests(policy)
        result, _ = self.runner.search(campaign, policy=policy, max_passes=passes, **PASSES_ALONE)
        seeds, target, mutants = self.runner.seeds, self.runner.target, [one.target for one in self.mutants.kept]
        assert seeds.labels is not None  # mutants have been filtered by their accuracy
        inputs = seeds.take(torch.arange(len(seeds)))
        clean = find_killed(target, mutants, inputs, seeds.labels)
        killed = torch.zeros_like(clean)
        with target.opened():
            rates = ErrorRates(target, seeds, self.runner.perturbation.at(campaign.magnitude), 0)
            for proposed, results in recorded:
                tests = proposed[results.was_run]
                for first in range(0, len(tests), MUTANT_BATCH):
                    batch = tests[first : first + MUTANT_BATCH]
                    labels = seeds.labels[torch.from_numpy(batch.seed)]
                    killed |= find_killed(target, mutants, rates.inputs(batch), labels)
        return {
            "tests": result.rounds[-1].tests,
            "passes": result.rounds[-1].passes,
            "mutants": len(mutants),
            "dropped": {name: sum(getattr(self.mutants, name).values()) for name in ("trivial", "equivalent")},
            "refused": list(self.mutants.refused),
            **_describe_kills(killed, ""),
            **_describe_kills(clean, "clean_"),
        }

    def _grid(self, magnitude: float, n_cells: int) -> ThetaGrid:
        return ThetaGrid.of(self._perturbation(magnitude), n_cells)

    def _perturbation(self, magnitude: float) -> Perturbation:
        return self.runner.perturbation.at(magnitude).fitted(tuple(self.runner.seeds.shape[1:]))

    def _try_all(self, target: AnyTarget, magnitude: float, grid: ThetaGrid) -> tuple[Ints, Bools]:
        """The seeds that a target answers correctly, and in which cells it then fails, `[seeds, cells]`."""
        perturbation = self._perturbation(magnitude)
        with target.opened():
            rates = ErrorRates(target, self.runner.seeds, perturbation, 0)
            n, centres = len(rates.usable), grid.centres()
            space = Space.of(perturbation, rates.usable, rates.seed_id, np.zeros(n, dtype=np.float32), 0)
            number = np.arange(n * len(centres))
            tests = space.tests(number, number // len(centres), np.tile(centres, (n, 1)), "grid")
            return rates.seed_id, rates.find_faults(tests).reshape(n, len(centres))


def _describe_kills(killed: torch.Tensor, prefix: str) -> Record:
    """DeepMutation's score, and the share of mutants that are killed for any class; `killed [mutants, classes]`."""
    if not len(killed):
        return {f"{prefix}score": None, f"{prefix}killed": None}
    return {f"{prefix}score": float(killed.float().mean()), f"{prefix}killed": float(killed.any(1).float().mean())}


def measure_recall(mapped: Record, searched: Record) -> Record:
    """The shares of failing seeds, regions of theta, cells and planted faults that a campaign has found.

    A planted fault is found if a fault lies in one of the planted cells of its seed.
    """
    failing = mapped["failing"]
    seed, cell, region = (np.array(failing[name], dtype=np.int64) for name in ("seed_id", "cell", "region"))
    is_planted = np.array(failing["is_planted"], dtype=bool)
    found = set(zip(searched["found"]["seed_id"], searched["found"]["cell"], strict=True))
    is_found = np.array([pair in found for pair in zip(seed.tolist(), cell.tolist(), strict=True)], dtype=bool)
    return {
        "seeds": _share(seed, np.isin(seed, searched["found"]["seed_id"])),
        "regions": _share(seed * (int(region.max(initial=0)) + 1) + region, is_found),
        "cells": float(is_found.mean()) if len(is_found) else None,
        "planted": _share(seed[is_planted], is_found[is_planted]),
    }


def _share(group: Ints, is_found: Bools) -> float | None:
    """The share of groups of which at least one member was found; None without groups."""
    return len(np.unique(group[is_found])) / len(np.unique(group)) if len(group) else None


def describe_map(mapped: Record) -> Record:
    """The extent of a mutant's failures, without the cells themselves."""
    failing = mapped["failing"]
    planted = {seed for seed, own in zip(failing["seed_id"], failing["is_planted"], strict=True) if own}
    return {
        **{name: mapped[name] for name in ("operator", "accuracy", "model_accuracy", "seeds", "cells")},
        "failing_seeds": len(set(failing["seed_id"])),
        "failing_regions": len(set(zip(failing["seed_id"], failing["region"], strict=True))),
        "failing_cells": len(failing["cell"]),
        "planted_seeds": len(planted),
        "planted_cells": sum(failing["is_planted"]),
    }


def summarise_truth(maps: list[Record], searches: list[Record], kills: list[Record]) -> list[Record]:
    """What can be found, and what each technique has found and killed, by model, perturbation and magnitude."""

    def place(record: Record) -> tuple[str, str, float]:
        return record["model"], record["perturbation"], record["magnitude"]

    summaries = []
    for key in dict.fromkeys(place(record) for record in (*maps, *kills)):
        own_maps = {record["campaign"]: record for record in maps if place(record) == key}
        own_kills = [record for record in kills if place(record) == key]
        own_searches = [record for record in searches if place(record) == key and record["campaign"] in own_maps]
        techniques: dict[str, Record] = {}
        for record in own_searches:
            row = techniques.setdefault(record["technique"], {})
            row.setdefault("recall", []).append(measure_recall(own_maps[record["campaign"]], record))
            row.setdefault("recall_tests", []).append(record["tests"])
        for record in own_kills:
            row = techniques.setdefault(record["technique"], {})
            row.setdefault("scores", []).append({name: record[name] for name in ("score", "killed", "tests")})
        names = ("mutants", "dropped", "refused", "clean_score", "clean_killed")
        summaries.append(
            {
                **dict(zip(("model", "perturbation", "magnitude"), key, strict=True)),
                "maps": [describe_map(record) for record in own_maps.values()],
                "techniques": techniques,
                "mutants": {name: own_kills[0][name] for name in names} if own_kills else None,
            }
        )
    return summaries
