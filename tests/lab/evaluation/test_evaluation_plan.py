"""The plan of an evaluation: read from YAML, with exceptions, and what makes a cell another cell."""

from dataclasses import replace

import pytest

from themis import UsageError
from themis.cli.options import as_yaml
from themis_lab.evaluation.api import list_cells
from themis_lab.evaluation.plan import VARIANTS, EvaluationPlan, Kind, PairOptions
from themis_lab.evaluation.plans import MODELS, paper_plan, smoke_plan
from themis_lab.zoo import ZOO

SMALL = {"models": ["lenet5-mnist", "mlp-pdf"], "perturbations": ["gaussian", "fgsm"], "passes": 700}


def written(folder, text):
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def test_the_paper_plan_has_the_models_of_the_zoo_and_all_baselines():
    plan = paper_plan()
    assert set(MODELS) == set(ZOO)
    names = [technique.name for technique in plan.pair("lenet5-mnist", "gaussian").comparison().chosen()]
    assert names == ["random", "corners", "paper-preset", "scheduled", "nc", "kmnc", "idc", "lsa"]
    assert plan.pair("lenet5-mnist", "cw").magnitudes == "paper"


@pytest.mark.parametrize("plan", [paper_plan(), smoke_plan(), EvaluationPlan.of(SMALL)])
def test_a_printed_plan_is_read_back(plan, tmp_path):
    assert EvaluationPlan.read(written(tmp_path, as_yaml(plan.as_dict()))) == plan


def test_exceptions_for_both_go_before_those_for_one():
    exceptions = {"mlp-pdf": {"tests": 2}, "fgsm": {"tests": 1, "seeds": 9}, "mlp-pdf fgsm": {"tests": 3}}
    plan = EvaluationPlan.of({**SMALL, "exceptions": exceptions})
    pairs = {pair: plan.pair(*pair) for pair in plan.pairs()}
    assert {pair: options.tests for pair, options in pairs.items()} == {
        ("lenet5-mnist", "gaussian"): 1000,
        ("lenet5-mnist", "fgsm"): 1,
        ("mlp-pdf", "gaussian"): 2,
        ("mlp-pdf", "fgsm"): 3,
    }
    assert pairs["mlp-pdf", "fgsm"].seeds == 9
    assert {options.passes for options in pairs.values()} == {700}


def test_a_pair_without_a_question_is_left_out():
    plan = EvaluationPlan.of({**SMALL, "exceptions": {"mlp-pdf fgsm": {"questions": ""}}})
    assert ("mlp-pdf", "fgsm") not in plan.pairs()
    assert len(plan.pairs()) == 3


def test_only_options_that_decide_a_cell_make_another_of_it():
    def files(kind, **changes):
        return EvaluationPlan.of({**SMALL, **changes}).cell(kind, "mlp-pdf", "fgsm", "nc").file

    assert files(Kind.CAMPAIGNS) == files(Kind.CAMPAIGNS, campaigns=9, techniques="lsa", done_tests=3, device="cuda")
    assert (
        len(
            {
                files(Kind.CAMPAIGNS),
                files(Kind.CAMPAIGNS, passes=701),
                files(Kind.CAMPAIGNS, seeds=7),
                files(Kind.RATES),
            }
        )
        == 4
    )
    assert files(Kind.RATES) == files(Kind.RATES, passes=701)
    assert files(Kind.RATES) != files(Kind.RATES, magnitudes="paper")


def test_passes_of_techniques_that_retrain_make_other_cells_of_retraining_alone():
    def files(kind, **changes):
        return EvaluationPlan.of({**SMALL, **changes}).cell(kind, "mlp-pdf", "fgsm").file

    assert files(Kind.RETRAINING) != files(Kind.RETRAINING, retrain_passes=901)
    assert files(Kind.RETRAINING, passes=901) == files(Kind.RETRAINING, retrain_passes=901)
    assert files(Kind.CAMPAIGNS) == files(Kind.CAMPAIGNS, retrain_passes=901)


