"""The cells of a contest: a technique searches and chooses inputs, and a copy of the model is trained on them."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from themis.criteria.criterion import Criterion
from themis.data.groups import seed_hashes
from themis.data.seeds import Seeds
from themis.errors import UsageError
from themis.measure.tests import Ints
from themis.perturb import Perturbation
from themis.reading import Form, all_of, number, optional, record, values_of, whole
from themis.reading import text as string
from themis.retraining.examine import Column, Exam, Reading, examine
from themis.retraining.material import of_tests
from themis.retraining.recipe import Recipe
from themis.retraining.tune import tune
from themis.runs.parts import Parts
from themis.target.fingerprint import hash_text
from themis.target.ledger import Ledger
from themis.target.target import Target
from themis_lab.contest.choosing import (
    THEMIS,
    ExecutedTests,
    choose_tests,
    fit_criterion,
    refresh_tests,
    run_technique,
)
from themis_lab.contest.plan import FREE, ContestCell, ContestPlan
from themis_lab.techniques import Technique

Record = dict[str, Any]
MAX_UNPACKED = 1 << 30
"""Bytes of a column that was packed."""
COLUMNS = ("clean", "disturbed", "clean_error", "disturbed_error")
"""The columns of a `Reading` that are stored for every judge seed."""


class NoFaultsError(UsageError):
    """A contest has nothing to train on: `themis` found no fault."""


@dataclass(frozen=True)
class Case:
    """The model and the data of a contest. The target's oracle is settled, so that all models have one tolerance."""

    target: Target
    parts: Parts
    perturbation: Perturbation
    ledger: Ledger
    """The seeds that the weights were trained on before."""
    known: Seeds | None = None
    """The data that criteria are fitted to; by default the train part."""
    groups: tuple[Ints, Ints] | None = None
    """What the search and the train seeds belong to; None if each stands for itself."""

    def digest(self, plan: ContestPlan, recipe: Recipe) -> str:
        """A hash of all that decides the cells of a contest."""
        parts = [hash_text(seed_hashes(seeds).tobytes().hex()) for seeds in vars(self.parts).values()]
        theta = [(theta.name, theta.low, theta.high) for theta in self.perturbation.theta]
        n_known = None if self.known is None else len(self.known)
        oracle = self.target.oracle if isinstance(self.target.oracle, str) else self.target.oracle.spec()
        options = {name: value for name, value in plan.as_dict().items() if name not in FREE}
        training = recipe.as_dict()
        if not recipe.shortens([self.perturbation]):
            del training["attack_steps"]  # earlier versions did not have it
        identity = (
            self.target.fingerprint(),
            oracle,
            parts,
            n_known,
            self.perturbation.name,
            theta,
            options,
            training,
            *([] if self.groups is None else [numbers.tolist() for numbers in self.groups]),
        )
        return hash_text(json.dumps(identity, default=str))[:16]


