"""Examining a model on judge seeds: its score, clean and disturbed, and the faults that a campaign still finds."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
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
from themis.measure.tests import Ints, Tests
from themis.oracle import Motion
from themis.perturb import Perturbation
from themis.reading import check_form, number, optional, parse_json, record, text, whole
from themis.retraining.grading import calculator, errors, grade
from themis.retraining.material import rows_of
from themis.runs.analysis.robustness import robustness
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
class OldFaults:
    """Disturbed inputs of judge seeds that an earlier model answered incorrectly, one per distinct fault."""

    inputs: Tensor  # [faults, ...], on the CPU
    rows: Tensor  # rows of the judge seeds
    labels: Tensor | None = None
    """The labels, moved with the pictures; None if they do not move."""


@dataclass(frozen=True)
class CampaignFindings:
    """The results of a campaign on the judge seeds."""

    passes: int
    tests: int
    usable: int
    distinct_faults: int
    failing_seeds: int
    fault_rate: float | None
    distinct: Column = field(repr=False)  # distinct faults of each judge seed
    held: Column = field(repr=False)  # 1 for each seed that is answered correctly and passed all tests


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
    found: CampaignFindings | None
    """None if no passes were available for a campaign."""
    old: OldFaults | None = field(repr=False)
    """This model's own faults, to be tested on the next one."""
    mended: Column | None = field(repr=False)
    """The grade of each old fault's input now, `[faults]`; None for the first model."""
    strength: Column | None = field(default=None, repr=False)
    """The smallest strength found that breaks each seed: 0 if it is answered incorrectly when clean, 1 if none does."""

    @property
    def clean_score(self) -> float:
        """Accuracy, or the share of answers within the tolerance."""
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
            "strength": _mean(self.strength),
            "mended": None if self.mended is None or not len(self.mended) else float(self.mended.mean()),
        }


@dataclass(frozen=True)
class Exam:
    """How models are examined; the same for every model, so that readings can be paired."""

    draws: int = 5
    """Uniform tests per seed."""
    passes: int = 5_000
    """The budget of a campaign with policy scheduled, including the clean passes; 0 for no campaign."""
    random_seed: int = 0
    strengths: bool = False
    """Whether to shrink the campaign's faults to the smallest strength that breaks each seed."""
    min_ssim: float | None = None
    """That of the campaign."""


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
        mended = None if before is None or before.old is None else _grade_old(bench, before.old)
    found, old, strength = None, None, None
    if exam.passes:
        result = run(
            target,
            judge,
            perturbation,
            max_passes=exam.passes,
            random_seed=exam.random_seed,
            min_ssim=exam.min_ssim,
            policy="scheduled",
            max_tests=None,
            plateau=None,
            coverage=None,
        )
        if result.stop_reason == "user":
            raise KeyboardInterrupt
        found = _findings(result, judge, _column(clean))
        with target.opened():
            old = _old_faults(bench, judge, result)
        strength = _strengths(result, judge, _column(clean)) if exam.strengths else None
    return Reading(
        perturbation.name,
        exam.random_seed,
        exam.draws,
        judge.seed_id.numpy(),
        _column(clean),
        _column(disturbed),
        None if clean_error is None else _column(clean_error),
        None if disturbed_error is None else _column(disturbed_error),
        found,
        old,
        None if mended is None else _column(mended),
        strength,
    )


def exam_tests(perturbation: Perturbation, judge: Seeds, draws: int, random_seed: int) -> Tests:
    """Uniform tests, `draws` per seed, as a function of seed and draw only; each draw covers all seeds."""
    n = len(judge)
    seed_id, number = judge.seed_id.numpy(), np.arange(n * draws)
    draw, position = np.divmod(number, n)
    margin = np.zeros(n, dtype=np.float32)
    space = Space.of(perturbation, np.arange(n), seed_id, margin, random_seed + FOR_EXAM)
    theta = space.uniform_theta(EXAM_STREAM, seed_id[position], draw)
    return space.tests(draw, position, theta, "uniform")


