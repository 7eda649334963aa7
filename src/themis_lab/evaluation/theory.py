"""The claims behind the method, checked on one model under one perturbation.

Are the inferred means the same on other seeds, are sensitivities normal, and have the faults been seen when coverage
reaches 100%?
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.campaign.loop import is_little_left
from themis.data.seeds import Seeds
from themis.runs.analysis.groups import find_groups
from themis.runs.run import Run
from themis.settings import Settings
from themis_lab.techniques import PRESET

Search = Callable[..., Run]
"""Runs a campaign with these seeds and options."""
CLOSE_DEVIATION = 0.10
"""The paper's limit for the deviation of an inferred mean."""
REFERENCE_SEED_OFFSET = 1000
"""Added to the random seed of the reference run, so that it shares no tests with the campaigns it is compared with."""


def check_theory(
    search: Search, seeds: Seeds, *, done_tests: int, reference_tests: int, seed_sets: int
) -> dict[str, Any]:
    """The record of a cell that checks the theory."""
    reference = search(
        seeds, policy="scheduled", max_tests=reference_tests, shift=REFERENCE_SEED_OFFSET, **BUDGET_ALONE
    )
    preset = search(seeds, preset="paper", max_tests=done_tests, round_size=None)
    default = search(seeds, policy="scheduled", max_tests=done_tests, **BUDGET_ALONE)
    last, columns = reference.rounds[-1], reference.faults.columns if len(reference.faults) else {}
    return {
        "reference": {
            "tests": last.tests,
            "distinct_faults": last.distinct_faults,
            "failing_seeds": last.failing_seeds,
            "groups": len(np.unique(find_groups(columns))) if columns else 0,
            "seeds": reference.start.n_usable,
        },
        "preset": _found_when(preset, reference, first_covered(preset)),
        "default": _found_when(default, reference, first_covered(default)),
        "rule": _found_when(default, reference, _first_enough(default, coverage=1.0)),
        "enough": _found_when(default, reference, _first_enough(default, coverage=0.0)),
        "stability": measure_stability(search, seeds, done_tests, seed_sets),
        "normality": None if default.normality is None else asdict(default.normality),
    }


BUDGET_ALONE: dict[str, Any] = {"coverage": None, "plateau": None}
"""Only the budget stops a campaign."""
WAYS_TO_STOP = {
    "preset": f"{PRESET} at 100%",
    "default": "scheduled at 100%",
    "rule": "the default rule",
    "enough": "little left to find",
}
"""When a campaign could stop, by the key in a record: at full coverage, or at that and with little left to find, which
is the default, or with little left to find at any coverage."""


def list_shares(theory: list[dict[str, Any]], way: str) -> list[float]:
    """The share of a reference run's distinct faults found when a campaign could stop, where it could."""
    found = [record[way]["of_faults"] for record in theory if record.get(way)]
    return [share for share in found if share is not None]


def count_reached(theory: list[dict[str, Any]], way: str) -> int:
    """The cells in which a campaign could stop, with known faults or without."""
    return sum(bool(record.get(way)) for record in theory)


def first_covered(result: Run) -> int | None:
    """The tests after which coverage first reached 100%; None if it did not."""
    return next((round.tests for round in result.rounds if round.coverage.sampled >= 1), None)


def _first_enough(result: Run, coverage: float) -> int | None:
    """The tests after which little is left to find at this coverage; with 1, the default rule stops then."""
    goal = Settings().recall
    for round in result.rounds:
        if round.coverage.sampled >= coverage and is_little_left(goal, round.recall, round.residual_risk):
            return round.tests
    return None


def _found_when(result: Run, reference: Run, n_tests: int | None) -> dict[str, Any] | None:
    """The shares of the reference run's findings that a campaign had found after its first tests."""
    if n_tests is None:
        return None
    found, known = (_distinct(run, n) for run, n in ((result, n_tests), (reference, None)))
    seeds, known_seeds = ({seed for seed, _ in pairs} for pairs in (found, known))
    return {
        "tests": n_tests,
        "distinct_faults": len(found),
        "of_faults": _share(found, known),
        "of_seeds": _share(seeds, known_seeds),
        "of_groups": _share_of_groups(found, reference),
    }


def _distinct(result: Run, n_tests: int | None) -> set[tuple[int, int]]:
    """The distinct faults, as pairs of a seed and a wrong outcome, among the first tests."""
    if not len(result.faults):
        return set()
    columns = result.faults.columns
    is_within = np.ones(len(columns["id"]), dtype=bool) if n_tests is None else columns["id"] < n_tests
    return set(zip(columns["seed_id"][is_within].tolist(), columns["answer"][is_within].tolist(), strict=True))


def _share(found: set[Any], known: set[Any]) -> float | None:
    return len(found & known) / len(known) if known else None


def _share_of_groups(found: set[tuple[int, int]], reference: Run) -> float | None:
    if not len(reference.faults):
        return None
    columns = reference.faults.columns
    groups = find_groups(columns)
    pairs = zip(columns["seed_id"].tolist(), columns["answer"].tolist(), strict=True)
    is_found = np.array([pair in found for pair in pairs])
    return len(np.unique(groups[is_found])) / len(np.unique(groups))


def measure_stability(search: Search, seeds: Seeds, n_tests: int, n_sets: int) -> dict[str, Any]:
    """How much the inferred mean sensitivities differ between disjoint sets of seeds."""
    sets = [seeds[k::n_sets] for k in range(n_sets)]
    means = []
    for own in sets:
        result = search(own, policy="random", max_tests=max(n_tests // n_sets, 1), uniform_share=1.0, **BUDGET_ALONE)
        assert result.posterior_means is not None  # the campaign has just been run
        means.append(result.posterior_means.astype(np.float64))
    return describe_deviations(np.stack(means)) | {
        "sets": n_sets,
        "tests": max(n_tests // n_sets, 1),
    }


def describe_deviations(means: NDArray[np.float64]) -> dict[str, Any]:
    """Deviations of means `[sets, neurons]` from their mean over sets, relative to it; unmoved neurons are left out."""
    centre = means.mean(0)
    moved = centre > 0
    deviation = np.abs(means[:, moved] / centre[moved] - 1).max(0)
    whole = means.mean(1)
    return {
        "median_deviation": float(np.median(deviation)) if len(deviation) else None,
        "within_10_percent": float((deviation <= CLOSE_DEVIATION).mean()) if len(deviation) else None,
        "model_deviation": float(np.abs(whole / whole.mean() - 1).max()) if whole.mean() > 0 else None,
        "neurons": int(moved.sum()),
    }
