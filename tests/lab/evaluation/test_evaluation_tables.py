"""What the records of an evaluation say: ratios, deviations and counts."""

import numpy as np
import pytest
import torch

from themis.runs.environment import threads
from themis_lab.evaluation.cells import name_machine
from themis_lab.evaluation.claims import judge_claims, list_verdicts
from themis_lab.evaluation.figures import draw_ratios
from themis_lab.evaluation.page import opening, progress_tables
from themis_lab.evaluation.plan import EvaluationCell
from themis_lab.evaluation.summary import Evaluation, average_campaigns, compare_faults, summarise_done
from themis_lab.evaluation.tables import (
    MIN_CELLS,
    capability_cells,
    capability_tables,
    done_cells,
    done_tables,
    fault_cells,
    judging_tables,
    median_interval,
    ratio_tables,
    retraining_tables,
    theory_tables,
    time_tables,
    truth_tables,
    variant_tables,
)
from themis_lab.evaluation.theory import describe_deviations
from themis_lab.techniques import BASELINES


def test_faults_are_compared_with_the_best_rival_the_four_and_random():
    found = {"scheduled": 60, "paper-preset": 50, "nc": 10, "kmnc": 20, "idc": 10, "lsa": 40, "random": 30}
    assert compare_faults(found, "scheduled") == {
        "best_rival": "lsa",
        "over_best": 1.5,
        "over_four": 3.0,
        "over_random": 2.0,
    }
    assert compare_faults({"scheduled": 1, "random": 0, "nc": 0}, "scheduled") == {
        "best_rival": "random",
        "over_best": None,
        "over_four": None,
        "over_random": None,
    }


def test_deviations_are_relative_and_leave_out_neurons_that_no_test_moved():
    found = describe_deviations(np.array([[1.0, 2.0, 0.0, 1.0], [1.0, 2.5, 0.0, 3.0]]))
    assert found["neurons"] == 3
    assert found["median_deviation"] == pytest.approx(0.25 / 2.25)
    assert found["within_10_percent"] == pytest.approx(1 / 3)
    assert found["model_deviation"] == pytest.approx(2.5 / 10.5)


def cell(values, degenerate=None):
    rows = [
        {"technique": name, "total": {}, "r": {} if degenerate else {"distinct": [r, r, r]}, "r_box": {}, "r_lead": {}}
        for name, r in values.items()
    ]
    rates = [0.1, 0.4, 0.8]
    grid = {"name": "paper", "rows": rows, "rates": rates, "box_rates": rates, "ratios": {}}
    grid |= {"degenerate": degenerate, "box_degenerate": "too flat"}
    pair = {"model": "net", "perturbation": "fgsm", "grids": [grid], "grid_refused": ""}
    return {**pair, "budgets": {"passes": [grid]}, "limits": {"passes": 9}}


SCORED = ("0.90 (0.90..0.90)", "-0.20 (-0.20..-0.20)", "0.30 (0.30..0.30)", "0.80 (0.80..0.80)")


def test_strong_correlations_are_counted_and_degenerate_cells_are_not_scored():
    pairs = [cell({"scheduled": 0.9, "nc": -0.2}), cell({"scheduled": 0.3, "nc": 0.8}), cell({"scheduled": 1}, "flat")]
    (counts,) = capability_tables(Evaluation({"pairs": pairs}))
    rates, full = capability_cells(Evaluation({"pairs": pairs}))  # no cell is scored over the whole range
    assert [row[1] for row in rates.rows] == ["10%, 40%, 80%", "10%, 40%, 80%", "10%, 40%, 80% (degenerate)"]
    assert "Degenerate are 1 of 3 cells at full strength and 3 over the whole range" in rates.notes[0]
    assert counts.rows[0][:3] == ("scheduled", "1 of 2, 0.60", "-")
    assert counts.rows[1][1] == "1 of 2, 0.30"
    assert "1 of 3 cells by the error rate at full strength, 3 by that over the whole range" in counts.notes[0]
    assert full.rows == [("net fgsm", "10%..80%", "-", r, other) for r, other in (SCORED[:2], SCORED[2:])]


