"""A part of an evaluation that was run elsewhere, merged into stored results: as if all had been run at once."""

import importlib.util
import json
import shutil
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from themis.errors import UsageError
from themis_lab.evaluation.api import evaluate
from themis_lab.evaluation.page import evaluation_page, opening
from themis_lab.evaluation.plan import EvaluationPlan
from themis_lab.evaluation.plans import smoke_plan
from themis_lab.evaluation.summary import Evaluation
from themis_lab.evaluation.tables import variant_tables

pytestmark = pytest.mark.xdist_group("merge")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "merging.py"
ELSEWHERE = {"python": "3.12.3", "torch": "2.11.0"}
PLAN = EvaluationPlan.of(
    {
        **smoke_plan().as_dict(),
        "done_tests": 160,
        "reference_tests": 160,
        "exceptions": {"fgsm": {"questions": "faults,done,theory"}},
    }
)


def merge_evaluations(*arguments):
    spec = importlib.util.spec_from_file_location("merging", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.merge_evaluations(*arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getpriority", lambda which, who: 0, raising=False)  # times count, also where tests are nice
        evaluate(PLAN, out=folder)
    return folder


@pytest.fixture
def whole(folder):
    return summarise(folder)


def summarise(folder, plan=PLAN):
    """What the cells in a folder say, as it is stored."""
    evaluate(plan, out=folder, runs_cells=False)
    return json.loads((folder / "evaluation.json").read_text())


def without(folder, copy, *patterns):
    """The summary of the evaluation without some of its cells."""
    shutil.copytree(folder, copy)
    for path in [path for pattern in patterns for path in (copy / "cells").glob(pattern)]:
        path.unlink()
    return summarise(copy)


def part_of(folder, copy, **options):
    """The summary of a part: the plan for one perturbation and some questions."""
    plan = replace(PLAN.restricted([], [options.pop("perturbation")]), exceptions={})
    return summarise(shutil.copytree(folder, copy), replace(plan, options={**plan.options, **options}))


def merge(stored, part, plan=PLAN):
    return merge_evaluations(stored, part, plan, ELSEWHERE).content


@pytest.mark.parametrize(
    ("lost", "perturbation", "questions", "n_kinds"),
    [
        (["retraining/digits/gaussian*/*", "theory/digits/gaussian*/*"], "gaussian", "retraining,theory", 2),
        (["campaigns/digits/fgsm*/nc*/*"], "fgsm", "faults", 1),
        (["*/digits/fgsm*/**/*.json"], "fgsm", "faults,done,theory", 3),
        (["done/digits/gaussian*/*/*", "variants/digits/gaussian*/*/*"], "gaussian", "done,variants", 2),
    ],
)
def test_a_merged_part_gives_what_one_evaluation_of_all_gives(
    folder, whole, tmp_path, lost, perturbation, questions, n_kinds
):
    stored = without(folder, tmp_path / "stored", *lost)
    assert stored != whole
    part = part_of(folder, tmp_path / "part", perturbation=perturbation, questions=questions)
    merged = merge(stored, part)
    (origin,) = merged.pop("merged")
    assert merged == whole
    assert len(origin["cells"]) == n_kinds


def test_what_a_part_has_not_finished_stays(folder, whole, tmp_path):
    fgsm = without(folder, tmp_path / "less", "campaigns/digits/fgsm*/nc*/*", "theory/digits/fgsm*/*")
    fgsm["done"][1]["techniques"]["random"]["tests"] = 1.0
    merged = merge(whole, {**fgsm, "done": fgsm["done"][1:], "retraining": [], "variants": []})
    for name in ("pairs", "theory", "retraining", "variants"):
        assert merged[name] == whole[name]
    assert merged["done"] == [whole["done"][0], fgsm["done"][1]]
    fewer, more = deepcopy(whole["theory"]), deepcopy(whole)
    more["theory"][0]["campaigns"] = 2
    fewer[0]["reference"]["tests"] = 1
    assert merge(more, {**whole, "theory": fewer})["theory"][0] == more["theory"][0]


def test_a_model_that_was_missing_is_no_longer(folder, whole, tmp_path):
    stored = without(folder, tmp_path / "stored", "**/*.json") | {"missing": {"digits": "there are no weights"}}
    assert not stored["pairs"]
    merged = merge(stored, whole)
    assert len(merged.pop("merged")[0]["cells"]) == 8
    assert merged == whole


def test_a_part_that_had_nothing_to_train_on_is_finished(folder, whole, tmp_path):
    stored = without(folder, tmp_path / "stored", "retraining/digits/gaussian*/*")
    part = part_of(folder, tmp_path / "part", perturbation="gaussian", questions="retraining")
    (record,) = part["retraining"]
    part["retraining"] = [{**record, "standings": [], "untrained": "no fault"}]
    merged = merge(stored, part)
    assert merged["retraining"] == part["retraining"]
    assert merged["progress"] == whole["progress"]
    page = evaluation_page(Evaluation(merged), {})
    assert f"Nothing to train on for digits gaussian {record['magnitude']:g}: no fault." in page
    assert "## Accuracy regained" not in page


def test_nothing_finished_is_refused(folder, whole, tmp_path):
    rates = part_of(folder, tmp_path / "part", perturbation="fgsm", questions="truth")
    with pytest.raises(UsageError, match="the part has finished nothing"):
        merge(whole, rates)


def test_results_with_other_options_are_refused(folder, whole, tmp_path):
    part = part_of(folder, tmp_path / "part", perturbation="gaussian", questions="retraining")
    part["plan"]["epochs"] = 7
    with pytest.raises(UsageError, match="retraining of digits under gaussian must have the options of the plan"):
        merge(whole, part)
    part["plan"]["epochs"] = 1
    other = EvaluationPlan.of({**PLAN.as_dict(), "passes": 301, "retrain_passes": 300})
    with pytest.raises(UsageError, match="campaigns of digits under fgsm must have the options of the plan"):
        merge(whole, part, other)  # the stored campaigns, which the part does not replace
    with pytest.raises(UsageError, match="the plan must ask about digits under fgsm"):
        merge(whole, part, PLAN.restricted([], ["gaussian"]))


def test_a_result_at_another_magnitude_than_the_campaigns_is_refused(folder, whole, tmp_path):
    part = part_of(folder, tmp_path / "part", perturbation="gaussian", questions="retraining")
    part["retraining"][0]["magnitude"] = 0.21
    with pytest.raises(UsageError, match=r"must be at a magnitude of its campaigns, got 0\.21"):
        merge(whole, part)


def test_times_of_variants_are_compared_on_one_machine_only(whole):
    (exact,) = (record for record in whole["variants"] if record["technique"] == "judge-exact")
    there = merge(whole, {**whole, "variants": [{**exact, "machine": "another"}]})

    def time_of(content):
        (table,) = variant_tables(Evaluation(content))
        return next(row[-1] for row in table.rows if row[0] == "judge-exact")

    assert time_of(whole) != "-"
    assert time_of(there) == "-"
    assert [record["technique"] for record in there["variants"]].count("judge-exact") == 1


def test_the_page_says_what_was_measured_apart_and_with_what(folder, whole, tmp_path):
    part = part_of(folder, tmp_path / "part", perturbation="gaussian", questions="retraining,theory")
    merged = merge(whole, part)
    (line,) = (line for line in opening(Evaluation(merged)) if line.startswith("Measured apart"))
    assert line == (
        "Measured apart from the rest, on a CPU with Python 3.12.3 and torch 2.11.0: the theory on digits gaussian; "
        "accuracy regained on digits gaussian."
    )
    kinds = [[cell["kind"] for cell in origin["cells"]] for origin in merge(merged, {**part, "theory": []})["merged"]]
    assert kinds == [["theory", "retraining"]]
    later = merge(merged, {**part, "theory": [], "version": "9.9.9"})["merged"]
    assert [[cell["kind"] for cell in origin["cells"]] for origin in later] == [["theory"], ["retraining"]]


def test_a_device_that_earlier_versions_recorded_is_dropped_and_separates_nothing(folder, whole, tmp_path):
    part = part_of(folder, tmp_path / "part", perturbation="gaussian", questions="retraining,theory")
    named = {"device": "cpu", "device_name": "cpu"}
    stored = {**whole, "environment": whole["environment"] | named}
    merged = merge_evaluations(stored, {**part, "retraining": []}, PLAN, ELSEWHERE | named).content
    merged["merged"][0]["environment"] |= named
    merged = merge(merged, {**part, "theory": []})
    (origin,) = merged["merged"]
    assert origin["environment"] == ELSEWHERE
    assert [cell["kind"] for cell in origin["cells"]] == ["theory", "retraining"]
    assert merged["environment"] == whole["environment"]


def test_what_the_plan_no_longer_asks_is_not_missing(folder, whole, tmp_path):
    stored = without(folder, tmp_path / "stored", "retraining/digits/gaussian*/*")
    part = part_of(folder, tmp_path / "part", perturbation="fgsm", questions="theory")
    asked = "faults,done,theory,variants"
    less = EvaluationPlan.of({**PLAN.as_dict(), "questions": asked})
    assert "retraining" in {record["kind"] for record in merge(stored, part)["progress"]}
    assert "retraining" not in {record["kind"] for record in merge(stored, part, less)["progress"]}
