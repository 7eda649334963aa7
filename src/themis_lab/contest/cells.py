"""The cells of a contest: a technique searches and chooses inputs, and a copy of the model is trained on them.

One rule chooses among the tests of every technique. `themis` then does with its choice what `themis retrain` does: it
disturbs every other input again, at a random theta. The technique `scheduled` is the same search without this step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from themis.compute import rng
from themis.criteria import choose_criterion
from themis.data.groups import seed_hashes
from themis.data.seeds import Seeds
from themis.errors import UsageError
from themis.measure.tests import Bools, Floats, Ints, Results, Tests
from themis.perturb import Perturbation
from themis.retraining.examine import Exam, Reading, examine
from themis.retraining.material import of_tests, rank
from themis.retraining.recipe import Recipe
from themis.retraining.tune import tune
from themis.runs.parts import Parts
from themis.search import Policy, choose_policy
from themis.target.fingerprint import hash_text
from themis.target.ledger import Ledger, allow_trained_seeds
from themis.target.target import Target
from themis_lab.comparison.cells import PASSES_ALONE, run_to_the_end
from themis_lab.contest.plan import FREE_IN_CONTEST, THEMIS, ContestCell, ContestPlan
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.view import fit_to
from themis_lab.techniques import GUIDED, Technique

OWN_POLICY = "scheduled"
"""The policy that `themis` searches with."""
FOR_REFRESHED = 1 << 33
"""Identifies the random numbers that are drawn here; the counters of policies stay below it."""


@dataclass(frozen=True)
class ExecutedTests:
    """All tests of a technique's campaign with their outcomes, in the order in which they were run."""

    tests: Tests
    is_fault: Bools
    outcome: Ints
    margin: Floats
    passes: int
    distinct_faults: int
    failing_seeds: int


def record_tests(policy: Policy) -> list[tuple[Tests, Results]]:
    """A list of everything that the policy observes, in the order of the tests."""
    recorded: list[tuple[Tests, Results]] = []
    observe = policy.observe

    def observe_and_record(tests: Tests, results: Results) -> None:
        recorded.append((tests, results))
        observe(tests, results)

    policy.observe = observe_and_record  # type: ignore[method-assign]
    return recorded


def fit_criterion(technique: Technique, target: Target, train: Seeds) -> Criterion | None:
    """The criterion of a technique, fitted to training data; None if it has no criterion."""
    return None if technique.criterion is None else fit_to(choose_criterion(technique.criterion), target, train)


def run_technique(
    technique: Technique,
    target: Target,
    seeds: Seeds,
    perturbation: Perturbation,
    *,
    passes: int,
    random_seed: int,
    criterion: Criterion | None = None,
    **options: Any,
) -> ExecutedTests:
    """Run the campaign of a technique on the search seeds; `passes` includes those over the clean seeds."""
    name = OWN_POLICY if technique.name == THEMIS else technique.name
    policy = choose_policy(GUIDED if criterion is not None else name)
    recorded = record_tests(policy)
    with allow_trained_seeds():
        options = {"policy": policy, "criterion": criterion, "max_passes": passes, **PASSES_ALONE, **options}
        result = run_to_the_end(target, seeds, perturbation, random_seed=random_seed, **options)
    batches = [tests for tests, _ in recorded]
    tests = Tests(*(np.concatenate([getattr(batch, field.name) for batch in batches]) for field in fields(Tests)))
    results, last = Results.join([results for _, results in recorded]), result.rounds[-1]
    order = np.argsort(tests.number, kind="stable")
    order = order[results.was_run[order]]
    return ExecutedTests(
        tests[order],
        results.is_fault[order],
        results.outcome[order],
        results.margin[order],
        last.passes,
        last.distinct_faults,
        last.failing_seeds,
    )