def test_cells_without_a_grid_are_named_once_by_the_reason():
    has_grid = {**cell({}), "grids": [{**cell({})["grids"][0], "name": "grid"}]}
    without = [{**cell({}), "perturbation": name, "grid_refused": why} for name, why in zip("abc", "xyx", strict=True)]
    rates = next(iter(capability_cells(Evaluation({"pairs": [has_grid, *without]}))))
    assert rates.notes[1:] == ["No grid for net a, net c: x.", "No grid for net b: y."]


def test_a_technique_that_few_cells_have_is_left_open_in_the_others():
    pairs = [cell({"scheduled": 0.9, "nc": 0.8}), cell({"scheduled": 0.9, "nc": 0.8, "path": 0.7})]
    *_, full = capability_cells(Evaluation({"pairs": pairs}))
    assert full.columns[3:] == ("scheduled", "nc", "path")
    assert [row[-1] for row in full.rows] == ["-", "0.70 (0.70..0.70)"]


def test_faults_of_several_campaigns_are_shown_with_their_range():
    pair = cell({"scheduled": 0.9, "nc": 0.8})
    one, other = pair["budgets"]["passes"][0]["rows"]
    one["total"], other["total"] = {"distinct_faults": [3.5, 2.0, 5.0]}, {"distinct_faults": [4.0, 4.0, 4.0]}
    (table,) = fault_cells(Evaluation({"pairs": [pair]}))
    assert table.rows == [("net fgsm", "3.5 (2..5)", "4", "-", "-")]


def test_the_theory_of_a_cell_is_the_mean_over_its_campaigns():
    def record(campaign, n_faults, preset, rule, magnitude=0.1):
        stops = {"preset": preset, "default": None, "rule": rule, "enough": None}
        cell = {"model": "net", "perturbation": "fgsm", "magnitude": magnitude, "campaign": campaign}
        others = {"stability": {"model_deviation": 0.1 * campaign}, "normality": {"n": 4, "verdict": "none"}}
        return {**cell, "reference": {"distinct_faults": n_faults}, **stops, **others}

    def found(tests, share):
        return {"tests": tests, "of_faults": share}

    records = [record(0, 4, found(10, 0.5), None), record(1, 7, found(21, None), None)]
    records += [record(2, 6, None, found(5, 1.0)), record(0, 9, found(10, 0.5), None, magnitude=0.2)]
    one, other = average_campaigns(records)
    assert (one["campaigns"], other["campaigns"]) == (3, 1)
    assert one["reference"] == {"distinct_faults": 6}
    assert one["preset"] == {"tests": 16, "of_faults": 0.5}
    assert one["rule"] is one["default"] is None
    assert one["stability"]["model_deviation"] == pytest.approx(0.1)
    assert one["normality"] == {"n": 4}
    assert (other["reference"], other["preset"]) == ({"distinct_faults": 9}, found(10, 0.5))


def test_shares_are_over_the_cells_in_which_a_campaign_could_stop():
    stops = [{"of_faults": 0.25}, {"of_faults": 1.0}, {"of_faults": None}, None]
    records = [{"preset": stop, "default": None, "rule": stops[1]} for stop in stops]
    (table,) = theory_tables(Evaluation({"theory": records}))
    assert table.rows == [
        ("paper-preset at 100%", "3 of 4", "62.5%", "25.0%", "100.0%"),
        ("the default rule", "4 of 4", "100.0%", "100.0%", "100.0%"),
    ]


def test_faults_are_compared_over_the_cells_in_which_rivals_found_some():
    ratios = [{"scheduled": {"over_best": value, "over_four": value, "over_random": None}} for value in (1, 2, 3, None)]
    (table,) = ratio_tables(Evaluation({"pairs": [], "done": [{"ratios": own} for own in ratios]}))
    assert table.rows == [("scheduled", "when done", "2.00 in 3 cells", "2.00 in 3 cells", "-")]


def variant(technique, **values):
    cell = {"model": "net", "perturbation": "fgsm", "magnitude": 0.1, "campaign": 0, "machine": "a"}
    found = {"first_coverage": 0.5, "tests_to_coverage": None, "distinct_faults": 100}
    return {"technique": technique, **cell, **found, "seconds_judge": 10.0, "tests": 10, **values}


