"""Objects in pictures: what a fault is, worked out by hand."""

import math

import pytest
import torch

from themis import DataError, ModelError, UsageError
from themis.oracle import KEPT_ANSWER, NOT_FINITE, Detection, choose_oracle
from themis.oracle.detection import describe_outcome
from themis.retraining.grading import choose_loss, grade

CAT, DOG, OWL = 0, 1, 2
NAMES = ["cat", "dog", "owl"]


def detections(*pictures, n=5):
    """Detections `[pictures, n, 6]`, filled up with empty rows."""
    rows = torch.tensor([0.0, 0, 0, 0, 0, -1]).repeat(len(pictures), n, 1)
    for k, picture in enumerate(pictures):
        for j, row in enumerate(picture):
            rows[k, j] = torch.tensor(row)
    return rows


def objects(*pictures, n=4):
    rows = torch.tensor([0.0, 0, 0, 0, -1]).repeat(len(pictures), n, 1)
    for k, picture in enumerate(pictures):
        for j, row in enumerate(picture):
            rows[k, j] = torch.tensor(row)
    return rows


def box(left, score, number, width=10):
    return [left, 0.0, left + width, 10.0, score, number]


def names(verdict):
    return ["kept" if k == KEPT_ANSWER else describe_outcome(k, NAMES) for k in verdict.outcome.tolist()]


CLEAN = [box(0, 0.9, CAT), box(20, 0.8, DOG)]
CHANGES = {
    "nothing changes": (CLEAN, "kept", 0.3),
    "order does not matter": ([box(20, 0.7, DOG), box(0, 0.6, CAT)], "kept", 0.1),
    "a score falls below the least one": ([box(0, 0.45, CAT), box(20, 0.8, DOG)], "cat lost", -0.05),
    "an object is gone": ([box(20, 0.8, DOG)], "cat lost", -0.5),
    "everything is gone": ([], "cat lost", -0.5),
    "an object has another class": ([box(0, 0.9, OWL), box(20, 0.8, DOG)], "cat taken for owl", -0.5),
    "a box moves": ([box(4, 0.9, CAT), box(20, 0.8, DOG)], "cat moved", 6 / 14 - 0.5),
    "a box moves far away": ([box(60, 0.9, CAT), box(20, 0.8, DOG)], "cat lost", -0.5),
    "a box moves a little": ([box(2, 0.9, CAT), box(20, 0.8, DOG)], "kept", 8 / 12 - 0.5),
    "an object appears": ([*CLEAN, box(50, 0.7, OWL)], "spurious owl", -0.2),
    "an object is about to appear": ([*CLEAN, box(50, 0.4, OWL)], "kept", 0.1),
    "an object is found twice": ([*CLEAN, box(2, 0.6, CAT)], "spurious cat", -0.1),
    "an object has a second class": ([*CLEAN, box(0, 0.6, OWL)], "spurious owl", -0.1),
    "the worst of two counts": ([box(0, 0.4, CAT), box(20, 0.3, DOG)], "dog lost", -0.2),
}


@pytest.mark.parametrize("matching", ["greedy", "hungarian"])
def test_what_happens_to_objects_is_compared_with_the_clean_answer(matching):
    clean = detections(*[CLEAN] * len(CHANGES))
    outputs = detections(*(rows for rows, _, _ in CHANGES.values()))
    verdict = Detection(matching=matching).compare(clean, outputs, None)
    assert dict(zip(CHANGES, names(verdict), strict=True)) == {key: name for key, (_, name, _) in CHANGES.items()}
    assert verdict.margin.tolist() == pytest.approx([margin for _, _, margin in CHANGES.values()], abs=1e-5)
    assert verdict.is_fault.tolist() == [name != "kept" for _, name, _ in CHANGES.values()]
    assert ((verdict.margin < 0) == verdict.is_fault).all()
    assert verdict.value[:3].tolist() == pytest.approx([1, 1, 0.5 * 2 / 1.5])


def test_with_labels_only_what_was_found_can_be_lost_and_old_mistakes_do_not_count():
    # The owl at 40 was never found, and the dog at 70 is a mistake on the clean input already.
    labels = objects(*[[[0, 0, 10, 10, CAT], [40, 0, 50, 10, OWL]]] * 5)
    clean = detections(*[[box(0, 0.9, CAT), box(70, 0.8, DOG)]] * 5)
    outputs = detections(
        [box(0, 0.9, CAT)],  # the mistake is gone
        [box(0, 0.9, CAT), box(40, 0.8, OWL), box(70, 0.8, DOG)],  # the owl is found now
        [box(0, 0.9, CAT), box(72, 0.8, DOG), box(72, 0.7, OWL)],  # another mistake in the same place
        [box(70, 0.8, DOG)],
        [box(0, 0.9, CAT), box(42, 0.8, DOG)],  # an object that was not found before is found with a wrong class
    )
    verdict = Detection().compare(clean, outputs, labels)
    assert names(verdict) == ["kept", "kept", "spurious owl", "cat lost", "spurious dog"]
    assert verdict.value.tolist() == pytest.approx([2 / 3, 4 / 5, 2 / 5, 0, 2 / 4])


def test_seeds_with_nothing_to_lose_are_left_out():
    labels = objects([[0, 0, 10, 10, CAT]], [[0, 0, 10, 10, CAT]], [], [])
    clean = detections([box(0, 0.9, CAT)], [box(0, 0.3, CAT)], [], [box(0, 0.9, CAT)])
    assert Detection().check(clean, labels).tolist() == [True, False, True, False]
    assert Detection().check(clean, None).tolist() == [True, False, False, True]
    with pytest.raises(
        DataError, match=r"no detection has a score of 0\.95 or more, the highest is 0\.9: lower it with"
    ):
        Detection(least_score=0.95).check(clean, None)


