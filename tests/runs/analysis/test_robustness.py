"""The robustness curve: by hand, with the limits of Clopper and Pearson, and on a model with known strengths."""

import io
import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from torch import nn

import themis
from themis import Perturbation, Target, Theta, UsageError
from themis.judge.estimate import Estimate
from themis.perturb.perturbation import column
from themis.runs.analysis.shrink import CAVEAT, Robustness, robustness
from themis.runs.display.figure import robustness_figure, save_figure
from themis.runs.replay import Replayer, read_run
from themis.runs.run import StrengthPart
from themis.runs.store.reader import Reader

RANGE = 0.2


def curve_of(failed, n_withstood, **rest):
    """The curve of seeds that broke at these strengths, and of others that withstood all."""
    return Robustness(np.array([*failed, *[np.inf] * n_withstood]), **rest)


def test_the_curve_equals_one_computed_by_hand():
    curve = curve_of([0.5, 0.2, 0.1, 0.2], 3)
    assert list(curve.steps) == [0.1, 0.2, 0.5, 1]
    assert [step.value for step in curve.steps.values()] == pytest.approx([6 / 7, 4 / 7, 3 / 7, 3 / 7])
    assert (curve.n_seeds, curve.n_failed) == (7, 4)
    assert curve.at(0.05).value == 1
    assert curve.at(0.1).value == pytest.approx(6 / 7)
    assert curve.at(0.4999).value == pytest.approx(4 / 7)
    assert curve.at(1).value == pytest.approx(3 / 7)
    assert curve.median == 0.5
    assert curve.median_interval == (0.1, None)
    assert curve.as_dict()["strengths"] == [0.1, 0.2, 0.5, 1]


