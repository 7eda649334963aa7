"""Models whose clean answers say nothing about their inputs, task by task, and good ones that look like them."""

import pytest
import torch
from torch import nn

import themis
from themis.oracle import choose_oracle
from themis.oracle.oracle import find_constant
from themis.runs.display.text import opening


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def scores(answers, n_classes):
    return nn.functional.one_hot(answers.long(), n_classes).float()


def found(name, outputs, labels=None):
    return find_constant(choose_oracle(name).settle(outputs, labels), outputs, labels)


RARE = (torch.arange(100) >= 90).long()
"""Labels of which class 0 has 90%."""


@pytest.mark.parametrize("labels", [None, RARE, torch.arange(100) % 10], ids=["none", "rare", "balanced"])
def test_a_constant_classifier_is_found_with_and_without_labels(labels):
    outputs = scores(torch.zeros(100), 10)
    assert found("auto", outputs, labels) == "all 100 clean answers are the same"


def test_a_classifier_that_is_nearly_constant_or_guesses_is_no_better_than_the_commonest_label():
    nearly = torch.zeros(100)
    nearly[3] = 1
    text = "the clean answers are no better than always naming class 0: 89.0% against 90.0% correct"
    assert found("wrong", scores(nearly, 2), RARE) == text
    guesses = torch.randint(0, 10, (1000,), generator=draw())
    assert "always naming class" in found("wrong", scores(guesses, 10), torch.arange(1000) % 9)
    worse = torch.where(torch.rand(2000, generator=draw()) < 0.3, 1 - RARE.repeat(20), RARE.repeat(20))
    assert "about" not in found("wrong", scores(worse, 2), RARE.repeat(20))  # informative, but 70% against 90%


@pytest.mark.parametrize("n", [50, 200, 1000])
def test_a_good_classifier_passes_however_unbalanced_the_data_and_whatever_was_drawn(n):
    """It answers 95% correctly where the commonest label has 94%, and is often less accurate than it by chance."""
    failed = less_accurate = 0
    for k in range(300):
        labels = (torch.rand(n, generator=draw(k)) < 0.06).long()
        miss, alarm = torch.rand(2, n, generator=draw(10_000 + k))
        answers = torch.where(labels == 1, miss > 0.4, alarm < 0.0277).long()
        less_accurate += bool((answers == labels).sum() <= (labels == 0).sum())
        failed += bool(answers.any()) and found("wrong", scores(answers, 2), labels) is not None
    assert less_accurate > 10
    assert failed <= 3  # of those that are not all the same, which tells nothing


def test_a_perfect_classifier_passes_and_so_do_few_seeds():
    labels = torch.arange(20) % 3
    assert found("wrong", scores(labels, 3), labels) is None
    assert found("top2", scores(labels, 4), labels) is None
    assert found("changed", scores(torch.zeros(9), 3)) is None


def test_every_task_has_its_own_constant_answer():
    bits = torch.randint(0, 2, (60, 4), generator=draw())
    bits[:, 0] = 1
    always = bits.median(0).values.float().expand(60, 4)
    assert found("multilabel:0.5", always, bits) == "all 60 clean answers are the same"
    assert found("multilabel:0.5", bits.float(), bits) is None
    noise = torch.randint(0, 2, (60, 4), generator=draw(1)).float()
    assert "always giving each label its commonest value" in found("multilabel:0.5", noise, bits)
    assert "always naming class 0" in found("threshold:0.5", (torch.arange(100) == 3).float(), RARE)
    several = (torch.arange(100) % 10).clamp(max=3)
    assert "always naming the 2 commonest classes" in found("top2", torch.rand(100, 4, generator=draw()), several)
    numbers = torch.randn(80, generator=draw())
    other = torch.randn(80, generator=draw(1))
    assert found("regression:1", numbers[:, None], numbers + 0.3 * other) is None
    assert "always answering the median label, " in found("regression:1", 0.1 * other, numbers)
    assert found("regression:1", torch.full((80,), 0.3)) == "all 80 clean answers are the same"
    both = torch.stack([numbers, other], 1)
    assert found("euclidean:1", both, both + 0.1) is None
    assert "always answering the median label" in found("regression:1", both.flip(0), both)
    maps = torch.zeros(12, 6, 6).long()
    maps[:, 2:4, 2:5] = 1
    background = scores(torch.zeros(12, 6, 6), 2).movedim(-1, 1)
    assert found("segmentation:0.1", background, maps) == "all 12 clean answers are the same"
    background[0, :, 0, 0] = torch.tensor([0, 1])
    assert "always answering class 0: mean IoU" in found("segmentation:0.1", background, maps)
    assert found("segmentation:0.1", scores(maps, 2).movedim(-1, 1), maps) == "all 12 clean answers are the same"
    places = 50 * torch.rand(40, 3, 2, generator=draw())
    shuffled = 50 * torch.rand(40, 3, 2, generator=draw(1))
    assert found("keypoints:5", places, places + 1) is None
    assert "always answering the median places" in found("keypoints:5", shuffled, places)
    nothing = torch.tensor([0.0, 0, 0, 0, 0, -1]).repeat(15, 2, 1)
    assert found("detection:0.5", nothing, torch.full((15, 1, 5), -1.0)) == "all 15 clean answers are the same"