def test_a_variant_is_compared_with_the_preset_in_the_same_cell_and_in_time_on_the_same_machine():
    loose = variant("tolerance-0.005", first_coverage=0.75, tests_to_coverage=5, distinct_faults=20, tests=5)
    elsewhere = variant("judge-exact", machine="b", seconds_judge=0.1)
    other_cell = variant("sample-50", magnitude=0.2)
    (table,) = variant_tables(Evaluation({"variants": [variant("paper"), loose, elsewhere, other_cell]}))
    assert table.rows == [
        ("tolerance-0.005", "1", "1", "+25.0", "1, 0", "0.20", "2.00"),
        ("judge-exact", "1", "1", "0.0", "0, 0", "1.00", "-"),
    ]


def test_a_variant_in_a_cell_is_the_mean_over_the_campaigns_that_the_preset_had_too():
    presets = [variant("paper", campaign=k, distinct_faults=100 * (k + 1)) for k in range(3)]
    gains, faults, seconds = (0.25, 0.05, 0.0, 0.5), (50, 100, 300, 9000), (1.0, 20.0, 30.0, 1.0)
    loose = [
        variant("tolerance-0.005", campaign=k, first_coverage=0.5 + gain, distinct_faults=found, seconds_judge=time)
        for k, (gain, found, time) in enumerate(zip(gains, faults, seconds, strict=True))
    ]
    (table,) = variant_tables(Evaluation({"variants": [*presets, *loose]}))
    assert table.rows == [("tolerance-0.005", "1", "3", "+10.0", "0, 0", "0.75", "2.00")]


def test_time_to_judge_is_that_of_one_machine():
    shared = {"neurons": 8000, "tests": 1000}
    here = [variant("paper", seconds_judge=4.0, **shared), variant("sample-all", seconds_judge=29.0, **shared)]
    elsewhere = variant("judge-exact", machine="b", seconds_judge=0.1, **shared)
    alone = variant("paper", magnitude=0.2, **shared)
    again = [variant("paper", campaign=k, seconds_judge=k, **shared) for k in (1, 9)]
    slow = [variant(name, campaign=3, machine=None, seconds_judge=900.0, **shared) for name in ("paper", "sample-50")]
    (table,) = judging_tables(Evaluation({"variants": [*here, elsewhere, alone, *again, *slow]}))
    assert table.columns[:5] == ("cell", "neurons", "preset", "no sampler", "closed form")
    assert table.rows == [("net fgsm 0.1", "8,000", "4.00", "29.00", "-", "-", "-", "-")]


def test_known_faults_are_averaged_over_all_mutants():
    def found(seeds, score):
        shares = {"seeds": seeds, "regions": seeds, "cells": seeds, "planted": None}
        return {"recall": [shares], "scores": [{"score": score}]}

    clean = {"mutants": {"clean_score": 0.1}}
    truth = [{"techniques": {"nc": found(0.25, 0.5)}, **clean}, {"techniques": {"nc": found(0.75, 0.5)}, **clean}]
    (table,) = truth_tables(Evaluation({"truth": truth}))
    share = "0.50 (0.25..0.75)"
    assert table.rows == [
        ("nc", share, share, share, "-", "0.50 (0.50..0.50)"),
        ("the clean seeds", "-", "-", "-", "-", "0.10 (0.10..0.10)"),
    ]


def verdict_of(content, start):
    content = {"pairs": [], "done": [], "retraining": [], "variants": [], "theory": [], **content}
    (claim,) = (claim for claim in judge_claims(Evaluation(content)) if claim.text.startswith(start))
    return claim


def test_a_strong_correlation_of_the_baselines_too_refutes_the_claim_about_them():
    def judge(**values):
        pair = cell({"random": 0.9, "scheduled": 0.9, "kmnc": -0.1, "idc": 0.2, "lsa": 0.3, **values})
        return verdict_of({"pairs": [{**pair, "sensitivity": None}]}, "Themis correlates").verdict

    assert judge(**{"paper-preset": 0.9}, nc=0.1) == "holds"
    assert judge(**{"paper-preset": 0.9}, nc=0.8, kmnc=0.8, idc=0.8) == "holds in part"
    assert judge(**{"paper-preset": 0.3}, nc=0.8) == "does not hold"
    flat = [{**cell({"paper-preset": 0.9}, "flat"), "sensitivity": None}] * 3
    claim = verdict_of({"pairs": flat}, "Themis correlates")
    assert claim.verdict == "undecided"
    assert "In 3 of 3 cells" in claim.why


