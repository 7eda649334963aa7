"""The contest: techniques choose as many inputs each, train alike, and are judged alike; cells are not run twice."""

import copy
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from rich.console import Console

import themis
from themis.errors import UsageError
from themis.experiments.retraining.compare import compare
from themis.experiments.retraining.contest import Case, Contest, Terms, pack, unpack
from themis.experiments.retraining.grading import with_settled_oracle
from themis.experiments.retraining.listener import Listener
from themis.experiments.retraining.material import of_faults
from themis.experiments.retraining.recipe import Recipe
from themis.experiments.retraining.standing import ranked, show
from themis.experiments.retraining.techniques import Gathered, Recorder, choose, fit, gather, named, refreshed
from themis.measure.tests import Tests
from themis.perturb import choose_perturbation
from themis.runs.parts import Parts
from themis.search import choose_policy
from themis.target.ledger import Ledger, remember

pytestmark = pytest.mark.xdist_group("retrain_compare")

TERMS = Terms(techniques="random,themis,nc", passes=700, random_seeds=2, draws=3, judge_passes=400)
RECIPE = Recipe(fresh=0.0, epochs=2, batches=15, mix=0.5, share=1.0)


def make_case(trained):
    module, held_out = trained
    parts = Parts(*(held_out[torch.arange(first, 1000, 4)] for first in (0, 1, 2)))
    return Case(
        with_settled_oracle(themis.Target(module), parts.search), parts, choose_perturbation("gaussian", 0.8), Ledger()
    )


@pytest.fixture(scope="module")
def case(trained):
    return make_case(trained)


class Told(Listener):
    def __init__(self):
        self.steps, self.began = [], []

    def on_steps(self, n_done, n_steps):
        self.began.append((n_done, n_steps))

    def on_step(self, text, n_done, n_steps):
        self.steps.append(text)


class Stopping(Told):
    def on_steps(self, n_done, n_steps):
        super().on_steps(n_done, n_steps)
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def contested(case, tmp_path_factory):
    out, told = tmp_path_factory.mktemp("contest") / "out", Told()
    return compare(case, TERMS, RECIPE, out=out, listener=told), out, told


def test_every_technique_has_as_many_inputs_and_gains(contested):
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
    assert lead.over_runs.high - lead.over_runs.value == pytest.approx(12.706 * np.ptp(gaps) / 2, rel=1e-3, abs=1e-6)


def test_the_same_call_again_runs_nothing_and_one_more_technique_only_itself(case, contested, tmp_path):
    result, out, _ = contested
    out = shutil.copytree(out, tmp_path / "again")
    told = Told()
    again = compare(case, TERMS, RECIPE, out=out, listener=told)
    assert told.began == [(6, 6)]
    assert told.steps == []
    assert again.standings == result.standings
    told = Told()
    more = Terms(**{**TERMS.as_dict(), "techniques": "themis,corners", "random_seeds": 1})
    compare(case, more, RECIPE, out=out, listener=told)
    assert told.began == [(1, 2)]
    assert [each.split(",")[0] for each in told.steps] == ["corners"]
    told = Stopping()
    with pytest.raises(KeyboardInterrupt):
        compare(case, more, Recipe(fresh=0.0, epochs=1, batches=2), out=out, listener=told)
    assert told.began == [(0, 2)]  # another recipe makes other cells


def test_results_are_plain_data_a_table_and_a_picture(case, contested):
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


def test_what_a_worker_makes_is_what_this_process_makes(trained, case, contested):
    result, _, _ = contested
    terms = Terms(**{**TERMS.as_dict(), "techniques": "random", "random_seeds": 1, "inputs": result.inputs})
    with pytest.raises(UsageError, match="workers must be 1 without make"):
        compare(case, terms, RECIPE, workers=2)
    made = compare(make=partial(make_case, trained), terms=terms, recipe=RECIPE)
    first = next(each for each in result.records if each["technique"] == "random")
    assert made.records[0]["by_seed"] == first["by_seed"]


def test_a_technique_that_fails_is_said_and_the_others_stand(case):
    class Failing(Contest):
        def gathered(self, technique, random_seed):
            if technique.name == "random":
                raise RuntimeError("no luck")
            return super().gathered(technique, random_seed)

    from themis.experiments.retraining.compare import attempt, summarise

    contest = Failing(case, Terms(**{**TERMS.as_dict(), "inputs": 40, "judge_passes": 0}), Recipe(epochs=1, batches=2))
    records = [attempt(contest, (named(name), 0)) for name in ("random", "themis")]
    terms = Terms(techniques="random,themis", inputs=40, random_seeds=1)
    result = summarise("gaussian", terms, contest.recipe, contest.before(), records, {})
    assert result.standings[0].errors == ("RuntimeError: no luck",)
    assert result.standings[1].n_runs == 1
    assert ranked(result.standings)[-1].technique == "random"


