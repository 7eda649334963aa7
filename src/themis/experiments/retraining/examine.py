"""Examining a model on judge seeds: how right it is, clean and disturbed, and what a campaign still finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.campaign.api import run
from themis.data.seeds import Seeds
from themis.experiments.retraining.grading import calculator, errors, grade
from themis.experiments.retraining.material import rows_of
from themis.measure.calculator import Calculator
from themis.measure.tests import Ints, Tests
from themis.perturb import Perturbation
from themis.runs.run import Run
from themis.search.policy import Space
from themis.target.ledger import Ledger, ledger_of
from themis.target.target import Target

Column = NDArray[np.float64]

FOR_EXAM = 1 << 42
"""Added to the random seed, so that examinations share no noise with campaigns."""
EXAM_STREAM = 2
"""The uniform draws of an examination, beside those of campaigns."""
MOST_OLD = 2_000
"""Faults whose inputs are kept for the next model, at most."""


@dataclass(frozen=True)
class Old:
    """Disturbed inputs of judge seeds that a model answered wrongly: one a distinct fault, as it was given."""

    inputs: Tensor  # [faults, ...], on the CPU
    rows: Tensor  # of the judge seeds


@dataclass(frozen=True)
class Found:
    """What a campaign on the judge seeds found."""

    passes: int
    tests: int
    usable: int
    distinct_faults: int
    failing_seeds: int
    fault_rate: float | None
    distinct: Column = field(repr=False)  # faults of each judge seed
    held: Column = field(repr=False)  # 1 for each that is answered rightly and withstood all tests


@dataclass(frozen=True)
class Reading:
    """One model under one perturbation, on judge seeds. Columns are `[seeds]`."""

    perturbation: str
    random_seed: int
    draws: int
    seed_id: Ints = field(repr=False)
    clean: Column = field(repr=False)  # how right the clean answer is, 0..1
    disturbed: Column = field(repr=False)  # mean over the draws
    clean_error: Column | None = field(repr=False)  # absolute, in tasks whose answer is a number
    disturbed_error: Column | None = field(repr=False)
    found: Found | None
    """None where no passes were given for a campaign."""
    old: Old | None = field(repr=False)
    """This model's own faults, for the next one."""
    mended: Column | None = field(repr=False)
    """Of each old fault, whether it is answered rightly now; None for the first model."""

    @property
    def clean_score(self) -> float:
        """Accuracy, or the share within the tolerance."""
        return float(self.clean.mean())

    @property
    def disturbed_score(self) -> float:
        return float(self.disturbed.mean())

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        found = self.found
        return {
            "perturbation": self.perturbation,
            "random_seed": self.random_seed,
            "draws": self.draws,
            "seeds": len(self.seed_id),
            "clean": self.clean_score,
            "disturbed": self.disturbed_score,
            "clean_error": _mean(self.clean_error),
            "disturbed_error": _mean(self.disturbed_error),
            "passes": None if found is None else found.passes,
            "distinct_faults": None if found is None else found.distinct_faults,
            "failing_seeds": None if found is None else found.failing_seeds,
            "held": None if found is None else float(found.held.mean()),
            "old_faults": None if self.mended is None else len(self.mended),
            "mended": None if self.mended is None or not len(self.mended) else float(self.mended.mean()),
        }


def examine(
    target: Target,
    judge: Seeds,
    perturbation: Perturbation,
    *,
    ledger: Ledger,
    draws: int = 5,
    passes: int = 5_000,
    random_seed: int = 0,
    before: Reading | None = None,
    **options: Any,
) -> Reading:
    """Examine a model on seeds that it was not trained on.

    All judge seeds count, also those that are answered wrongly when clean. draws: uniform tests a seed, the same for
    every model. passes: of a campaign of policy scheduled, those over the clean seeds included; 0 is none. before: what
    the old model's examination gave, whose faults are run again. options: of the campaign, as `Settings` has them.
    The oracle should be settled, so that one tolerance holds for all models.
    """
    ledger.merge(ledger_of(target)).refuse(judge, "judge seeds")
    with target.opened():
        bench = calculator(target, judge, perturbation)
        assert bench.labels is not None  # `calculator` has refused seeds without
        clean = grade(bench.oracle, bench.clean_outputs, bench.labels)
        clean_error = errors(bench.oracle, bench.clean_outputs, bench.labels)
        right, far = _disturbed(bench, judge, draws, random_seed)
        mended = None if before is None or before.old is None else _again(bench, before.old)
    found, old = None, None
    if passes:
        result = run(
            target,
            judge,
            perturbation,
            max_passes=passes,
            random_seed=random_seed,
            **{"policy": "scheduled", "max_tests": None, "plateau": None, "coverage": None, **options},
        )
        if result.stop_reason == "user":
            raise KeyboardInterrupt
        found = _found(result, judge, _column(clean))
        with target.opened():
            old = _old(bench, judge, result)
    return Reading(
        perturbation.name,
        random_seed,
        draws,
        judge.seed_id.numpy(),
        _column(clean),
        _column(right),
        None if clean_error is None else _column(clean_error),
        None if far is None else _column(far),
        found,
        old,
        None if mended is None else _column(mended),
    )