def choose_tests(executed: ExecutedTests, n: int) -> Ints:
    """The `n` tests of a campaign to train on: one rule for every technique, so that only their searches compete.

    Faults come first, in the order of `spread_out`. They are followed by passing tests that were nearest to a fault,
    every seed once before any seed twice.
    """
    faults, passing = np.flatnonzero(executed.is_fault), np.flatnonzero(~executed.is_fault)
    seed, number = executed.tests.seed, executed.tests.number
    faults = faults[spread_out(seed[faults], executed.outcome[faults], number[faults], n)]
    margin = executed.margin[passing]
    turn = rank(margin, seed[passing])
    return np.concatenate([faults, passing[np.lexsort((margin, turn))]])[:n]


def spread_out(seed_id: Ints, answer: Ints, score: NDArray[Any], n: int) -> Ints:
    """The indices of the faults to take, ascending: one per seed first, then other outcomes, then repeated ones.

    Within each of these, outcomes alternate and smaller scores come first.
    """
    if len(seed_id) <= n:
        return np.arange(len(seed_id))
    repeat = rank(score, answer, seed_id)
    turn = rank(score, seed_id, repeat)
    among = rank(score, answer, turn, repeat)
    return np.sort(np.lexsort((score, among, turn, repeat))[:n])


def refresh_tests(tests: Tests, perturbation: Perturbation, random_seed: int) -> Tests:
    """The tests with every other one at a theta drawn uniformly, with its own noise.

    The faults of a search lie at the edges of the range of theta: a model trained on them alone may miss the inside.
    """
    rows = np.arange(len(tests))
    low, high = (np.array([getattr(theta, end) for theta in perturbation.theta]) for end in ("low", "high"))
    draws = np.stack([rng.uniform(random_seed, FOR_REFRESHED, k, rows) for k in range(len(low))], 1)
    theta = (low + draws * (high - low)).astype(np.float32)
    is_fresh = rows % 2 == 1
    return replace(
        tests,
        theta=np.where(is_fresh[:, None], theta, tests.theta),
        noise_seed=np.where(is_fresh, rng.mix(random_seed, FOR_REFRESHED, rows), tests.noise_seed),
    )


Record = dict[str, Any]
STORED = ("clean", "disturbed", "clean_error", "disturbed_error")
"""The columns of a `Reading` that are stored for every judge seed."""


class NoFaultsError(UsageError):
    """There is nothing to train on, because `themis` found no fault."""


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
        """A hash of everything that determines the cells of a contest."""
        parts = [hash_text(seed_hashes(seeds).tobytes().hex()) for seeds in vars(self.parts).values()]
        theta = [(theta.name, theta.low, theta.high) for theta in self.perturbation.theta]
        n_known = None if self.known is None else len(self.known)
        oracle = self.target.oracle if isinstance(self.target.oracle, str) else self.target.oracle.spec()
        options = {name: value for name, value in plan.as_dict().items() if name not in FREE_IN_CONTEST}
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
    """Runs techniques on a case, and computes what they share once."""

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
        """The number of inputs that each technique chooses."""
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
            "by_seed": columns_of(reading),
        }

    def _examine(self, target: Target, ledger: Ledger, before: Reading | None) -> Reading:
        case, plan = self.case, self.plan
        exam = Exam(plan.draws, plan.judge_passes, plan.random_seed)
        return examine(target, case.parts.judge, case.perturbation, exam, ledger=ledger, before=before)


MakeCase = Callable[[], Case]
"""Makes the case again in another process; it must be picklable, such as a module's function or a `partial` of one."""


def make_runner(case: Case | MakeCase, plan: ContestPlan, recipe: Recipe) -> Callable[[ContestCell], Record]:
    """The function that runs cells, for another process."""
    return Contest(case if isinstance(case, Case) else case(), plan, recipe).run


def failed_cell(cell: ContestCell, reason: str) -> Record:
    """The stored record of a failed cell."""
    return {"technique": cell.technique.name, "random_seed": cell.random_seed, "error": reason}


def columns_of(reading: Reading) -> dict[str, list[float]]:
    """The stored readings of all judge seeds, as float32."""
    columns = ((name, getattr(reading, name)) for name in STORED)
    return {name: column.astype(np.float32).tolist() for name, column in columns if column is not None}
