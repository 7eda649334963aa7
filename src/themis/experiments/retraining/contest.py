"""A contest of techniques: each chooses as many inputs, the same recipe trains on them, the same seeds judge."""

from __future__ import annotations

import base64
import zlib
from dataclasses import asdict, dataclass, fields, replace
from time import perf_counter
from typing import Any

import numpy as np

from themis.criteria.criterion import Criterion
from themis.data.seeds import Seeds
from themis.errors import UsageError
from themis.experiments.comparison.plan import Technique, split_list
from themis.experiments.retraining.examine import Column, Reading, examine
from themis.experiments.retraining.material import of_tests
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.techniques import THEMIS, Gathered, choose, fit, gather, named, refreshed
from themis.experiments.retraining.tune import tune
from themis.options import check_count, check_known, option
from themis.perturb import Perturbation
from themis.runs.parts import Parts
from themis.target.ledger import Ledger
from themis.target.target import Target


@dataclass(frozen=True)
class Terms:
    """What is the same for every technique."""

    techniques: str = option(
        "themis,nc,kmnc,idc,lsa,random,corners", "who chooses inputs: themis, other policies, criteria; by commas"
    )
    inputs: int | None = option(None, "inputs that each chooses; by default the distinct faults that themis finds")
    most_inputs: int = option(2_000, "inputs at most where themis's faults say how many")
    passes: int = option(5_000, "passes of each campaign on the search seeds, those over clean seeds included")
    round_size: int = option(160, "tests after which a technique learns from what came of them")
    random_seeds: int = option(3, "times that each technique searches and trains, each with a random seed of its own")
    draws: int = option(5, "uniform tests a judge seed, the same for every model")
    judge_passes: int = option(0, "passes of a campaign on the judge seeds against each model; 0 is none")
    random_seed: int = option(0, "the first random seed; the next ones count on from it")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), 0 if each.name in ("judge_passes", "random_seed") else 1
            if each.name == "techniques" or (each.name == "inputs" and value is None):
                continue
            check_count(each.name, value, least)
        if not self.chosen():
            raise UsageError("techniques must name at least one, got none: write themis,random,corners")

    @staticmethod
    def of(**options: Any) -> Terms:
        """Terms from keyword options; techniques may be a list."""
        check_known(Terms, options)
        if not isinstance(options.get("techniques", ""), str):
            options["techniques"] = ",".join(map(str, options["techniques"]))
        return Terms(**options)

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques, none of them twice."""
        return tuple(dict.fromkeys(named(each) for each in split_list(self.techniques)))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """What the contest is held on. The target's oracle is settled: one tolerance for all models."""

    target: Target
    parts: Parts
    perturbation: Perturbation
    ledger: Ledger
    """What the weights were trained on before."""
    known: Seeds | None = None
    """What criteria learn from; by default the train part."""


class Contest:
    """Runs techniques on a case; what they share is done once."""

    def __init__(self, case: Case, terms: Terms, recipe: Recipe) -> None:
        self.case, self.terms = case, terms
        self.recipe = replace(recipe, patience=None)  # an early stop would cost some less than others
        self._fitted: dict[str, Criterion | None] = {}
        self._before: Reading | None = None
        self._held: dict[tuple[str, int], Gathered] = {}

    def before(self) -> Reading:
        """The model as it came, examined."""
        if self._before is None:
            self._before = self._examine(self.case.target, self.case.ledger, None)
        return self._before

    def inputs(self) -> int:
        """How many inputs each technique chooses."""
        if self.terms.inputs is not None:
            return self.terms.inputs
        found = self.gathered(Technique(THEMIS), self.terms.random_seed).distinct_faults
        if not found:
            raise UsageError("a contest needs faults to choose from, themis found none: raise the magnitude or passes")
        return min(found, self.terms.most_inputs)

    def gathered(self, technique: Technique, random_seed: int) -> Gathered:
        """What a technique's campaign ran; the last one is kept."""
        key = (technique.name, random_seed)
        if key not in self._held:
            case, terms = self.case, self.terms
            if technique.name not in self._fitted:
                known = case.parts.train if case.known is None else case.known
                self._fitted[technique.name] = fit(technique, case.target, known)
            self._held = {
                key: gather(
                    technique,
                    case.target,
                    case.parts.search,
                    case.perturbation,
                    passes=terms.passes,
                    random_seed=random_seed,
                    criterion=self._fitted[technique.name],
                    round_size=terms.round_size,
                )
            }
        return self._held[key]

    def run(self, technique: Technique, random_seed: int) -> dict[str, Any]:
        """A technique's campaign, choice, training and examination; plain data."""
        case, began = self.case, perf_counter()
        n = self.inputs()
        found = self.gathered(technique, random_seed)
        at = choose(found, n)
        tests, is_fault = found.tests[at], found.is_fault[at]
        if technique.name == THEMIS:
            tests, is_fault = refreshed(tests, case.perturbation, random_seed), is_fault[::2]
        searched = perf_counter()
        material = of_tests(
            tests.seed,
            tests.theta,
            tests.noise_seed,
            case.parts.search,
            case.perturbation,
            case.target,
            clean=case.parts.train,
        )
        recipe = replace(self.recipe, random_seed=random_seed)
        assert not isinstance(case.target.oracle, str)  # it is settled
        tuned = tune(case.target, material, case.perturbation, recipe, oracle=case.target.oracle)
        trained = perf_counter()
        before = self.before() if self.terms.judge_passes else None  # whose faults are run again
        reading = self._examine(tuned.target, case.ledger.merge(tuned.ledger), before)
        return {
            "technique": technique.name,
            "random_seed": random_seed,
            "inputs": len(at),
            "faults_chosen": int(is_fault.sum()),
            "seeds_chosen": len(np.unique(tests.seed)),
            "faults_found": found.distinct_faults,
            "seeds_found": found.failing_seeds,
            "passes": found.passes,
            "epochs": len(tuned.history),
            "best_epoch": tuned.best,
            "seconds": {
                "search": round(searched - began, 2),
                "train": round(trained - searched, 2),
                "examine": round(perf_counter() - trained, 2),
            },
            "reading": reading.as_dict(),
            "by_seed": columns_of(reading),
        }

    def _examine(self, target: Target, ledger: Ledger, before: Reading | None) -> Reading:
        case, terms = self.case, self.terms
        return examine(
            target,
            case.parts.judge,
            case.perturbation,
            ledger=ledger,
            draws=terms.draws,
            passes=terms.judge_passes,
            random_seed=terms.random_seed,
            before=before,
        )


COLUMNS = ("clean", "disturbed", "clean_error", "disturbed_error")


def columns_of(reading: Reading) -> dict[str, str]:
    """Each judge seed's figures, packed."""
    return {name: pack(column) for name in COLUMNS if (column := getattr(reading, name)) is not None}


def pack(column: Column) -> str:
    """Numbers as text, float32 and compressed: most are one of a few."""
    return base64.b85encode(zlib.compress(column.astype("<f4").tobytes(), 9)).decode()


def unpack(text: str) -> Column:
    """The other way round."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), "<f4").astype(np.float64)
