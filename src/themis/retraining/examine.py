"""Examining a model on judge seeds: its score, clean and disturbed, and the faults that a campaign still finds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.campaign.api import run
from themis.data.seeds import Seeds
from themis.errors import StoreError, first_line
from themis.experiments import ExperimentFolder
from themis.measure.calculator import Calculator
from themis.measure.clean import place_others
from themis.measure.tests import Ints, Tests
from themis.perturb import Perturbation
from themis.reading import check_form, parse_json, record
from themis.retraining.grading import calculator, errors, grade
from themis.retraining.material import rows_of
from themis.runs.run import Run
from themis.runs.store.tensors import content_of, deserialize, read_header, read_tensor_file
from themis.search.policy import Space
from themis.target.ledger import Ledger, ledger_of
from themis.target.target import Target

Column = NDArray[np.float64]

FOR_EXAM = 1 << 42
"""Added to the random seed, so that examinations and campaigns use different noise."""
EXAM_STREAM = 2
"""The stream of the uniform draws of an examination; campaigns use smaller numbers."""
MAX_OLD_FAULTS = 2_000
"""Faults whose inputs are kept for the next model, at most."""


@dataclass(frozen=True)
class Reading:
    """The examination of one model under one perturbation. Columns are `[seeds]`."""

    perturbation: str
    random_seed: int
    draws: int
    seed_id: Ints = field(repr=False)
    clean: Column = field(repr=False)  # grade of the clean answer, 0..1
    disturbed: Column = field(repr=False)  # mean grade over the draws
    clean_error: Column | None = field(repr=False)  # absolute error, for tasks whose answer is a number
    disturbed_error: Column | None = field(repr=False)
    passes: int | None
    """Spent by a campaign; None if there was none."""
    distinct: Column | None = field(repr=False)
    """The distinct faults that it found of each seed."""
    mended: Column | None = field(repr=False)
    """The grade of each old fault's input now, `[faults]`; None for the first model."""
    old_inputs: Tensor | None = field(default=None, repr=False)
    """The inputs of this model's own distinct faults, `[faults, ...]`, which are run again on the next model."""
    old_labels: Tensor | None = field(default=None, repr=False)  # moved with the pictures
    old_row: Tensor | None = field(default=None, repr=False)  # of the seed of each; None in earlier versions

    @property
    def failing(self) -> Column | None:
        """1 for each seed that failed in the campaign."""
        return None if self.distinct is None else (self.distinct > 0).astype(np.float64)

    @property
    def held(self) -> Column | None:
        """The clean grade of each seed that passed all tests of the campaign, and 0 for the others."""
        return None if self.distinct is None else np.where(self.distinct > 0, 0.0, self.clean)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        names = ("clean", "disturbed", "clean_error", "disturbed_error", "held", "mended")
        columns = {name: getattr(self, name) for name in names}
        counts = {"distinct_faults": self.distinct, "failing_seeds": self.failing}
        return {
            "perturbation": self.perturbation,
            "random_seed": self.random_seed,
            "draws": self.draws,
            "seeds": len(self.seed_id),
            "passes": self.passes,
            **{name: None if column is None else int(column.sum()) for name, column in counts.items()},
            "old_faults": None if self.mended is None else len(self.mended),
            **{name: float(each.mean()) if each is not None and len(each) else None for name, each in columns.items()},
        }


@dataclass(frozen=True)
class Exam:
    """How models are examined; the same for every model, so that readings can be paired."""

    draws: int = 5
    """Uniform tests per seed."""
    passes: int = 5_000
    """The budget of a campaign with policy scheduled, including the clean passes; 0 for no campaign."""
    random_seed: int = 0
    min_ssim: float | None = None
    """That of the campaign, like `min_vif`."""
    min_vif: float | None = None


def examine(
    target: Target,
    judge: Seeds,
    perturbation: Perturbation,
    exam: Exam,
    *,
    ledger: Ledger,
    before: Reading | None = None,
) -> Reading:
    """Examine a model on seeds that it was not trained on.

    All judge seeds count, including those that are answered incorrectly when clean. before: the reading of the old
    model, whose faults are tested again. The oracle should be settled, so that all models have one tolerance.
    """
    ledger.merge(ledger_of(target)).refuse(judge, "judge seeds")
    with target.opened():
        bench = calculator(target, judge, perturbation)
        assert bench.clean.labels is not None  # checked by `calculator`
        clean = grade(bench.clean.oracle, bench.clean.outputs, bench.clean.labels)
        clean_error = errors(bench.clean.oracle, bench.clean.outputs, bench.clean.labels)
        disturbed, disturbed_error = _disturbed(bench, judge, exam.draws, exam.random_seed)
        mended = None
        if before is not None and before.old_inputs is not None and before.old_labels is not None:
            mended = _grade_old(bench, before.old_inputs, before.old_labels, before.old_row)
    passes, distinct = None, None
    old: dict[str, Any] = {}
    if exam.passes:
        result = run(
            target,
            judge,
            perturbation,
            max_passes=exam.passes,
            random_seed=exam.random_seed,
            min_ssim=exam.min_ssim,
            min_vif=exam.min_vif,
            policy="scheduled",
            max_tests=None,
            plateau=None,
            coverage=None,
        )
        if result.stop_reason == "user":
            raise KeyboardInterrupt
        passes, columns = result.rounds[-1].passes, result.faults.columns
        distinct = np.zeros(len(judge))
        if len(result.faults):
            pairs = np.unique(np.stack([columns["seed_id"], columns["answer"]], 1), axis=0)
            np.add.at(distinct, rows_of(pairs[:, 0], judge), 1.0)
        with target.opened():
            old = _old_faults(bench, judge, result)
    graded = {"clean": clean, "disturbed": disturbed, "mended": mended}
    graded |= {"clean_error": clean_error, "disturbed_error": disturbed_error}
    measured = old | {name: None if each is None else each.double().cpu().numpy() for name, each in graded.items()}
    measured |= {"seed_id": judge.seed_id.numpy(), "distinct": distinct}
    return Reading(perturbation.name, exam.random_seed, exam.draws, passes=passes, **measured)