def test_a_cell_without_all_baselines_is_not_counted():
    whole = cell({"paper-preset": 0.9, "nc": 0.1, "kmnc": 0.1, "idc": 0.2, "lsa": 0.3})
    pairs = [{**pair, "sensitivity": None} for pair in (whole, cell({"paper-preset": 0.1, "nc": 0.9}))]
    claim = verdict_of({"pairs": pairs}, "Themis correlates")
    assert claim.measured.endswith("1 of 1 for paper-preset, 0 of 4 for the four baselines")


def test_weak_correlations_everywhere_are_not_said_to_rise_with_the_error_rate():
    pair = {**cell({"paper-preset": 0.3, "nc": 0.8, "kmnc": 0.1, "idc": 0.2, "lsa": 0.3}), "sensitivity": None}
    claim = verdict_of({"pairs": [pair]}, "Themis correlates")
    assert (claim.verdict, claim.why) == ("does not hold", "")


def cells_until_done(ratios):
    techniques = {
        "paper-preset": {"stops": {"coverage": 3}, "campaigns": 3, "tests": 500},
        "nc": {"stops": {"tests": 2, "coverage": 1}, "campaigns": 3, "tests": 900},
        "random": {"stops": {"tests": 3}, "campaigns": 3, "tests": 1000},
    }
    cells = [{"paper-preset": {"over_four": ratio, "over_best": 0.5}} for ratio in ratios]
    return {"done": [{"ratios": own, "techniques": techniques} for own in cells]}


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.8] * 6, "does not hold"),
        ([0.0, 1.4, 1.4, 1.4, 1.4, 1.4], "does not hold"),
        ([1.4] * 6, "holds in part"),
        ([3.8] * 6, "holds"),
        ([3.8] * 5, "undecided"),
        ([None] * 6 + [1.4] * 6, "holds in part"),
    ],
)
def test_faults_when_done_are_judged_by_the_interval_of_the_presets_ratio(ratios, verdict):
    claim = verdict_of(cells_until_done(ratios), "Themis finds more faults")
    assert (claim.verdict, claim.paper) == (verdict, "3.78 times as many")
    n_stopped, n = 2 * len(ratios), 3 * len(ratios)
    assert f"{n_stopped} of {n} campaigns of baselines reached the limit of tests before they were done" in claim.why
    assert claim.why.endswith("after 900 tests on average; paper-preset took 500.")


def test_a_cell_in_which_the_preset_found_nothing_counts_in_the_median():
    claim = verdict_of(cells_until_done([0.0, 0.0, 3.0]), "Themis finds more faults")
    assert claim.measured == "ratios with 95% intervals are 0.00 in 3 cells for paper-preset"


@pytest.mark.parametrize("budget", ["passes", "tests"])
def test_at_equal_budgets_a_model_under_a_perturbation_counts_once(budget):
    def grid(name, ratio):
        ratios = {"paper-preset": {"over_four": ratio, "over_best": None}}
        return {**cell({})["grids"][0], "name": name, "ratios": ratios}

    both, one = [grid("paper", 0.1), grid("grid", 2.0)], [grid("paper", 4.0)]
    flat = [{**grid("paper", 1.0), "degenerate": "flat"}]
    budgets = [{"passes": [], budget: own} for own in (both, one, flat)]
    pairs = [{**cell({}), "sensitivity": None, "budgets": own} for own in budgets]
    claim = verdict_of(
        {"pairs": pairs}, f"Themis finds more faults than the mean of the four baselines, at equal {budget}"
    )
    assert claim.measured == "ratios with 95% intervals are 3.00 in 2 cells for paper-preset"
    assert ("follows a gradient" in claim.why) is (budget == "passes")


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [([1.2] * 6, "holds"), ([1.4] * 6, "does not hold"), ([0.5] * 3 + [2.0] * 3, "undecided"), ([1.2], "undecided")],
)
def test_time_is_undecided_if_the_interval_of_the_ratio_has_that_of_the_paper_within_it(seconds, verdict):
    def row(total):
        return {"seconds_total": total, "seconds_judge": total / 2, "seconds_per_test": 2 * total}

    baselines = dict.fromkeys(("nc", "kmnc", "idc", "lsa"), row(1.0))
    done = [{"ratios": {}, "techniques": {"paper-preset": row(own), **baselines}} for own in seconds]
    claim = verdict_of({"done": done}, "Themis takes about as long")
    assert claim.verdict == verdict
    assert claim.why.startswith("Per test, they are ")
    assert claim.why.endswith("50% of the time of paper-preset goes into Markov chains.")


