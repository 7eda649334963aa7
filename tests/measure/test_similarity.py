"""Tests that are too dissimilar from their seed are dropped and counted."""

import math
import warnings
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.signal import convolve2d
from torch import nn

import themis
from themis import Target, UsageError
from themis.measure.distance import change_of_contrast, ssim, vif
from themis.perturb import PERTURBATIONS
from themis.report.page import read_view
from themis.runs.display.text import opening, summary_lines
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader

INPUTS = torch.rand(40, 1, 16, 16, generator=torch.Generator().manual_seed(0))
LEAST = 0.9


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    return Target(nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 10)))


def run(target, **options):
    base = {"magnitude": 0.5, "max_tests": 2000, "min_ssim": LEAST, "plateau": None, "tolerance": 1e-9}
    return themis.run(target, INPUTS, "gaussian", **{**base, **options})


@pytest.mark.parametrize("policy", ["random", "corners", "paper", "scheduled"])
def test_only_similar_tests_are_faults_and_the_others_are_counted(target, policy):
    found = run(target, policy=policy)
    last = found.rounds[-1]
    assert 0 < last.dropped <= last.tests == 2000
    assert found.summary()["dropped_tests"] == last.dropped
    assert all(fault.ssim >= LEAST for fault in found.faults)
    for fault in found.faults[:20]:
        replay = fault.replay()
        assert replay.is_same
        assert float(ssim(replay.clean_inputs[None], replay.inputs[None], (0, 1))[0]) == pytest.approx(fault.ssim)


def test_the_search_learns_how_far_it_may_go(target):
    corners, scheduled = (run(target, policy=policy, max_tests=5000) for policy in ("corners", "scheduled"))
    assert scheduled.rounds[-1].dropped < corners.rounds[-1].dropped / 2
    assert len(scheduled.faults) > 2 * len(corners.faults)


def test_the_search_learns_how_far_it_may_go_without_noise_too(target):
    coarse = torch.rand(40, 1, 3, 3, generator=torch.Generator().manual_seed(1))
    smooth = nn.functional.interpolate(coarse, (16, 16), mode="bilinear")
    options = {"max_tests": 6000, "plateau": None, "tolerance": 1e-9, "round_size": 300}
    rounds = themis.run(target, smooth, "shift", min_ssim=0.95, **options).rounds
    early, late = rounds[4].dropped, rounds[-1].dropped - rounds[-6].dropped
    assert late < 0.9 * early, "in five rounds; small first portions learn within the first of them"


def test_dropped_tests_do_not_count_for_the_model(target):
    found = run(target, policy="random", uniform_share=1.0)
    everything = run(target, policy="random", uniform_share=1.0, min_ssim=None)
    kept = [fault for fault in everything.faults if fault.ssim >= LEAST]
    assert [fault.id for fault in kept] == [fault.id for fault in found.faults]
    assert found.judged.tests == 2000 - found.rounds[-1].dropped
    assert found.fault_rate.value > len(kept) / 2000, "a share of the tests that were run"


def test_a_campaign_without_similar_tests_has_no_faults_and_no_error(target):
    found = run(target, policy="corners", magnitude=10.0, uniform_share=0.0, max_tests=600)
    assert found.rounds[-1].dropped == 600
    assert len(found.faults) == 0


def test_a_run_that_drops_is_the_same_after_a_resume(target, tmp_path):
    whole = run(target, round_size=500)
    run(target, max_tests=1000, out=tmp_path / "run", round_size=500)
    resumed = themis.resume(tmp_path / "run", target, INPUTS, max_tests=2000)
    assert resumed.rounds[-1].dropped == whole.rounds[-1].dropped
    assert [fault.id for fault in resumed.faults] == [fault.id for fault in whole.faults]
    assert [fault.linf for fault in resumed.faults] == [fault.linf for fault in whole.faults]


def test_gradients_in_theta_go_to_the_tests_they_belong_to(target):
    with_drops, without = (run(target, policy="paper", min_ssim=least, max_tests=600) for least in (0.01, None))
    assert with_drops.rounds[-1].dropped < 600
    assert with_drops.rounds[-1].tests == without.rounds[-1].tests