class Contest:
    """Runs techniques on a case; what they share is computed once."""

    def __init__(self, case: Case, plan: ContestPlan, recipe: Recipe) -> None:
        self.case, self.plan = case, plan
        self.recipe = replace(recipe, patience=None)  # stopping early would make some techniques cheaper than others
        self._criteria: dict[str, Criterion | None] = {}
        self._before: Reading | None = None
        self._executed: dict[ContestCell, ExecutedTests] = {}

    def before(self) -> Reading:
        """The examination of the original model."""
        if self._before is None:
            self._before = self._examine(self.case.target, self.case.ledger, None)
        return self._before

    def inputs(self) -> int:
        """How many inputs each technique chooses."""
        if self.plan.inputs is not None:
            return self.plan.inputs
        found = self.executed(ContestCell(Technique(THEMIS), self.plan.random_seed)).distinct_faults
        if not found:
            raise NoFaultsError(
                "a contest needs faults to choose from, but themis found none: raise the magnitude or passes"
            )
        return min(found, self.plan.most_inputs)

    def executed(self, cell: ContestCell) -> ExecutedTests:
        """The tests of a technique's campaign; only the last campaign is remembered."""
        if cell not in self._executed:
            case, plan, technique = self.case, self.plan, cell.technique
            if technique.name not in self._criteria:
                known = case.parts.train if case.known is None else case.known
                self._criteria[technique.name] = fit_criterion(technique, case.target, known)
            self._executed = {
                cell: run_technique(
                    technique,
                    case.target,
                    case.parts.search,
                    case.perturbation,
                    passes=plan.passes,
                    random_seed=cell.random_seed,
                    criterion=self._criteria[technique.name],
                    round_size=plan.round_size,
                )
            }
        return self._executed[cell]

    def run(self, cell: ContestCell) -> Record:
        """Search, choose, train and examine; the result is plain data."""
        case, start = self.case, perf_counter()
        n_inputs = self.inputs()
        executed = self.executed(cell)
        chosen = choose_tests(executed, n_inputs)
        tests, is_fault = executed.tests[chosen], executed.is_fault[chosen]
        if cell.technique.name == THEMIS:
            tests, is_fault = refresh_tests(tests, case.perturbation, cell.random_seed), is_fault[::2]
        searched = perf_counter()
        material = of_tests(tests, case.parts.search, case.perturbation, case.target, clean=case.parts.train)
        material = replace(material, groups=case.groups)
        recipe = replace(self.recipe, random_seed=cell.random_seed)
        tuned = tune(case.target, material, case.perturbation, recipe)
        trained = perf_counter()
        before = self.before() if self.plan.judge_passes else None  # its faults are run again
        reading = self._examine(tuned.target, case.ledger.merge(tuned.ledger), before)
        return {
            "technique": cell.technique.name,
            "random_seed": cell.random_seed,
            "inputs": len(chosen),
            "faults_chosen": int(is_fault.sum()),
            "seeds_chosen": len(np.unique(tests.seed)),
            "faults_found": executed.distinct_faults,
            "seeds_found": executed.failing_seeds,
            "passes": executed.passes,
            "epochs": len(tuned.history),
            "best_epoch": tuned.best,
            "seconds": {
                "search": round(searched - start, 2),
                "train": round(trained - searched, 2),
                "examine": round(perf_counter() - trained, 2),
            },
            "reading": reading.as_dict(),
            "by_seed": pack_columns(reading),
        }

    def _examine(self, target: Target, ledger: Ledger, before: Reading | None) -> Reading:
        case, plan = self.case, self.plan
        exam = Exam(plan.draws, plan.judge_passes, plan.random_seed)
        return examine(target, case.parts.judge, case.perturbation, exam, ledger=ledger, before=before)


MakeCase = Callable[[], Case]
"""Makes the case again in another process; it must be picklable, such as a module's function or a `partial` of one."""


@dataclass(frozen=True)
class RebuildContest:
    """Makes a contest again in another process."""

    make: MakeCase
    plan: ContestPlan
    recipe: Recipe

    def __call__(self) -> Callable[[ContestCell], Record]:
        return Contest(self.make(), self.plan, self.recipe).run


def failed_cell(cell: ContestCell, reason: str) -> Record:
    """What is stored of a cell that failed."""
    return {"technique": cell.technique.name, "random_seed": cell.random_seed, "error": reason}


def pack_columns(reading: Reading) -> dict[str, str]:
    """The columns of a reading, packed."""
    return {name: pack(column) for name in COLUMNS if (column := getattr(reading, name)) is not None}


def pack(column: Column) -> str:
    """Numbers as text: float32 and compressed, since most of them repeat."""
    return base64.b85encode(zlib.compress(column.astype("<f4").tobytes(), 9)).decode()


def unpack(text: str) -> Column:
    """The inverse of `pack`; raises ValueError if the text is damaged."""
    unpacked = zlib.decompressobj()
    try:
        content = unpacked.decompress(base64.b85decode(text), MAX_UNPACKED)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacked.eof:
        raise ValueError("the column is cut short or too long")
    return np.frombuffer(content, "<f4").astype(np.float64)


def contest_form(n_judge: int) -> Form:
    """What is stored of a cell; `n_judge` is the number of judge seeds."""

    def column(value: Any, place: str) -> None:
        string(1 << 26)(value, place)
        values = unpack(value)
        if len(values) != n_judge or not np.isfinite(values).all():
            raise ValueError(f"{place} must hold {n_judge:,} finite numbers")

    reading = record(
        {
            **dict.fromkeys(("clean", "disturbed"), number()),
            **dict.fromkeys(("distinct_faults", "failing_seeds", "held", "mended"), optional(number())),
        }
    )
    counts = (
        "inputs",
        "faults_chosen",
        "seeds_chosen",
        "faults_found",
        "seeds_found",
        "passes",
        "epochs",
        "best_epoch",
    )
    return record(
        {
            "technique": string(),
            "random_seed": whole(),
            **dict.fromkeys(counts, whole()),
            "reading": reading,
            "by_seed": all_of(record(dict.fromkeys(COLUMNS[:2], column)), values_of(column)),
        }
    )