def test_a_plan_is_restricted_to_some_models_and_perturbations():
    plan = EvaluationPlan.of({**SMALL, "exceptions": {"mlp-pdf fgsm": {"tests": 3}, "gaussian": {"tests": 4}}})
    small = plan.restricted(["lenet5-mnist"], [])
    assert small.pairs() == [("lenet5-mnist", "gaussian"), ("lenet5-mnist", "fgsm")]
    assert small.exceptions == {"gaussian": {"tests": 4}}
    with pytest.raises(UsageError, match="models must be those of the plan, got 'lenet'"):
        plan.restricted(["lenet"], [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": []}, "needs models and perturbations"),
        ({"models": 3}, "models must be a list of names"),
        ({"budget": 3}, "unknown option 'budget'"),
        ({"tests": 0}, "tests must be positive, or null, got 0"),
        ({"passes": "many"}, "passes must be a number, got 'many'"),
        ({"techniques": "kmcn"}, "techniques must be policies or criteria, got 'kmcn': did you mean 'kmnc'"),
        ({"questions": "fault"}, "questions must be faults, done, .* did you mean 'faults'"),
        ({"variants": "sample-51"}, "variants must be all or known names, got 'sample-51'"),
        ({"exceptions": {"lenet": {}}}, "exceptions must be for a model, a perturbation or"),
        ({"exceptions": {"fgsm": 3}}, "options must be names and values"),
        ({"done_magnitudes": "some"}, "done_magnitudes must be one of all, middle, last"),
    ],
)
def test_what_a_plan_must_not_say(changes, message):
    with pytest.raises(UsageError, match=message):
        EvaluationPlan.of({**SMALL, **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a", "must contain names and values"), ("a: [", "must be a file with valid YAML"), (None, "No such file")],
)
def test_a_file_that_is_no_plan(text, message, tmp_path):
    path = tmp_path / "none.yaml" if text is None else written(tmp_path, text)
    with pytest.raises(UsageError, match=message):
        EvaluationPlan.read(path)


def test_cells_end_with_the_second_campaigns_and_begin_with_faults_under_the_first_perturbation():
    plan = EvaluationPlan.of({**SMALL, "campaigns": 2, "techniques": "scheduled", "questions": "faults,done"})
    rates = {plan.cell(Kind.RATES, *pair): {"grids": [{"name": "grid", "magnitudes": [0.1]}]} for pair in plan.pairs()}
    cells = [(cell.campaign, cell.kind, cell.perturbation, cell.model) for cell in list_cells(plan, rates)]
    assert list(dict.fromkeys(cells)) == [
        (campaign, kind, perturbation, model)
        for campaign in (0, 1)
        for kind in (Kind.CAMPAIGNS, Kind.DONE)
        for perturbation in ("gaussian", "fgsm")
        for model in ("lenet5-mnist", "mlp-pdf")
    ]


def test_the_theory_and_the_variants_have_all_campaigns_and_the_first_ones_are_the_cells_of_a_plan_with_one():
    def cells_of(campaigns):
        options = {"campaigns": campaigns, "variants": "paper,sample-50", "questions": "theory,variants"}
        plan = EvaluationPlan.of({**SMALL, **options})
        rates = {
            plan.cell(Kind.RATES, *pair): {"grids": [{"name": "grid", "magnitudes": [0.1]}]} for pair in plan.pairs()
        }
        return list_cells(plan, rates)

    one, three = cells_of(1), cells_of(3)
    assert three[: len(one)] == one
    for campaign in range(3):
        assert [replace(cell, campaign=0) for cell in three if cell.campaign == campaign] == one


def test_pymc_is_a_variant_only_where_it_is_named():
    assert "pymc-sample-50" not in PairOptions().chosen_variants()
    assert PairOptions(variants="all,pymc-sample-50").chosen_variants() == tuple(VARIANTS)