@pytest.mark.parametrize("shape", [(12,), (1, 6, 16)])
def test_inputs_without_an_ssim_are_rejected(shape):
    net = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    with pytest.raises(UsageError, match="min_ssim needs pictures"):
        themis.run(net, torch.rand(5, *shape), "gaussian", min_ssim=0.5, max_tests=10)


def test_pictures_that_are_too_small_for_vif_are_rejected(target):
    with pytest.raises(UsageError, match=r"min_vif needs .* of at least 41 pixels per side, got inputs \[1, 16, 16\]"):
        run(target, min_vif=0.5)


@pytest.mark.parametrize("name", ["min_ssim", "min_vif"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, -1])
def test_an_impossible_similarity_is_rejected(target, name, value):
    with pytest.raises(UsageError, match=rf"{name} must lie in \(0, 1\)"):
        run(target, **{name: value})


def reference_vif(clean, disturbed):
    """VIF of two grey pictures in 0..255, after the definition; each window is a sum over its pixels."""
    left = total = 0.0
    for scale in range(4):
        side = 2 ** (4 - scale) + 1
        line = np.exp(-0.5 * ((np.arange(side) - side // 2) / (side / 5)) ** 2)
        window = np.outer(line, line) / line.sum() ** 2
        if scale:
            clean, disturbed = (convolve2d(x, window, "valid")[::2, ::2] for x in (clean, disturbed))
        mean_a, mean_b = (convolve2d(x, window, "valid") for x in (clean, disturbed))
        var_a, var_b, both = (
            convolve2d(x * y, window, "valid") - mean_x * mean_y
            for x, y, mean_x, mean_y in (
                (clean, clean, mean_a, mean_a),
                (disturbed, disturbed, mean_b, mean_b),
                (clean, disturbed, mean_a, mean_b),
            )
        )
        gain = np.maximum(both / var_a, 0)
        left += np.log2(1 + gain**2 * var_a / (var_b - gain * both + 2)).sum()
        total += np.log2(1 + var_a / 2).sum()
    return left / total


def textured(n=3):
    """Pictures with colours and structure of several sizes."""
    random = torch.Generator().manual_seed(0)
    sizes = (torch.rand(n, 3, side, side, generator=random) for side in (3, 12, 48))
    return sum(nn.functional.interpolate(each, (48, 48), mode="bilinear") for each in sizes) / 3


def test_vif_is_that_of_the_definition_on_the_mean_over_the_channels():
    clean = textured()
    disturbed = 0.6 * clean + 0.1 * torch.rand(clean.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(clean.double().mean(1).numpy() * 255, disturbed.double().mean(1).numpy() * 255, strict=True)
    expected = [reference_vif(*pair) for pair in pairs]
    assert vif(clean, disturbed, (0, 1)).tolist() == pytest.approx(expected, rel=1e-3)
    assert vif(clean * 255, disturbed * 255, (0, 255)).tolist() == pytest.approx(expected, rel=1e-3)
    clips, changed = clean.tile(1, 2, 1, 1).view(3, 2, 3, 48, 48), disturbed.tile(1, 2, 1, 1).view(3, 2, 3, 48, 48)
    assert vif(clips, changed, (0, 1)).tolist() == pytest.approx(expected, rel=1e-3)


def test_what_is_the_same_has_a_vif_of_1():
    clean = torch.cat([textured(), torch.zeros(1, 3, 48, 48)])
    assert vif(clean, clean, (0, 1)).tolist() == pytest.approx([1] * 4, rel=1e-3)


def test_tests_that_tell_less_of_their_seed_are_dropped_replayed_and_compared(tmp_path):
    torch.manual_seed(0)
    net, pictures = nn.Sequential(nn.Flatten(), nn.Linear(3 * 48 * 48, 32), nn.ReLU(), nn.Linear(32, 10)), textured(20)
    options = {"magnitude": 1.0, "max_tests": 400, "min_vif": 0.1, "out": tmp_path / "run"}
    found = themis.run(net, pictures, "gaussian", **options)
    assert 0 < found.rounds[-1].dropped < 400
    assert any("too dissimilar from the seed: VIF below 0.1" in " ".join(line.split()) for line in summary_lines(found))
    replays = [fault.replay() for fault in found.faults]
    assert replays
    assert all(replay.is_same for replay in replays)
    assert all(float(vif(each.clean_inputs[None], each.inputs[None], (0, 1))) >= 0.1 for each in replays)
    other = nn.Sequential(nn.Flatten(), nn.Linear(3 * 48 * 48, 10))
    paired = themis.diff(found, themis.run(other, pictures, "gaussian", magnitude=1.0, max_tests=20), tests=100).paired
    assert 0 < paired.dropped < 100


def test_a_fault_records_its_distance_from_the_seed(target):
    found = run(target, min_ssim=None, max_tests=300)
    fault = found.faults[0]
    replay = fault.replay()
    change = (replay.inputs - replay.clean_inputs).abs()
    assert fault.linf == pytest.approx(float(change.max()))
    assert fault.distance == pytest.approx(float(change.square().sum().sqrt()), rel=1e-5)


SLIGHT = "pixelate(block=0:0.05)"  # on pictures of 8 pixels


@pytest.fixture(scope="module")
def small():
    from sklearn.datasets import load_digits

    return torch.from_numpy(load_digits().images[:60, None]).float() / 16


def run_on(small, perturbation, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    return themis.run(net, small, perturbation, max_tests=100, **options)


def test_a_disturbance_that_hardly_changes_the_inputs_is_warned_of(small, tmp_path):
    rule = r"at its strongest, by 1\.\d% of their contrast .*, less than 2%: raise the magnitude, or widen the range"
    with pytest.warns(RuntimeWarning, match=rule):
        run = run_on(small, SLIGHT, out=tmp_path / "run")
    assert run.start.slight.startswith(f"{SLIGHT} hardly changes the inputs: at its strongest, by 1.")
    with closing(Reader(tmp_path / "run")) as stored:
        assert read_view(stored).slight == run.start.slight


def test_attacks_and_default_ranges_are_not_warned_of(small):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for perturbation in ("pixelate", "gaussian_blur", "gaussian", "fgsm(radius=0:0.001)"):
            assert run_on(small, perturbation).start.slight is None
    assert not [warning for warning in caught if "hardly" in str(warning.message)]


def test_the_change_is_relative_to_the_contrast_of_all_inputs_or_of_each_feature():
    pictures = torch.tensor([0.0, 1.0]).repeat(8).view(1, 1, 4, 4)
    assert change_of_contrast(pictures, pictures + 0.1) == pytest.approx(0.2)
    table = torch.tensor([[0.0, 0.0, 5.0], [1.0, 1000.0, 5.0]])
    assert change_of_contrast(table, table + torch.tensor([0.1, 100.0, 1.0])) == pytest.approx(0.2)
    assert change_of_contrast(torch.ones(2, 1, 4, 4), torch.ones(2, 1, 4, 4)) == math.inf


def test_the_opening_names_the_range_in_pixels(small):
    assert "pixelate with block 0 to 0.25 (share of the shorter side: 0 to 2 px);" in opening(
        run_on(small, "pixelate").start
    )
    many = opening(run_on(small, "fog").start)
    assert "scale 0.2 to 1 (1.6 to 8 px);" in many


def test_runs_whose_default_range_was_another_are_replayed_and_resumed(small, tmp_path):
    block = PERTURBATIONS["pixelate"].theta[0].between(0.0, 0.2)
    before = replace(PERTURBATIONS["pixelate"], theta=(block,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    themis.run(net, small, before, max_tests=200, tolerance=1e-9, plateau=None, out=tmp_path / "run")
    with closing(Reader(tmp_path / "run")) as stored:
        faults = Replayer(stored, Target(net), small)
        assert faults.perturbation.theta[0].high == 0.2
    run = themis.resume(tmp_path / "run", net, small, max_tests=400)
    assert (run.rounds[-1].tests, run.start.theta[0].high) == (400, 0.2)