def test_ratios_of_faults_are_drawn_even_if_a_technique_found_nothing(tmp_path):
    content = {"pairs": [], **cells_until_done([0.0, 0.0, 3.0, 1.0, 2.0, 2.0])}
    assert draw_ratios(Evaluation(content), tmp_path / "ratios.png")
    assert (tmp_path / "ratios.png").stat().st_size > 1000
    assert not draw_ratios(Evaluation({"pairs": [], "done": []}), tmp_path / "none.png")


def test_the_interval_of_a_median_covers_it_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for n in (6, 9, 20):
        intervals = [median_interval(list(rng.exponential(size=n))) for _ in range(1000)]
        covered = sum(low <= np.log(2) <= high for low, high in intervals)
        assert covered >= 940  # at least 95%, less than three standard errors
    assert median_interval([1.0] * (MIN_CELLS - 1)) is None
    assert median_interval([1.0] * MIN_CELLS) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("gain", "low", "lead", "verdict"),
    [
        (0.05, 0.01, 0.01, "holds"),
        (0.05, 0.01, -0.01, "holds in part"),
        (0.05, -0.01, 0.01, "undecided"),
        (-0.01, -0.05, 0.01, "does not hold"),
    ],
)
def test_what_retraining_regains_is_judged_by_intervals(gain, low, lead, verdict):
    def standing(technique, **others):
        shift = {"before": 0.5, "after": 0.5 + gain, "combined": {"low": low}}
        return {"technique": technique, "n_runs": 5, "shifts": {"disturbed": shift}, **others}

    standings = [standing("themis"), *(standing(name, lead={"combined": {"low": lead}}) for name in BASELINES)]
    claim = verdict_of({"retraining": [{"standings": standings}]}, "Retraining regains")
    assert claim.verdict == verdict
    points = f"{100 * gain:+.2f}"
    assert claim.headline == (
        f"scheduled {points} points, the mean of the four baselines {points}, in the median over cells"
    )


def test_techniques_that_some_cells_lack_have_no_median_beside_the_others():
    shift = {"before": 0.5, "after": 0.6, "combined": {"low": 0.01}}
    themis, path = ({"technique": name, "n_runs": 5, "shifts": {"disturbed": shift}} for name in ("themis", "path"))
    claim = verdict_of({"retraining": [{"standings": [themis, path]}, {"standings": [themis]}]}, "Retraining regains")
    assert claim.measured.endswith("in 2 cells; medians: scheduled +10.00")


def test_a_sample_is_judged_on_models_with_more_neurons_than_it_has():
    def record(neurons, gap, technique="paper"):
        coverage = {"coverage": 0.5, "coverage_all": 0.5 + gap, "first_coverage_all": 0.5}
        return variant(technique, model=str(neurons), neurons=neurons, **coverage)

    small, large = record(400, 0.0), [record(8000, 0.01), record(8000, 0.0), record(8000, 0.002, "judge-exact")]
    claim = verdict_of({"variants": [small, *large]}, "1,000 sampled neurons")
    assert claim.verdict == "does not hold"
    assert claim.measured.startswith("the two differ by at most 1.00 points")
    assert claim.measured.endswith("of 2 campaigns on 1 model with more neurons")
    assert "Where the closed form judges both, they differ by at most 0.20 points." in claim.why
    assert not judge_claims(Evaluation({"pairs": [], "done": [], "retraining": [], "theory": [], "variants": [small]}))


@pytest.mark.parametrize(
    ("shares", "verdict"), [([1.0, 0.96], "holds"), ([1.0, 0.5, 1.0], "holds in part"), ([0.0, 0.5], "does not hold")]
)
def test_full_coverage_is_judged_by_the_faults_that_it_had_missed(shares, verdict):
    stability = {"model_deviation": None}
    shared = {"reference": {"distinct_faults": 40}, "stability": stability, "normality": None}
    under = [{"perturbation": "fgsm" if share == 1 else "gaussian"} for share in shares]
    theory = [{"preset": {"of_faults": share}, **shared, **own} for share, own in zip(shares, under, strict=True)]
    claim = verdict_of({"theory": theory}, "At coverage 100%")
    assert claim.verdict == verdict
    assert ("long before rare faults show" in claim.why) == (verdict != "holds")


