"""What a campaign had found when it had spent a budget: every budget is read off one campaign."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from themis.runs.run import Run
from themis_lab.comparison.cells import count_by_seed, describe_campaign
from themis_lab.comparison.plan import CampaignCell


def count_tests(result: Run, passes: int) -> int:
    """How many tests a campaign had run when it had spent `passes`; the tests of a round are taken to cost the same."""
    tests, spent = _spending(result)
    return int(np.interp(passes, spent, tests) + 1e-9)


def count_passes(result: Run, n_tests: int) -> int:
    """The passes that a campaign had spent after its first tests."""
    return round(float(np.interp(n_tests, *_spending(result))))


def _spending(result: Run) -> tuple[list[float], list[float]]:
    """Tests and passes at the start and after each round; at the start, clean seeds have been run."""
    tests, passes = ([getattr(round, name) for round in result.rounds] for name in ("tests", "passes"))
    clean = float(result.start.n_seeds)
    if len(tests) > 1:  # checks of the model cost passes as well
        clean = max(clean, passes[0] - tests[0] * (passes[1] - passes[0]) / (tests[1] - tests[0]))
    return [0.0, *tests], [clean, *passes]


def describe_prefix(cell: CampaignCell, result: Run, n_tests: int) -> dict[str, Any]:
    """The first tests of a campaign, in the form of a whole one; coverage is that of the last round within them."""
    rounds = [round for round in result.rounds if round.tests <= n_tests] or result.rounds[:1]
    columns = result.faults.columns if len(result.faults) else {}
    is_within = columns["id"] < n_tests if columns else np.zeros(0, dtype=bool)
    by_seed = count_by_seed({name: values[is_within] for name, values in columns.items()} if is_within.any() else {})
    return describe_campaign(cell, replace(result, rounds=rounds)) | {
        "tests": n_tests,
        "passes": count_passes(result, n_tests),
        "faults": sum(by_seed["faults"]),
        "distinct_faults": sum(by_seed["distinct"]),
        "failing_seeds": len(by_seed["seed_id"]),
        "by_seed": by_seed,
    }
