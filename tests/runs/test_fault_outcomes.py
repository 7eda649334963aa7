"""Outcomes are shown in the words of their task."""

import pytest

from themis.runs.display.fault import describe_change
from themis.runs.fault import name_outcome, show_outcome

PETS = ("cat", "dog", "owl")
OUTCOMES = {
    "wrong": ("dog", "1"),
    "changed": ("dog", "1"),
    "top3": ("dog", "1"),
    "threshold": ("dog", "1"),
    "regression": ("larger", "larger"),
    "off": ("larger", "larger"),
    "multilabel": ("label dog flipped", "label dog flipped"),
    "segmentation": ("class dog lost", "class dog lost"),
    "keypoints": ("dog off", "dog off"),
    "mine": ("outcome 1", "outcome 1"),
}


@pytest.mark.parametrize("task", OUTCOMES)
def test_an_outcome_has_a_name_and_lists_show_the_number_of_an_answer(task):
    assert (name_outcome(task, 1, PETS), show_outcome(task, 1, PETS)) == OUTCOMES[task]
    assert name_outcome(task, -1, PETS) == show_outcome(task, -1, PETS) == "not finite"


def test_classes_and_points_without_names_have_numbers():
    assert name_outcome("top5", 7, PETS) == "7"
    assert name_outcome("keypoints", 7, None) == "point 7 off"


def test_a_change_says_how_an_input_was_answered():
    assert describe_change(1, 7) == "1 answered as 7"
    assert describe_change(None, "7 (91%)") == describe_change("as expected", "7 (91%)") == "answered as 7 (91%)"