def test_it_is_said_how_often_the_default_rule_stopped_where_full_coverage_was_too_early():
    shared = {"reference": {"distinct_faults": 40}, "stability": {"model_deviation": None}, "normality": None}
    stops = [(0.5, None), (0.2, {"of_faults": 1.0}), (1.0, {"of_faults": 0.99})]
    theory = [{"preset": {"of_faults": share}, "rule": rule, "perturbation": "fgsm", **shared} for share, rule in stops]
    claim = verdict_of({"theory": theory}, "At coverage 100%")
    assert "That rule stopped in 2 of 3 cells, having found at least 99% of the faults." in claim.why
    assert "It stopped in 1 of the 2 cells in which paper-preset had missed more than 5%." in claim.why
    assert "It stopped in none of the 1 cell" in verdict_of({"theory": [theory[0], theory[2]]}, "At coverage 100%").why


def test_what_is_missing_is_listed_with_the_command_that_would_add_it():
    whole, part, few = (
        {**cell({"random": 0.9, "scheduled": 0.9}), "perturbation": name, "limits": limits}
        for name, limits in (
            ("fgsm", {"campaigns": 3, "planned": 3, "techniques": 2}),
            ("cw", {"campaigns": 2, "planned": 3, "techniques": 3}),
            ("pgd", {"campaigns": 2, "planned": 3, "techniques": 2}),
        )
    )
    done = {"model": "net", "kind": "done", "planned": 4}
    content = {
        "pairs": [whole, part, few],
        "progress": [
            {**done, "perturbation": "fgsm", "finished": 4},
            {**done, "perturbation": "cw", "finished": 1},
            {**done, "perturbation": "pgd", "kind": "campaigns", "finished": 3},
        ],
        "plan": {"models": {"net": {"zoo": "lenet5-mnist"}, "large": {}}, "perturbations": ["fgsm", "cw", "pgd"]},
        "rows": {"net": "MNIST (LeNet-5)", "large": "ImageNet (VGG-19)"},
        "missing": {"large": "there are no weights"},
    }
    (table,) = progress_tables(Evaluation(content))
    assert table.columns == ("row of the paper", "model", "weights", "fgsm", "cw", "pgd", "Faults when done", "missing")
    assert table.rows == [
        (
            "MNIST (LeNet-5)",
            "net",
            "DeepXplore's Keras file, converted",
            "3 of 3",
            "2 of 3, 2 of 3 techniques",
            "2 of 3",
            "5 of 8",
            "--models net --perturbations cw,pgd",
        ),
        ("ImageNet (VGG-19)", "large", "-", "-", "-", "-", "-", "weights or data; then --models large"),
    ]


def test_gains_stand_beside_the_number_of_inputs_that_were_trained_on():
    shift = {"before": 0.8, "after": 0.85, "combined": {"low": 0.02, "high": 0.08}}
    standing = {"technique": "themis", "shifts": {"disturbed": shift, "clean": {**shift, "combined": None}}}
    cell = {"model": "net", "perturbation": "pgd", "magnitude": 0.1, "inputs": 1234}
    record = {**cell, "before": {"clean": 0.9, "disturbed": 0.8}, "standings": [standing]}
    (table,) = retraining_tables(Evaluation({"retraining": [record]}))
    assert table.rows == [
        ("net pgd 0.1", "1,234", "90.0% / 80.0%", "+5.00 (+2.00..+8.00)"),
        ("clean score", "", "", "+5.00"),
    ]