def test_the_limits_are_those_of_clopper_and_pearson():
    rng = np.random.default_rng(0)
    for n in (2, 5, 40, 200):
        curve = curve_of(rng.integers(1, 12, n).clip(max=10) / 10, n // 2)
        columns = curve.as_dict()
        for strength, *ends in zip(*(columns[name] for name in ("strengths", "share", "low", "high")), strict=True):
            n_left = sum(least > strength for least in curve.least.tolist())
            limits = binomtest(n_left, n + n // 2).proportion_ci()
            assert ends == pytest.approx([n_left / (n + n // 2), limits.low, limits.high])


def test_intervals_contain_the_true_curve():
    rng, inside, n_curves = np.random.default_rng(1), 0, 400
    for _ in range(n_curves):
        draw = rng.exponential(0.8, 60)
        curve = Robustness(np.where(draw < 1, draw, np.inf))
        estimate = curve.at(0.5)
        inside += estimate.low <= math.exp(-0.5 / 0.8) <= estimate.high
    assert 0.92 <= inside / n_curves <= 0.99


def test_curves_without_failures_and_with_failures_only():
    none = curve_of([], 50)
    assert none.at(1).value == 1
    assert none.at(1).low == pytest.approx(0.025 ** (1 / 50))
    assert none.median is None
    assert none.sentences()[1] == "The search could not break more than half of the seeds at any strength."
    every = curve_of([0.2] * 50, 0)
    assert every.at(0.2).value == 0
    assert every.at(0.2).high == pytest.approx(1 - 0.025 ** (1 / 50))
    assert every.median == 0.2
    for curve in (none, every):
        picture = io.BytesIO()
        save_figure(robustness_figure(curve), picture, dpi=130)
        assert picture.getvalue().startswith(b"\x89PNG")


class Mean(nn.Module):
    """Says 1 where an input's mean is over a half."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        over = self.relu(x).flatten(1).mean(1) - 0.5
        return torch.stack([-over, over], 1)


def shifted(inputs, theta, rng, context):
    """All values moved."""
    return inputs + column(theta, 0, inputs)


SHIFT = Perturbation("shifted", (Theta("shift", -RANGE, RANGE),), shifted, is_random=False)


def seeds(n=200):
    """Half of them break at shifts over 0.05 to 0.2, the others would at more."""
    inputs = torch.linspace(0.1, 0.45, n).view(-1, 1, 1, 1).repeat(1, 1, 4, 4)
    return inputs, torch.zeros(n, dtype=torch.long)


def test_a_model_with_known_strengths_has_their_curve(tmp_path):
    data = seeds()
    true = (0.5 - data[0][:, 0, 0, 0].double()) / RANGE
    options = {"max_tests": 400, "coverage": None, "tolerance": 1e-9, "policy": "random", "out": tmp_path / "run"}
    run = themis.run(Target(Mean()), data, SHIFT, **options)
    missed = len(set((true < 1).nonzero()[:, 0].tolist()) - {fault.seed_id for fault in run.faults})
    assert missed > 10  # the campaign alone would count them as robust
    curve = robustness(run)
    assert (curve.n_seeds, curve.n_failed) == (200, int((true < 1).sum()))
    for strength in np.linspace(0.0, 1.0, 21):
        assert curve.at(strength).value == pytest.approx(float((true > strength).double().mean()), abs=0.0051)
    assert curve.full_strength == "shift -0.2 or 0.2"
    assert [each.seed_id for each in curve.shrunk] == sorted((true < 1).nonzero()[:, 0].tolist())
    assert sum(each.id == -1 for each in curve.shrunk) == missed
    assert curve.sentences()[1].startswith(f"{missed} of them did not fail in the run: ")
    assert curve.as_dict()["failed_here_only"] == missed
    for each in curve.shrunk:
        found = [abs(fault.theta["shift"]) / RANGE for fault in run.faults if fault.seed_id == each.seed_id]
        assert each.strength_before == pytest.approx(min(found, default=1.0))
    assert curve.passes >= sum(each.passes for each in curve.shrunk)
    reader = Reader(tmp_path / "run")
    again = robustness(read_run(Replayer(reader, Target(Mean()), data, SHIFT)))
    reader.close()
    assert again.shrunk == curve.shrunk
    assert again.passes == curve.passes


def test_the_sentences_summarise_the_curve_and_its_caveat():
    curve = curve_of([0.1] * 30 + [0.4] * 40, 30, full_strength="sigma 0.1")
    said = curve.sentences()
    assert said[0] == "70 of 100 seeds broke."
    assert said[1] == "Half of the seeds have broken at strength 0.4 (95% interval 0.4 to 0.4)."
    assert said[2] == CAVEAT
    assert "upper bound" in CAVEAT
    assert curve.as_dict()["median"] == 0.4


def test_random_disturbances_and_the_search_are_two_columns_with_names_of_their_own():
    random = (StrengthPart(0.8, 1.0, 500, Estimate(0.932, 0.91, 0.95)),)
    curve = curve_of([0.3] * 39, 61, full_strength="sigma 0.1", random=random)
    lines = curve.lines()
    assert lines[0].split("  ")[0] == "strength (1 is sigma 0.1)"
    assert "  correct under a random disturbance  seeds that the search could not break up to it" in lines[0]
    assert lines[1].split() == ["0", "to", "0.2", "unknown", "100.0%", "(96.4%", "to", "100.0%)"]
    assert lines[5].startswith("0.8 to 1                   93.2% (91.0% to 95.0%)              61.0% (50.7% to 70.6%)")
    assert curve.as_dict()["random"] == [
        {"low": 0.8, "high": 1.0, "tests": 500, "correct": {"value": 0.932, "low": 0.91, "high": 0.95}}
    ]
    picture = io.BytesIO()
    save_figure(robustness_figure(curve), picture, dpi=130)
    assert picture.getvalue().startswith(b"\x89PNG")


def test_random_disturbances_of_a_model_with_known_strengths_have_its_accuracy(tmp_path):
    """Brute force: at strength s, half of the shifts are s * RANGE, and break the seeds whose gap is smaller."""
    data = seeds()
    gap = (0.5 - data[0][:, 0, 0, 0].double().numpy()) / RANGE
    options = {"max_tests": 3000, "uniform_share": 0.5, "coverage": None, "tolerance": 1e-9, "out": tmp_path / "run"}
    run = themis.run(Target(Mean()), data, SHIFT, **options)
    assert [(part.low, part.high) for part in run.correct_by_strength] == [(k / 5, (k + 1) / 5) for k in range(5)]
    assert sum(part.tests for part in run.correct_by_strength) == 1500
    for part in run.correct_by_strength:
        strength = np.linspace(part.low, part.high, 2001)
        truth = 1 - 0.5 * np.mean(gap[:, None] <= strength)
        assert part.correct.low <= truth <= part.correct.high
        assert part.correct.value == pytest.approx(truth, abs=0.06)
        assert part.correct.high - part.correct.low < 0.15
    last, curve = run.correct_by_strength[-1], robustness(run)
    assert last.correct.value > curve.at(1.0).value + 0.2  # random disturbances break fewer than a search
    assert curve.random == run.correct_by_strength == themis.open_run(tmp_path / "run").correct_by_strength
    stored = json.loads((tmp_path / "run/summary.json").read_text())["correct_by_strength"]
    assert stored == [asdict(part) for part in run.correct_by_strength]


def test_without_uniform_tests_or_with_dropped_ones_nothing_is_said_by_strength():
    options = {"max_tests": 200, "coverage": None, "tolerance": 1e-9}
    assert themis.run(Target(Mean()), seeds(40), SHIFT, uniform_share=0.0, **options).correct_by_strength == ()
    pictures, labels = seeds(40)
    textured = pictures[..., :1, :1] + 0.02 * torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    run = themis.run(Target(Mean()), (textured, labels), "gaussian", min_ssim=0.9, **options)
    assert run.rounds[-1].dropped > 0
    assert run.correct_by_strength == ()


def test_the_intervals_of_campaigns_contain_the_accuracy_of_all_seeds_in_many_draws():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    inputs = torch.rand(60, 1, 4, 4)
    with torch.no_grad():
        clean, correct = net(inputs).argmax(1), []
        for _ in range(4000):
            sigma = 0.5 * torch.rand(60, 1, 1, 1)
            noisy = (inputs + sigma * torch.randn_like(inputs)).clamp(0, 1)
            correct.append(torch.stack([sigma.flatten() / 0.5, (net(noisy).argmax(1) == clean).float()]))
    strength, is_correct = torch.stack(correct).permute(1, 2, 0).numpy()  # [seeds, draws]
    held = []
    for random_seed in range(20):
        options = {"max_tests": 400, "uniform_share": 0.5, "coverage": None, "random_seed": random_seed}
        run = themis.run(net, inputs, "gaussian(sigma=0:0.5)", **options)
        for part in run.correct_by_strength:
            truth = is_correct[(strength >= part.low) & (strength < part.high)].mean()
            held.append(part.correct.low <= truth <= part.correct.high)
    assert len(held) == 100
    assert np.mean(held) >= 0.95


def test_a_perturbation_of_several_dimensions_has_one_scale():
    run = themis.run(Target(Mean()), seeds(40), "brightness + contrast", max_tests=200, coverage=None, tolerance=1e-9)
    curve = robustness(run)
    assert curve.full_strength == ""
    assert curve.n_failed > 10
    for each in curve.shrunk:
        shares = [abs(each.after["shift"]) / 0.25, abs(each.after["change"]) / 0.6]
        assert each.strength == pytest.approx(max(shares), rel=1e-5)
        assert 0 < each.strength <= each.strength_before <= 1


def test_faults_that_were_shrunk_before_are_used():
    run = themis.run(Target(Mean()), seeds(40), SHIFT, max_tests=200, coverage=None, tolerance=1e-9)
    curve = robustness(run)
    weaker, stronger = curve.shrunk[:2]
    known = (replace(weaker, weakest=0.001), replace(stronger, weakest=1.0))
    again = robustness(run, known)
    assert (again.n_seeds, again.n_failed) == (curve.n_seeds, curve.n_failed)
    assert again.at(0.001).value == pytest.approx(39 / 40)
    assert again.shrunk == (known[0], *curve.shrunk[1:])


def test_wrong_uses_are_refused():
    with pytest.raises(UsageError, match=r"strength must lie in 0..1, the range that was tested, got 1.5"):
        curve_of([0.5], 1).at(1.5)