def _disturbed(bench: Calculator, judge: Seeds, draws: int, random_seed: int) -> tuple[Tensor, Tensor | None]:
    """The mean grade of each seed over its draws, and its mean error."""
    tests = exam_tests(bench.perturbation, judge, draws, random_seed)
    grades, gaps = [], []
    for first in range(0, len(tests), bench.chunk):
        chunk = tests[first : first + bench.chunk]
        _, outputs, motion = bench.run_chunk(chunk, bench.chunk)
        labels = _labels(bench, torch.from_numpy(chunk.seed), motion)
        grades.append(grade(bench.clean.oracle, outputs, labels))
        error = errors(bench.clean.oracle, outputs, labels)
        gaps += [] if error is None else [error]
    means = [torch.cat(parts).view(draws, len(judge)).mean(0) for parts in (grades, gaps) if parts]
    return means[0], means[1] if gaps else None


def _grade_old(bench: Calculator, old: OldFaults) -> Tensor:
    """The grades of the current answers to old faults."""
    grades = [torch.empty(0, dtype=torch.float64)]
    for first in range(0, len(old.rows), bench.chunk):
        chunk = slice(first, first + bench.chunk)
        with torch.no_grad():
            outputs = bench.target.forward(old.inputs[chunk].to(bench.device)).float()
        labels = _labels(bench, old.rows[chunk]) if old.labels is None else old.labels[chunk].to(bench.device)
        grades.append(grade(bench.clean.oracle, outputs, labels).cpu())
    return torch.cat(grades)


def _old_faults(bench: Calculator, judge: Seeds, result: Run) -> OldFaults:
    """The inputs of the campaign's distinct faults whose answers are wrong by the label."""
    faults = result.faults.distinct()[:MAX_OLD_FAULTS]
    rows = rows_of(np.array([fault.seed_id for fault in faults], dtype=np.int64), judge)
    theta = np.array([list(fault.theta.values()) for fault in faults], dtype=np.float32)
    noise_seed = np.array([fault.noise_seed for fault in faults], dtype=np.int64)
    tests = Tests(np.arange(len(faults)), rows, theta, noise_seed, np.full(len(faults), "old"))
    inputs, wrong_rows = [torch.empty(0, *judge.shape[1:])], [torch.empty(0, dtype=torch.int64)]
    moved_labels = []
    for first in range(0, len(faults), bench.chunk):
        chunk = tests[first : first + bench.chunk]
        disturbed, outputs, motion = bench.run_chunk(chunk, bench.chunk)
        chunk_rows = torch.from_numpy(chunk.seed)
        labels = _labels(bench, chunk_rows, motion)
        is_wrong = (grade(bench.clean.oracle, outputs, labels) < 1).cpu()
        inputs.append(disturbed.cpu()[is_wrong])
        wrong_rows.append(chunk_rows[is_wrong])
        moved_labels += [labels.cpu()[is_wrong]] if motion else []
    return OldFaults(torch.cat(inputs), torch.cat(wrong_rows), torch.cat(moved_labels) if moved_labels else None)


def _findings(result: Run, judge: Seeds, clean: Column) -> CampaignFindings:
    last, rate, columns = result.rounds[-1], result.fault_rate, result.faults.columns
    distinct = np.zeros(len(judge), dtype=np.float64)
    if len(result.faults):
        pairs = np.unique(np.stack([columns["seed_id"], columns["answer"]], 1), axis=0)
        np.add.at(distinct, rows_of(pairs[:, 0], judge), 1.0)
    return CampaignFindings(
        last.passes,
        last.tests,
        result.start.n_usable,
        last.distinct_faults,
        last.failing_seeds,
        None if rate is None else rate.value,
        distinct,
        np.where(distinct > 0, 0.0, clean),
    )


def _strengths(result: Run, judge: Seeds, clean: Column) -> Column:
    """The smallest strength found that breaks each seed; one that withstands them all counts as its clean grade."""
    shrunk = robustness(result).shrunk
    strength = clean.copy()
    strength[rows_of(np.array([fault.seed_id for fault in shrunk], dtype=np.int64), judge)] = [
        fault.weakest for fault in shrunk
    ]
    return strength