def test_cells_with_nothing_to_train_on_are_in_no_table_and_no_claim():
    shift = {"before": 0.8, "after": 0.85, "combined": {"low": 0.02, "high": 0.08}}
    standing = {"technique": "themis", "n_runs": 5, "shifts": {"disturbed": shift}}
    cell = {"model": "net", "perturbation": "pgd", "magnitude": 0.1, "inputs": 9}
    empty = [
        {"model": "net", "perturbation": name, "magnitude": 0.2, "standings": [], "untrained": why}
        for name, why in zip("abc", "xyx", strict=True)
    ]
    trained = {**cell, "before": {"clean": 0.9, "disturbed": 0.8}, "standings": [standing]}
    content = {"retraining": [trained, *empty]}
    (table,) = retraining_tables(Evaluation(content))
    assert [row[0] for row in table.rows] == ["net pgd 0.1", "clean score"]
    assert "points for scheduled in 1 cell;" in verdict_of(content, "Retraining regains").measured
    assert not [*retraining_tables(Evaluation({"retraining": empty}))]
    content |= {"version": "1", "pairs": [], "missing": {}, "unfinished": [], "failed": []}
    assert opening(Evaluation(content))[1:] == [
        "Nothing to train on for net a 0.2, net c 0.2: x.",
        "Nothing to train on for net b 0.2: y.",
    ]


def test_the_opening_says_how_many_campaigns_there_were():
    pairs = [
        {"model": f"net{k}", "limits": {"campaigns": n}, "budgets": {"passes": grids}}
        for k, (n, grids) in enumerate([(2, [{}]), (3, [{}]), (2, [{}]), (1, [])])
    ]
    content = {"version": "1", "pairs": pairs, "retraining": [], "missing": {}, "unfinished": [], "failed": []}
    lines = opening(Evaluation(content))
    assert lines[0].startswith("Themis 1: 4 models, 4 pairs of a model and a perturbation")
    assert opening(Evaluation({**content, "command": "make it"}))[0].startswith("Themis 1, `make it`: 4 models")
    assert lines[1:] == ["Every technique had 3 campaigns per magnitude in 1 pair, 2 in 2."]


def test_only_correlations_that_are_defined_count():
    weak = {"r": 0.5, "mean_sensitivity": [1.0], "error_rates": [0.1]}
    pairs = [{**cell({}), "sensitivity": own} for own in (weak, {**weak, "r": 0.9}, {**weak, "r": None}, None)]
    assert verdict_of({"pairs": pairs}, "Greater sensitivity").headline == "r of at least 0.7 in 1 of 2 cells"


def test_claims_are_listed_by_verdict():
    pairs = [{**cell({"paper-preset": 0.3, "nc": 0.8, "kmnc": 0.1, "idc": 0.2, "lsa": 0.3}), "sensitivity": None}]
    content = {"pairs": pairs, "retraining": [], "variants": [], "theory": [], **cells_until_done([1.4] * 6)}
    assert list_verdicts(Evaluation(content)).splitlines() == [
        "Of 2 claims, judged by paper-preset, the paper's own method (retraining by scheduled):",
        "",
        "- **1 holds in part.** Themis finds more faults than the mean of the four baselines, when done.",
        "- **1 does not hold.** Themis correlates strongly, baselines rarely (the paper's magnitudes).",
    ]


def test_a_claim_is_listed_with_the_verdict_on_the_default_if_it_is_another():
    ratios = {"paper-preset": {"over_four": 0.8, "over_best": 0.5}, "scheduled": {"over_four": 3.9, "over_best": 1.0}}
    content = {"pairs": [], "retraining": [], "variants": [], "theory": [], **cells_until_done([0.8] * 6)}
    for pair in content["done"]:
        pair["ratios"] = ratios
    listed = "Themis finds more faults than the mean of the four baselines, when done (for scheduled, it holds)."
    assert list_verdicts(Evaluation(content)).endswith(f"- **1 does not hold.** {listed}")
    assert "For scheduled, it holds." in verdict_of(content, "Themis finds more faults").why


def test_techniques_are_averaged_over_the_same_cells_when_done():
    def found(count):
        names = ("tests", "faults", "distinct_faults")
        return {**dict.fromkeys(names, count), "scc": 1.0, "stops": {"coverage": 1}, "campaigns": 1}

    both, one = {"scheduled": found(10), "random": found(4)}, {"scheduled": found(1000)}
    cells = [{**both, "path": found(1)}, both, both, one]
    (table,) = done_tables(Evaluation({"done": [{"techniques": cell, "ratios": {}} for cell in cells]}))
    assert [row[:3] for row in table.rows] == [("scheduled", "10", "10"), ("random", "4", "4")]
    assert table.notes[0].startswith("Means over 3 cells with all of these techniques.")