def test_a_crowd_takes_any_number_of_detections():
    crowd = -2.0 - CAT
    labels = objects([[0, 0, 10, 10, CAT], [30, 0, 90, 10, crowd]])
    clean = detections([box(0, 0.9, CAT)])
    outputs = detections([box(0, 0.9, CAT), box(40, 0.8, CAT), box(60, 0.7, CAT)])
    for matching in ("greedy", "hungarian"):
        verdict = Detection(matching=matching).compare(clean, outputs, labels)
        assert names(verdict) == ["kept"]
        assert verdict.value.item() == 1
    outputs[0, 2, 5] = DOG  # nobody has seen dogs in the crowd
    assert names(Detection().compare(clean, outputs, labels)) == ["spurious dog"]


def test_greedy_matching_can_lose_an_object_that_the_best_matching_keeps():
    clean = detections([box(0, 0.9, CAT), box(6, 0.8, CAT)])
    outputs = detections([box(3.2, 0.9, CAT), box(8, 0.8, CAT)])  # the first fits both, the second only the second
    assert names(Detection(0.5, matching="hungarian").compare(clean, outputs, None)) == ["kept"]
    assert names(Detection(0.5).compare(clean, outputs, None)) == ["cat moved"]


def test_an_output_that_is_not_finite_is_a_fault():
    clean, outputs = detections(CLEAN, CLEAN), detections(CLEAN, CLEAN)
    outputs[0, 0, 2] = math.nan
    assert Detection().compare(clean, outputs, None).outcome.tolist() == [NOT_FINITE, KEPT_ANSWER]
    assert len(Detection().compare(clean[:0], outputs[:0], None).is_fault) == 0


def test_the_margin_and_the_loss_have_a_slope():
    clean = detections(CLEAN)
    outputs = detections([box(1, 0.9, CAT), box(20, 0.6, DOG), box(60, 0.3, OWL)]).requires_grad_()
    oracle = Detection()
    (slope,) = torch.autograd.grad(oracle.compare(clean, outputs, None).margin.sum(), outputs)
    assert slope[0, 1, 4] == 1
    assert slope.count_nonzero() == 1
    (slope,) = torch.autograd.grad(oracle.loss(outputs, oracle.reference(clean, None)).sum(), outputs)
    assert slope[0, 0, 4] < 0  # the loss grows as the objects vanish and the others appear
    assert slope[0, 1, 4] < 0
    assert slope[0, 2, 4] > 0


def test_an_outcome_says_what_happened_to_which_class():
    verdict = Detection().compare(detections(CLEAN), detections([box(0, 0.9, OWL), box(20, 0.8, DOG)]), None)
    assert describe_outcome(verdict.outcome.item()) == "class 0 taken for class 2"


def test_its_name_has_all_settings():
    assert choose_oracle("detection") == Detection()
    assert choose_oracle("detection:0.75") == Detection(0.75)
    assert choose_oracle("detection:0.75,score=0.3,match=hungarian") == Detection(0.75, 0.3, "hungarian")
    assert choose_oracle("detection:score=0.3") == Detection(least_score=0.3)
    for name, message in {
        "detection:1": "a number between 0 and 1",
        "detection:0.5,score=2": "a number between 0 and 1, got 'detection:score=2'",
        "detection:0.5,match=best": "match=greedy or match=hungarian, got 'match=best'",
    }.items():
        with pytest.raises(UsageError, match=message):
            choose_oracle(name)


def test_outputs_and_labels_that_do_not_fit_are_refused():
    oracle = Detection()
    for outputs in (torch.zeros(2, 3), torch.zeros(2, 5, 4), torch.full((1, 1, 6), 3.5)):
        with pytest.raises(ModelError, match=r"must return detections \[inputs, n, 6\].*output=themis\.Detections"):
            oracle.check(outputs, None)
    clean = detections(CLEAN)
    with pytest.raises(DataError, match=r"must be \[1, objects, 5\].*got shape \[1\]"):
        oracle.check(clean, torch.zeros(1))
    with pytest.raises(DataError, match=r"left <= right.*got \[10.* 0\.0\] in row 0 of the labels of input 0,"):
        oracle.check(clean, objects([[10, 0, 0, 10, CAT]]))


NOTHING = {
    "classes": ([box(0, 0.9, DOG)], "class 1 for a label of class 0.*first_class=1"),
    "scores": ([box(0, 0.2, CAT)], "no detection has a score of 0.5 or more, the highest is 0.2: lower it"),
    "boxes": ([box(50, 0.9, CAT)], "no detection has an IoU of 0.5 with a label.*pixels"),
}


@pytest.mark.parametrize("reason", NOTHING)
def test_a_model_that_finds_nothing_is_refused_with_the_likely_reason(reason):
    clean, message = NOTHING[reason]
    with pytest.raises(DataError, match=message):
        Detection().check(detections(clean), objects([[0, 0, 10, 10, CAT]]))


def test_retraining_grades_by_the_f1_score_and_asks_for_the_loss_of_the_detector():
    labels = objects([[0, 0, 10, 10, CAT], [20, 0, 30, 10, DOG]], [])
    outputs = detections([box(0, 0.9, CAT)], [])
    assert grade(Detection(), outputs, labels).tolist() == pytest.approx([2 / 3, 1])
    with pytest.raises(UsageError, match=r"pass loss=function\(outputs, labels\)"):
        choose_loss(Detection(), None, torch.nn.Identity())