def _labels(bench: Calculator, rows: Tensor, motion: Motion | None = None) -> Tensor:
    """The labels of tests, moved with their pictures."""
    assert bench.clean.labels is not None
    labels = bench.clean.labels[rows.to(bench.device)]
    return bench.clean.oracle.move_labels(labels, motion) if motion else labels


def _column(values: Tensor) -> Column:
    column: Column = values.double().cpu().numpy()
    return column


def _mean(values: Column | None) -> float | None:
    return None if values is None else float(values.mean())


VALUES_KEY = "values"
_NESTED = {"found": CampaignFindings, "old": OldFaults}
_VALUES = record(
    {"perturbation": text(), "random_seed": whole(), "draws": whole(1)},
    {
        "found": optional(
            record(
                {
                    **dict.fromkeys(("passes", "tests", "usable", "distinct_faults", "failing_seeds"), whole()),
                    "fault_rate": optional(number()),
                }
            )
        ),
        "old": optional(record({})),
    },
)


def write_reading(folder: ExperimentFolder, name: str, reading: Reading) -> None:
    """Write a reading, atomically."""
    arrays: dict[str, Tensor] = {}
    values = _separate(reading, "", arrays)
    folder.write_bytes(name, b"".join(content_of(arrays, {VALUES_KEY: json.dumps(values)})))


def read_reading(folder: ExperimentFolder, name: str) -> Reading | None:
    """A stored reading; None if there is none."""
    path = folder.within(name)
    if path is None or not path.is_file():
        return None
    content = read_tensor_file(path)
    arrays = deserialize(content, path)
    try:
        reading: Reading = _restore(Reading, _values(content), "", arrays)
        _check(reading)
    except (TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path} must hold a reading, but it is damaged ({first_line(error)}): remove it to repeat the examination"
        ) from error
    return reading


def _separate(part: Any, prefix: str, arrays: dict[str, Tensor]) -> dict[str, Any]:
    """The plain values of a dataclass; its arrays are added to `arrays` under their prefixed names."""
    values: dict[str, Any] = {}
    for column in fields(part):
        name, value = column.name, getattr(part, column.name)
        if isinstance(value, np.ndarray | Tensor):
            arrays[prefix + name] = torch.as_tensor(np.ascontiguousarray(value)).contiguous()
        else:
            values[name] = _separate(value, f"{prefix}{name}.", arrays) if name in _NESTED and value else value
    return values


def _restore(kind: Any, values: dict[str, Any], prefix: str, arrays: dict[str, Tensor]) -> Any:
    """The inverse of `_separate`."""
    arguments: dict[str, Any] = dict(values)
    for name, value in values.items():
        if name in _NESTED and value is not None:
            arguments[name] = _restore(_NESTED[name], value, f"{prefix}{name}.", arrays)
    for column in fields(kind):
        if prefix + column.name in arrays:
            tensor = arrays[prefix + column.name]
            arguments[column.name] = tensor if kind is OldFaults else tensor.numpy()
    return kind(**arguments)


def _values(content: bytes) -> dict[str, Any]:
    values: dict[str, Any] = check_form(parse_json(read_header(content).get(VALUES_KEY, ""), has_nan=True), _VALUES)
    return values


def _check(reading: Reading) -> None:
    """Raise ValueError if the columns do not belong together."""
    seeds, found, old = reading.seed_id, reading.found, reading.old
    per_seed = [reading.clean, reading.disturbed, reading.clean_error, reading.disturbed_error, reading.strength]
    per_seed += [] if found is None else [found.distinct, found.held]
    for column in per_seed:
        if column is not None and column.shape != seeds.shape:
            raise ValueError("its columns have different lengths")
    if seeds.ndim != 1 or (reading.mended is not None and reading.mended.ndim != 1):
        raise ValueError("its columns have the wrong shape")
    if old is not None and len({len(column) for column in vars(old).values() if column is not None}) > 1:
        raise ValueError("its old faults have columns of different lengths")