def test_faults_until_done_are_listed_by_cell_and_marked_where_no_campaign_was_done():
    def found(count, **stops):
        return {"tests": 10 * count, "distinct_faults": count, "stops": stops}

    techniques = {"scheduled": found(40, coverage=2, tests=1), "nc": found(20, tests=3)}
    pair = {"model": "net", "perturbation": "fgsm", "magnitudes": [0.1], "techniques": techniques}
    ratios = {"scheduled": {"over_four": 2.0}}
    (table,) = done_cells(Evaluation({"done": [{**pair, "ratios": ratios}]}))
    assert table.columns == ("cell", "scheduled", "nc", "paper-preset / four", "scheduled / four")
    assert table.rows == [("net fgsm 0.1", "40 in 400", "20 in 200+", "-", "2.00")]


def record_until_done(technique, campaign, count, **others):
    names = ("tests", "passes", "faults", "distinct_faults", "failing_seeds", "coverage", "scc", "fit_seconds")
    seconds = ("seconds_measure", "seconds_judge", "seconds_search", "seconds_total")
    shared = {"model": "net", "perturbation": "fgsm", "magnitude": 0.1, "stop_reason": "tests", **others}
    return {**shared, "technique": technique, "campaign": campaign, **dict.fromkeys((*names, *seconds), count)}


PLANNED = [EvaluationCell("done", "net", "fgsm", "", technique) for technique in ("scheduled", "nc")]


def test_a_campaign_until_done_counts_if_all_planned_techniques_have_had_it():
    counts = (("scheduled", 0, 4), ("nc", 0, 2), ("scheduled", 1, 400))
    (pair,) = summarise_done((record_until_done(*own) for own in counts), PLANNED)
    assert {name: row["tests"] for name, row in pair["techniques"].items()} == {"scheduled": 4, "nc": 2}
    assert pair["ratios"]["scheduled"]["over_best"] == 2
    assert not summarise_done([record_until_done("scheduled", 1, 400)], PLANNED)  # a rival may be better


def test_machines_with_one_host_name_are_told_apart_and_so_are_threads(monkeypatch, tmp_path):
    monkeypatch.setattr("os.getpriority", lambda which, who: 0, raising=False)
    here = name_machine("cpu")
    assert here == name_machine("cpu")
    with threads(torch.get_num_threads() + 1):
        assert name_machine("cpu") != here
    (tmp_path / "boot_id").write_text("another machine")
    monkeypatch.setattr("themis_lab.evaluation.cells.BOOT_ID", tmp_path / "boot_id")
    elsewhere = name_machine("cpu")
    monkeypatch.setattr("themis_lab.evaluation.cells.BOOT_ID", tmp_path / "none")  # not Linux
    assert len({here, elsewhere, name_machine("cpu")}) == 3


def test_a_process_at_low_priority_is_not_compared_by_its_time(monkeypatch):
    monkeypatch.setattr("os.getpriority", lambda which, who: 5, raising=False)
    assert name_machine("cpu") is None
    nice = [record_until_done("scheduled", 0, 4, machine=None), record_until_done("nc", 0, 2, machine=None)]
    (pair,) = summarise_done(nice, PLANNED)
    assert all("seconds_total" not in row for row in pair["techniques"].values())


def test_times_are_compared_only_in_campaigns_that_all_techniques_had_on_one_machine():
    one = [record_until_done("scheduled", 0, 4, machine="a"), record_until_done("nc", 0, 2, machine="a")]
    mixed = [record_until_done("scheduled", 1, 400, machine="a"), record_until_done("nc", 1, 100, machine="b")]
    (pair,) = summarise_done([*one, *mixed], PLANNED)
    rows = pair["techniques"]
    assert {name: row["tests"] for name, row in rows.items()} == {"scheduled": 202, "nc": 51}
    assert {name: row["seconds_total"] for name, row in rows.items()} == {"scheduled": 4, "nc": 2}
    assert {name: row["seconds_per_test"] for name, row in rows.items()} == {"scheduled": 1, "nc": 1}
    assert not list(time_tables(Evaluation({"done": summarise_done(mixed, PLANNED)})))
    (table,) = time_tables(Evaluation({"done": summarise_done([*one, *mixed], PLANNED)}))
    assert [row[0::4] for row in table.rows] == [("scheduled", "4.00"), ("nc", "2.00")]
