"""The verdict on a campaign: one sentence, with the right words and numbers for every task."""

import pytest

from themis.judge.estimate import Estimate
from themis.runs.display.text import CleanScores, Counts, write_verdict

pytestmark = pytest.mark.quick
COUNTS = Counts(500, 0, 680, 87, 54, 40, 160, 200, 0, 0)
RATE = Estimate(0.025, 0.01, 0.05)
NONE, ACCURACY = CleanScores(None, None, None, None), CleanScores(0.8, None, None, None)
AGREES = "agreement with the clean answer is 97.5% under random disturbance and at most 75.0% at worst, as searched"
HOLDS = "the share of answers without a fault is 97.5% under random disturbance and at most 75.0% at worst, as searched"
CLEAN = "80.0% clean, 78.0% under random disturbance and at most 60.0% at worst, as searched"


@pytest.mark.parametrize(
    ("task", "clean", "shares"),
    [
        ("wrong", ACCURACY, f"accuracy is {CLEAN}"),
        ("threshold", ACCURACY, f"accuracy is {CLEAN}"),
        ("top5", ACCURACY, f"top-5 accuracy is {CLEAN}"),
        ("changed", NONE, AGREES),
        ("top5", NONE, AGREES),
        ("threshold", NONE, AGREES),
        ("changed", ACCURACY, f"{AGREES} (clean accuracy 80.0%)"),
        ("regression", CleanScores(None, 0.125, None, None), f"{HOLDS} (clean error 0.125 on average)"),
        ("segmentation", CleanScores(None, None, 0.5, None), f"{HOLDS} (clean mean IoU 0.5)"),
        ("detection", CleanScores(None, None, None, 0.25), f"{HOLDS} (clean mAP 0.25)"),
        ("multilabel", ACCURACY, f"{HOLDS} (clean accuracy of the labels 80.0%)"),
        ("mine:own", NONE, HOLDS),
    ],
)
def test_the_shares_of_a_task_are_called_what_they_are(task, clean, shares):
    verdict = write_verdict("fog", task, COUNTS, clean, RATE)
    assert verdict.text == f"Under fog, the model breaks: {shares}."
    assert verdict.tone == "broken"
    running = write_verdict("fog", task, COUNTS, clean, RATE, is_running=True)
    assert running.text == f"So far, the model breaks under fog: {shares}."


def test_faults_that_only_the_search_found_leave_the_random_rate_at_zero():
    text = write_verdict("fog", "wrong", COUNTS, ACCURACY, Estimate(0.0, 0.0, 0.04)).text
    assert "80.0% under random disturbance (95%: at least 76.8%) and at most 60.0% at worst" in text


def test_without_a_fault_the_verdict_says_what_was_tried():
    counts = Counts(1, 0, 1, 0, 0, 0, 160, 200, 0, 0)
    verdict = write_verdict("fog", "changed", counts, NONE, Estimate(0.0, 0.0, 0.0362))
    assert verdict.tone == "standing"
    assert verdict.text == (
        "No fault in 1 test on 160 seeds under fog: agreement with the clean answer is 100.0% under random disturbance "
        "(95%: at least 96.3%) and at most 100.0% at worst, as searched."
    )


def test_a_search_of_few_seeds_does_not_make_the_worst_better_than_chance():
    text = write_verdict("fog", "wrong", COUNTS, ACCURACY, Estimate(0.5, 0.4, 0.6)).text
    assert "40.0% under random disturbance and at most that at worst (500 tests are few for 160 seeds)" in text


def test_a_model_that_is_no_better_than_a_constant_has_shown_nothing():
    counts = Counts(1, 0, 1, 0, 0, 0, 160, 200, 0, 0)
    verdict = write_verdict("fog", "changed", counts, NONE, None, constant="all 200 clean answers are the same")
    assert verdict.tone == "open"
    assert verdict.text.endswith(". But all 200 clean answers are the same, so that a low fault rate says nothing.")


def test_without_uniform_tests_nothing_is_said_of_random_disturbances():
    text = write_verdict("fog", "wrong", COUNTS, ACCURACY, None).text
    assert text.endswith("accuracy is 80.0% clean and at most 60.0% at worst, as searched.")


def test_a_model_that_every_seed_breaks_is_left_with_nothing():
    counts = Counts(500, 0, 680, 87, 54, 160, 160, 200, 0, 0)
    assert "and 0.0% at worst" in write_verdict("fog", "wrong", counts, ACCURACY, RATE).text