def exam_tests(perturbation: Perturbation, judge: Seeds, draws: int, random_seed: int) -> Tests:
    """Uniform tests, a function of seed and draw alone; `draws` a seed, all seeds in turn."""
    n = len(judge)
    seed_id, number = judge.seed_id.numpy(), np.arange(n * draws)
    draw, position = np.divmod(number, n)
    margin = np.zeros(n, dtype=np.float32)
    space = Space.of(perturbation, np.arange(n), seed_id, margin, random_seed + FOR_EXAM)
    theta = space.uniform_theta(EXAM_STREAM, seed_id[position], draw)
    return space.tests(draw, position, theta, "uniform")


def _disturbed(bench: Calculator, judge: Seeds, draws: int, random_seed: int) -> tuple[Tensor, Tensor | None]:
    """Each seed's mean grade over its draws, and its mean error."""
    tests = exam_tests(bench.perturbation, judge, draws, random_seed)
    right, far = [], []
    for first in range(0, len(tests), bench.chunk):
        some = tests[first : first + bench.chunk]
        outputs = bench.run_chunk(some, bench.chunk)[1]
        right.append(_grade(bench, outputs, torch.from_numpy(some.seed)))
        error = errors(bench.oracle, outputs, _labels(bench, torch.from_numpy(some.seed)))
        far += [] if error is None else [error]
    by_seed = [torch.cat(each).view(draws, len(judge)).mean(0) for each in (right, far) if each]
    return by_seed[0], by_seed[1] if far else None


def _again(bench: Calculator, old: Old) -> Tensor:
    """How rightly old faults are answered now."""
    right = [torch.empty(0, dtype=torch.float64)]
    for first in range(0, len(old.rows), bench.chunk):
        at = slice(first, first + bench.chunk)
        with torch.no_grad():
            outputs = bench.target.forward(old.inputs[at].to(bench.device)).float()
        right.append(_grade(bench, outputs, old.rows[at]).cpu())
    return torch.cat(right)


def _old(bench: Calculator, judge: Seeds, result: Run) -> Old:
    """The inputs of the campaign's distinct faults, those that are wrong by the label."""
    faults = result.faults.distinct()[:MOST_OLD]
    rows = rows_of(np.array([each.seed_id for each in faults], dtype=np.int64), judge)
    theta = np.array([list(each.theta.values()) for each in faults], dtype=np.float32)
    noise_seed = np.array([each.noise_seed for each in faults], dtype=np.int64)
    tests = Tests(np.arange(len(faults)), rows, theta, noise_seed, np.full(len(faults), "old"))
    inputs, kept = [torch.empty(0, *judge.shape[1:])], [torch.empty(0, dtype=torch.int64)]
    for first in range(0, len(faults), bench.chunk):
        some = tests[first : first + bench.chunk]
        disturbed, outputs = bench.run_chunk(some, bench.chunk)
        at = torch.from_numpy(some.seed)
        is_wrong = (_grade(bench, outputs, at) < 1).cpu()
        inputs.append(disturbed.cpu()[is_wrong])
        kept.append(at[is_wrong])
    return Old(torch.cat(inputs), torch.cat(kept))


def _found(result: Run, judge: Seeds, clean: Column) -> Found:
    last, rate, columns = result.rounds[-1], result.fault_rate, result.faults.columns
    distinct = np.zeros(len(judge), dtype=np.float64)
    if len(result.faults):
        pairs = np.unique(np.stack([columns["seed_id"], columns["answer"]], 1), axis=0)
        np.add.at(distinct, rows_of(pairs[:, 0], judge), 1.0)
    return Found(
        last.passes,
        last.tests,
        result.start.n_usable,
        last.distinct_faults,
        last.failing_seeds,
        None if rate is None else rate.value,
        distinct,
        np.where(distinct > 0, 0.0, clean),
    )


def _labels(bench: Calculator, rows: Tensor) -> Tensor:
    assert bench.labels is not None
    return bench.labels[rows.to(bench.device)]


def _grade(bench: Calculator, outputs: Tensor, rows: Tensor) -> Tensor:
    return grade(bench.oracle, outputs, _labels(bench, rows))


def _column(values: Tensor) -> Column:
    column: Column = values.double().cpu().numpy()
    return column


def _mean(values: Column | None) -> float | None:
    return None if values is None else float(values.mean())
