"""Contests: techniques choose equally many inputs, train and are judged in the same way, and no cell is run twice."""

import copy
import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console

import themis
from themis.errors import UsageError
from themis.experiments import Listener
from themis.measure.tests import Tests
from themis.perturb import choose_perturbation
from themis.retraining.grading import settled_oracle
from themis.retraining.recipe import Recipe
from themis.runs.parts import Parts
from themis.target.ledger import Ledger, remember
from themis_lab.contest.api import run_contest
from themis_lab.contest.cells import (
    Case,
    Contest,
    ExecutedTests,
    choose_tests,
    failed_cell,
    fit_criterion,
    refresh_tests,
    run_technique,
    spread_out,
)
from themis_lab.contest.plan import ContestCell, ContestPlan, choose_competitor
from themis_lab.contest.standings import ranked, show, summarise
from themis_lab.executors import attempt

pytestmark = [pytest.mark.xdist_group("contest"), pytest.mark.usefixtures("few_held_out_tests")]

PLAN = ContestPlan(techniques="random,themis,nc", passes=700, random_seeds=2, draws=4, judge_passes=400)
RECIPE = Recipe(fresh=0.0, epochs=2, batches=15, mix=0.5, share=1.0)


def make_case(trained):
    module, held_out = trained
    parts = Parts(*(held_out[torch.arange(first, 1000, 4)] for first in (0, 1, 2)))
    return Case(settled(themis.Target(module), parts.search), parts, choose_perturbation("gaussian", 0.8), Ledger())


def settled(target, seeds):
    return replace(target, oracle=settled_oracle(target, seeds))


@pytest.fixture(scope="module")
def case(trained):
    return make_case(trained)


class Told(Listener):
    def __init__(self):
        self.steps, self.began = [], []

    def on_cells(self, n_done, n_cells, noun):
        self.began.append((n_done, n_cells))

    def on_cell_end(self, end):
        self.steps.append(end.text)


class Stopping(Told):
    def on_cells(self, n_done, n_cells, noun):
        super().on_cells(n_done, n_cells, noun)
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def contested(case, tmp_path_factory):
    out, told = tmp_path_factory.mktemp("contest") / "out", Told()
    return run_contest(case, PLAN, RECIPE, out=out, listener=told), out, told


def test_every_technique_has_equally_many_inputs_and_gains(contested):
    result, _, told = contested
    assert told.began == [(0, 6)]
    assert len(told.steps) == 6
    assert [each.technique for each in result.standings] == ["random", "themis", "nc"]
    assert result.inputs == min(
        each["faults_found"] for each in result.records if each["technique"] == "themis" and each["random_seed"] == 0
    )
    for each in result.standings:
        assert each.errors == ()
        assert each.figures["inputs"] == result.inputs
        assert each.shifts["disturbed"].difference > 0.02  # a real gain on seeds that were not trained on
        assert each.shifts["clean"].difference > -0.05
        assert each.figures["mended"] > 0.1
    themis = result.standings[1]
    assert themis.figures["faults_chosen"] > 0.4 * themis.figures["inputs"]
    assert themis.lead is None


def test_the_lead_is_paired_by_random_seed(contested):
    result, _, _ = contested
    scores = {
        name: np.array([each["reading"]["disturbed"] for each in result.records if each["technique"] == name])
        for name in ("themis", "random")
    }
    lead = result.standings[0].lead
    gaps = scores["themis"] - scores["random"]
    assert lead.over_runs.value == pytest.approx(gaps.mean(), abs=1e-6)
    assert lead.over_seeds.value == pytest.approx(gaps.mean(), abs=1e-6)
    assert lead.over_seeds.low < lead.over_seeds.value < lead.over_seeds.high
    reaches = [estimate.high - estimate.value for estimate in (lead.over_runs, lead.over_seeds)]
    assert lead.combined.high - lead.combined.value == pytest.approx(np.hypot(*reaches))
    assert lead.value == pytest.approx(gaps.mean(), abs=1e-6)
    assert lead.over_runs.high - lead.over_runs.value == pytest.approx(12.706 * np.ptp(gaps) / 2, rel=1e-3, abs=1e-6)


def test_the_same_call_runs_nothing_and_a_new_technique_runs_alone(case, contested, tmp_path):
    result, out, _ = contested
    out = shutil.copytree(out, tmp_path / "again")
    told = Told()
    again = run_contest(case, PLAN, RECIPE, out=out, listener=told)
    assert told.began == [(6, 6)]
    assert told.steps == []
    assert again.standings == result.standings
    told = Told()
    more = ContestPlan(**{**PLAN.as_dict(), "techniques": "themis,corners", "random_seeds": 1})
    run_contest(case, more, RECIPE, out=out, listener=told)
    assert told.began == [(1, 2)]
    assert [each.split(",")[0] for each in told.steps] == ["corners"]
    told = Stopping()
    with pytest.raises(KeyboardInterrupt):
        run_contest(case, more, Recipe(fresh=0.0, epochs=1, batches=2), out=out, listener=told)
    assert told.began == [(0, 2)]  # another recipe makes other cells


def test_results_are_plain_data_a_table_and_a_figure(case, contested):
    result, out, _ = contested
    kept = json.loads((out / "contest.json").read_text())
    assert kept["inputs"] == result.inputs
    assert len(kept["cells"]) == 6
    assert "by_seed" not in kept["cells"][0]
    assert (out / "contest.md").read_text().startswith("### Retraining from what techniques choose, gaussian")
    assert (out / "contest.png").read_bytes().startswith(b"\x89PNG")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(result, console)
    console.file.close()
    text = console.export_text()
    assert "themis above by" in text
    assert ranked(result.standings)[0].technique == "themis"