def test_a_recorder_changes_no_campaign_and_remembers_every_test(case):
    how = {"max_passes": 700, "max_tests": None, "plateau": None, "coverage": None, "round_size": 160}
    plain = themis.run(case.target, case.parts.search, case.perturbation, **how)
    recorder = Recorder(choose_policy("scheduled"))
    recorded = themis.run(case.target, case.parts.search, case.perturbation, policy=recorder, **how)
    assert recorded.faults.columns["id"].tolist() == plain.faults.columns["id"].tolist()
    assert sum(len(tests) for tests, _ in recorder.seen) == plain.rounds[-1].tests


def test_a_criterion_guides_its_technique_and_one_rule_chooses(case):
    technique = named("nc")
    criterion = fit(technique, case.target, case.parts.train)
    how = {"passes": 700, "random_seed": 0, "criterion": criterion}
    found = gather(technique, case.target, case.parts.search, case.perturbation, **how)
    unguided = gather(named("random"), case.target, case.parts.search, case.perturbation, passes=700, random_seed=0)
    assert found.tests.theta.tolist() != unguided.tests.theta.tolist()
    chosen = choose(found, len(found.tests))
    n_faults = int(found.is_fault.sum())
    assert found.is_fault[chosen[:n_faults]].all()
    assert not found.is_fault[chosen[n_faults:]].any()


def test_every_distinct_fault_comes_before_a_second_one():
    seed, outcome = np.array([0, 0, 0, 1, 1, 2, 2, 3]), np.array([5, 5, 6, 5, 5, 5, 5, 5])
    n = len(seed)
    tests = Tests(np.arange(n), seed, np.zeros((n, 1), np.float32), np.arange(n), np.full(n, "x"))
    margin = np.array([-1.0, -2.0, -3.0, -1.0, -0.5, 1.0, 0.5, 0.7], dtype=np.float32)
    found = Gathered(tests, margin < 0, outcome, margin, 0, 3, 2)
    assert choose(found, 2).tolist() == [0, 3]  # each seed once, the first that was found
    assert choose(found, 3).tolist() == [0, 2, 3]
    assert sorted(choose(found, 4).tolist())[:3] == [0, 1, 2]
    assert choose(found, n).tolist() == [0, 1, 2, 3, 4, 6, 7, 5]  # then the nearest, each seed once


def test_material_of_a_run_is_chosen_by_the_rule_of_the_contest(case):
    seeds, how = case.parts.search, {"max_passes": 700, "max_tests": None, "plateau": None, "coverage": None}
    result = themis.run(case.target, seeds, case.perturbation, **how)
    found = gather(named("themis"), case.target, seeds, case.perturbation, passes=700, random_seed=0)
    n = found.failing_seeds + 5
    material = of_faults(result.faults, seeds, case.perturbation, case.target, limit=n)
    assert material.seed.tolist() == found.tests.seed[choose(found, n)].tolist()
    assert len(set(material.seed.tolist())) == found.failing_seeds


def test_a_retrained_model_is_searched_again_without_a_warning(case):
    """Its search seeds are ones that it was trained on, by intent."""
    module = copy.deepcopy(case.target.module)
    remember(module, Ledger.of(case.parts.search))
    target = with_settled_oracle(themis.Target(module), case.parts.search)
    found = gather(named("random"), target, case.parts.search, case.perturbation, passes=400, random_seed=0)
    assert len(found.tests) > 0


def test_terms_refuse_what_cannot_be():
    with pytest.raises(UsageError, match="passes must be a whole number of at least 1, got 0"):
        Terms(passes=0)
    with pytest.raises(UsageError, match="unknown option 'pases'"):
        Terms.of(pases=3)
    with pytest.raises(UsageError, match="one model alone"):
        Terms.of(techniques=["themis", "deepxplore"])
    with pytest.raises(UsageError, match="at least one"):
        Terms(techniques=" , ")
    assert [each.name for each in Terms(techniques="scheduled,themis,NC,Themis").chosen()] == [
        "scheduled",
        "themis",
        "nc",
    ]


def test_packed_columns_come_back():
    column = np.random.default_rng(0).integers(0, 6, 500) / 5
    assert np.allclose(unpack(pack(column)), column, atol=1e-7)
    assert len(pack(column)) < 500


def test_every_other_input_of_themis_is_disturbed_anew():
    box = choose_perturbation("rotate + brightness")
    n, top = 400, np.array([each.high for each in box.theta], dtype=np.float32)
    tests = Tests(np.arange(n), np.arange(n) % 7, np.tile(top, (n, 1)), np.arange(n), np.full(n, "corner"))
    fresh, again, other = (refreshed(tests, box, random_seed) for random_seed in (0, 0, 1))
    assert (fresh.seed == tests.seed).all()
    assert (fresh.theta[::2] == top).all()
    assert (fresh.noise_seed[::2] == tests.noise_seed[::2]).all()
    low = np.array([each.low for each in box.theta])
    share = (fresh.theta[1::2] - low) / (top - low)
    assert ((share >= 0) & (share <= 1)).all()
    assert np.abs(share.mean(0) - 0.5).max() < 0.1
    assert (again.theta == fresh.theta).all()
    assert not (other.theta[1::2] == fresh.theta[1::2]).all()