def exam_tests(perturbation: Perturbation, judge: Seeds, draws: int, random_seed: int) -> Tests:
    """Uniform tests, `draws` per seed, as a function of seed and draw only; each draw covers all seeds."""
    n = len(judge)
    seed_id, number = judge.seed_id.numpy(), np.arange(n * draws)
    draw, position = np.divmod(number, n)
    margin = np.zeros(n, dtype=np.float32)
    space = Space.of(perturbation, np.arange(n), seed_id, margin, random_seed + FOR_EXAM)
    theta = space.occurring_theta(EXAM_STREAM, seed_id[position], draw)
    return space.tests(draw, position, theta, "uniform")


def _run(bench: Calculator, tests: Tests) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Run tests: chunks of the rows, the disturbed inputs, the outputs, and the labels, moved with their pictures."""
    assert bench.clean.labels is not None  # checked by `calculator`
    for first in range(0, len(tests), bench.chunk):
        chunk = tests[first : first + bench.chunk]
        disturbed, outputs, motion = bench.run_chunk(chunk, bench.chunk)
        rows = torch.from_numpy(chunk.seed).to(bench.device)
        labels = bench.clean.labels[rows]
        yield rows, disturbed, outputs, bench.clean.oracle.move_labels(labels, motion) if motion else labels


def _disturbed(bench: Calculator, judge: Seeds, draws: int, random_seed: int) -> tuple[Tensor, Tensor | None]:
    """The mean grade of each seed over its draws, and its mean error."""
    grades, gaps = [], []
    for _, _, outputs, labels in _run(bench, exam_tests(bench.perturbation, judge, draws, random_seed)):
        grades.append(grade(bench.clean.oracle, outputs, labels))
        error = errors(bench.clean.oracle, outputs, labels)
        gaps += [] if error is None else [error]
    means = [torch.cat(parts).view(draws, len(judge)).mean(0) for parts in (grades, gaps) if parts]
    return means[0], means[1] if gaps else None


def _grade_old(bench: Calculator, inputs: Tensor, labels: Tensor, rows: Tensor | None) -> Tensor:
    """The grades of the current answers to old faults."""
    grades = [torch.empty(0, dtype=torch.float64)]
    for first in range(0, len(labels), bench.chunk):
        chunk = slice(first, first + bench.chunk)
        if rows is not None:
            place_others(bench.target, bench.seeds, rows[chunk])
        with torch.no_grad():
            outputs = bench.target.forward(inputs[chunk].to(bench.device)).float()
        grades.append(grade(bench.clean.oracle, outputs, labels[chunk].to(bench.device)).cpu())
    return torch.cat(grades)


def _old_faults(bench: Calculator, judge: Seeds, result: Run) -> dict[str, Any]:
    """The columns of a reading about the campaign's distinct faults whose answers are wrong by the label."""
    faults = result.faults.distinct()[:MAX_OLD_FAULTS]
    rows = rows_of(np.array([fault.seed_id for fault in faults], dtype=np.int64), judge)
    theta = np.array([list(fault.theta.values()) for fault in faults], dtype=np.float32)
    noise_seed = np.array([fault.noise_seed for fault in faults], dtype=np.int64)
    tests = Tests(np.arange(len(faults)), rows, theta, noise_seed, np.full(len(faults), "old"))
    assert judge.labels is not None  # checked by `calculator`
    columns = [[torch.empty(0, *judge.shape[1:])], [judge.labels[:0]], [torch.empty(0, dtype=torch.int64)]]
    for row, disturbed, outputs, labels in _run(bench, tests):
        is_wrong = grade(bench.clean.oracle, outputs, labels) < 1
        for column, values in zip(columns, (disturbed, labels, row), strict=True):
            column.append(values[is_wrong].cpu())
    return dict(zip(("old_inputs", "old_labels", "old_row"), map(torch.cat, columns), strict=True))


VALUES_KEY = "reading"


def write_reading(folder: ExperimentFolder, name: str, reading: Reading) -> None:
    """Write a reading, atomically."""
    values = vars(reading)
    arrays = {
        key: torch.as_tensor(each).contiguous() for key, each in values.items() if isinstance(each, np.ndarray | Tensor)
    }
    rest = json.dumps({key: value for key, value in values.items() if key not in arrays})
    folder.write_bytes(name, b"".join(content_of(arrays, {VALUES_KEY: rest})))


def read_reading(folder: ExperimentFolder, name: str) -> Reading | None:
    """A stored reading; None if there is none."""
    path = folder.within(name)
    if path is None or not path.is_file():
        return None
    content = read_tensor_file(path)
    arrays: dict[str, Any] = {key.replace("old.", "old_"): array for key, array in deserialize(content, path).items()}
    columns = {key: arrays.pop(key).numpy() for key in list(arrays) if not key.startswith("old_")}
    try:
        values = check_form(parse_json(read_header(content).get(VALUES_KEY, ""), has_nan=True), record({}))
        if len({column.shape for key, column in columns.items() if key != "mended"}) != 1:
            raise ValueError("its columns have different lengths")
        for kept in (values, columns):
            kept.pop("strength", None)  # which earlier versions measured
        values.pop("old.row", None)  # None in earlier versions
        return Reading(**values, **columns, **arrays)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"{path} must hold a reading, but it is damaged ({first_line(error)}): remove it to repeat the examination"
        ) from error