class Spotter(nn.Module):
    """Finds a bright corner, with a score that the darkest pictures do not raise above a limit."""

    def __init__(self, most):
        super().__init__()
        self.most, self.pool = most, nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        score = self.most * self.pool(x[:, :, :4, :4]).flatten(1)
        place = torch.tensor([0.0, 0, 4, 4]).expand(len(x), 4) + x[:, 0, 7, 7:8]
        return torch.cat([place, score, torch.zeros_like(score)], 1)[:, None]


def pictures(n_empty):
    drawn = torch.rand(40, 1, 8, 8, generator=draw()) * 0.1
    drawn[n_empty:, :, :4, :4] = torch.linspace(0.6, 1, 40 - n_empty).view(-1, 1, 1, 1)
    return drawn


def test_a_detector_whose_scores_are_all_too_low_is_refused_without_labels():
    with pytest.raises(
        themis.DataError, match=r"no detection has a score of 0\.5 or more, the highest is 0\.4: lower it"
    ):
        themis.run(Spotter(0.4), pictures(0), "brightness", max_tests=50)


def test_empty_pictures_do_not_dilute_the_fault_rate_of_a_detector_without_labels():
    options = {"max_tests": 1000, "policy": "random", "magnitude": 0.4}
    full = themis.run(Spotter(1.0), pictures(0)[20:], "gaussian", **options)
    diluted = themis.run(Spotter(1.0), torch.cat([pictures(40), pictures(0)[20:]]), "gaussian", **options)
    assert (diluted.start.n_usable, diluted.start.n_seeds) == (20, 60)
    assert diluted.start.left_out == "nothing is found on them at scores of 0.5 and more"
    said = "20 of 60 seeds to test; 40 are left out: nothing is found on them at scores of 0.5 and more"
    assert said in opening(diluted.start)
    assert diluted.summary()["left_out"] == diluted.start.left_out
    assert diluted.fault_rate.value == pytest.approx(full.fault_rate.value, abs=0.05)


class Constant(nn.Module):
    """Always names class 0, but its neurons depend on the input."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.ReLU()

    def forward(self, x):
        mean = self.hidden(x).flatten(1).mean(1)
        return torch.stack([2 + mean, mean, mean], 1)


@pytest.mark.parametrize("labels", [None, RARE])
def test_a_constant_model_is_said_to_be_one_wherever_its_faults_are(labels):
    inputs = torch.rand(100, 1, 4, 4, generator=draw())
    with pytest.warns(
        RuntimeWarning, match="^all 100 clean answers are the same, so that a low fault rate says nothing"
    ):
        run = themis.run(Constant(), inputs if labels is None else (inputs, labels), "gaussian", max_tests=50)
    assert run.summary()["constant"] == "all 100 clean answers are the same"
    assert "But all 100 clean answers are the same" in run.verdict.text


def test_seeds_that_cannot_break_are_not_tested():
    maps = torch.zeros(2, 8, 8).long()
    maps[:, :4] = 1
    outputs = scores(torch.stack([maps[0], 2 * torch.ones(8, 8)]), 3).movedim(-1, 1)
    outputs[1, :, 0, 0] = torch.tensor([0.0, 1, 0])  # a mean IoU of 0.01 cannot fall by 0.1
    oracle = choose_oracle("segmentation:0.1").settle(outputs, maps)
    assert oracle.check(outputs, maps).tolist() == [True, False]
    points = torch.tensor([[[1.0, 1], [5, 5]], [[3.0, 3], [3, 3]]])
    assert choose_oracle("keypoints").check(points, None).tolist() == [True, False]
    with pytest.raises(themis.ModelError, match="must have an extent"):
        choose_oracle("keypoints").check(points[1:], None)