def test_a_case_made_by_a_function_gives_the_same_results(trained, case, contested):
    result, _, _ = contested
    plan = ContestPlan(**{**PLAN.as_dict(), "techniques": "random", "random_seeds": 1, "inputs": result.inputs})
    with pytest.raises(UsageError, match="workers must be 1 without make"):
        run_contest(case, plan, RECIPE, workers=2)
    made = run_contest(make=partial(make_case, trained), plan=plan, recipe=RECIPE)
    first = next(each for each in result.records if each["technique"] == "random")
    assert made.records[0]["by_seed"] == first["by_seed"]


def test_a_technique_that_fails_is_reported_and_the_others_count(case):
    class Failing(Contest):
        def executed(self, cell):
            if cell.technique.name == "random":
                raise RuntimeError("no luck")
            return super().executed(cell)

    contest = Failing(
        case, ContestPlan(**{**PLAN.as_dict(), "inputs": 40, "judge_passes": 0}), Recipe(epochs=1, batches=2)
    )
    first, second = (ContestCell(choose_competitor(name), 0) for name in ("random", "themis"))
    records = [failed_cell(first, attempt(contest.run, first).reason), attempt(contest.run, second)]
    plan = ContestPlan(techniques="random,themis", inputs=40, random_seeds=1)
    result = summarise("gaussian", plan, contest.recipe, contest.before(), records, {})
    assert result.standings[0].errors == ("RuntimeError: no luck",)
    assert result.standings[1].n_runs == 1
    assert ranked(result.standings)[-1].technique == "random"


def test_a_criterion_guides_its_technique_and_one_rule_chooses(case):
    technique = choose_competitor("nc")
    criterion = fit_criterion(technique, case.target, case.parts.train)
    how = {"passes": 700, "random_seed": 0, "criterion": criterion}
    found = run_technique(technique, case.target, case.parts.search, case.perturbation, **how)
    unguided = run_technique(
        choose_competitor("random"), case.target, case.parts.search, case.perturbation, passes=700, random_seed=0
    )
    assert found.tests.theta.tolist() != unguided.tests.theta.tolist()
    chosen = choose_tests(found, len(found.tests))
    n_faults = int(found.is_fault.sum())
    assert found.is_fault[chosen[:n_faults]].all()
    assert not found.is_fault[chosen[n_faults:]].any()


def test_every_distinct_fault_comes_before_a_second_one_of_its_kind():
    seed, outcome = np.array([0, 0, 0, 1, 1, 2, 2, 3]), np.array([5, 5, 6, 5, 5, 5, 5, 5])
    n = len(seed)
    tests = Tests(np.arange(n), seed, np.zeros((n, 1), np.float32), np.arange(n), np.full(n, "x"))
    margin = np.array([-1.0, -2.0, -3.0, -1.0, -0.5, 1.0, 0.5, 0.7], dtype=np.float32)
    found = ExecutedTests(tests, margin < 0, outcome, margin, 0, 3, 2)
    assert choose_tests(found, 2).tolist() == [0, 3]  # each seed once, the first that was found
    assert choose_tests(found, 3).tolist() == [0, 2, 3]
    assert sorted(choose_tests(found, 4).tolist())[:3] == [0, 1, 2]
    assert choose_tests(found, n).tolist() == [0, 1, 2, 3, 4, 6, 7, 5]  # then the nearest, each seed once


def test_few_inputs_are_spread_over_outcomes():
    seed_id = np.arange(100)
    answer = np.where(seed_id < 90, 0, seed_id % 5 + 1)
    taken = spread_out(seed_id, answer, np.linspace(0, 1, 100), 12)
    assert np.array_equal(np.bincount(answer[taken]), [2, 2, 2, 2, 2, 2])


def test_a_retrained_model_is_searched_again_without_a_warning(case):
    """It was trained on its search seeds on purpose."""
    module = copy.deepcopy(case.target.module)
    remember(module, Ledger.of(case.parts.search))
    target = settled(themis.Target(module), case.parts.search)
    found = run_technique(
        choose_competitor("random"), target, case.parts.search, case.perturbation, passes=400, random_seed=0
    )
    assert len(found.tests) > 0


def test_invalid_options_are_refused():
    with pytest.raises(UsageError, match="passes must be a whole number of at least 1, got 0"):
        ContestPlan(passes=0)
    with pytest.raises(UsageError, match="unknown option 'pases'"):
        ContestPlan.of(pases=3)
    with pytest.raises(UsageError, match="only one model"):
        ContestPlan.of(techniques=["themis", "deepxplore"])
    with pytest.raises(UsageError, match="at least one"):
        ContestPlan(techniques=" , ")
    assert [each.name for each in ContestPlan(techniques="scheduled,themis,NC,Themis").chosen()] == [
        "scheduled",
        "themis",
        "nc",
    ]


def test_every_other_input_of_themis_is_disturbed_again():
    box = choose_perturbation("rotate + brightness")
    n, top = 400, np.array([each.high for each in box.theta], dtype=np.float32)
    tests = Tests(np.arange(n), np.arange(n) % 7, np.tile(top, (n, 1)), np.arange(n), np.full(n, "corner"))
    fresh, again, other = (refresh_tests(tests, box, random_seed) for random_seed in (0, 0, 1))
    assert (fresh.seed == tests.seed).all()
    assert (fresh.theta[::2] == top).all()
    assert (fresh.noise_seed[::2] == tests.noise_seed[::2]).all()
    low = np.array([each.low for each in box.theta])
    share = (fresh.theta[1::2] - low) / (top - low)
    assert ((share >= 0) & (share <= 1)).all()
    assert np.abs(share.mean(0) - 0.5).max() < 0.1
    assert (again.theta == fresh.theta).all()
    assert not (other.theta[1::2] == fresh.theta[1::2]).all()
