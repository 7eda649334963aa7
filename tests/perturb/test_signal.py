"""Signals: the disturbance has the size that theta says, and inputs of other shapes are refused."""

import math

import pytest
import torch

from themis import Target, UsageError, run
from themis.perturb import PERTURBATIONS, disturb
from themis.perturb.perturbation import check_fits
from themis.runs.display.fault import CLEAN_COLOUR, DISTURBED_COLOUR, curves, is_signal, pictures
from themis_lab.cli.demo import draw_faults

WIDE = (-100.0, 100.0)
SAMPLES = 1000
TIMES = torch.arange(SAMPLES) / SAMPLES


def wave(rate, offset=0.0):
    """A sine with a whole number of waves over the length, `[1, 1, samples]`."""
    return (offset + (2 * torch.pi * rate * TIMES).sin())[None, None]


def apply(name, signals, **theta):
    return disturb(
        f"{name}({', '.join(f'{key}={low}:{high}' for key, (low, high, _) in theta.items())})",
        signals,
        {key: value for key, (_, _, value) in theta.items()},
        bounds=WIDE,
    )


def amplitude(signals, rate):
    """The amplitude of one frequency."""
    return 2 * float(torch.fft.rfft(signals)[..., rate].abs()) / SAMPLES


@pytest.mark.parametrize("snr", [-10.0, 0.0, 20.0, 45.0])
def test_noise_has_the_requested_ratio_in_every_channel(snr):
    signals = torch.cat([wave(5), 0.01 * wave(9, offset=300)], 1)
    noise = apply("signal_noise", signals, snr=(-40, 60, snr)) - signals
    ratio = 10 * torch.log10(signals.var(2) / noise.var(2))
    torch.testing.assert_close(ratio, torch.full((1, 2), snr), atol=0.7, rtol=0)


def test_gain_is_in_decibels_about_the_mean():
    louder = apply("gain", wave(5, offset=2), decibels=(0, 20, 20.0))
    torch.testing.assert_close(louder, 2 + 10 * wave(5), atol=1e-3, rtol=0)


def test_clipping_cuts_at_a_share_of_the_peak():
    clipped = apply("clipping", wave(5), level=(0.1, 1, 0.5))
    torch.testing.assert_close(clipped, wave(5).clamp(-0.5, 0.5), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "theta", "kept", "lost"),
    [
        ("low_pass", {"cutoff": (0.1, 1, 0.2)}, 90, 150),
        ("high_pass", {"cutoff": (0, 1, 0.2)}, 110, 70),
        ("band_stop", {"centre": (0, 1, 0.2), "width": (0, 1, 0.1)}, 140, 105),
    ],
)
def test_filters_remove_the_frequencies_that_they_name_and_keep_the_mean(name, theta, kept, lost):
    filtered = apply(name, wave(kept, offset=3) + wave(lost), **theta)
    assert amplitude(filtered, kept) == pytest.approx(1, abs=0.02)
    assert amplitude(filtered, lost) < 0.02
    assert float(filtered.mean()) == pytest.approx(3, abs=1e-3)


def test_a_shift_moves_the_signal_by_a_share_of_its_length():
    shifted = apply("time_shift", wave(5), shift=(-0.5, 0.5, 0.05))
    torch.testing.assert_close(shifted[..., 100:], wave(5).roll(50, 2)[..., 100:], atol=1e-4, rtol=0)


def test_a_stretch_changes_the_period():
    middle = slice(300, 700)
    longer = apply("time_stretch", wave(10), factor=(0.5, 2, 2.0))
    times = (TIMES - 0.4995) / 2 + 0.4995
    torch.testing.assert_close(longer[0, 0, middle], (20 * math.pi * times).sin()[middle], atol=1e-3, rtol=0)


def test_gaps_silence_all_channels_together_for_a_share_of_the_time():
    signals = torch.cat([5 + torch.ones(1, 1, SAMPLES), 7 + wave(5)], 1)
    signals[0, 0, ::2] += 2
    gone = apply("dropouts", signals, share=(0, 1, 0.2), gaps=(1, 8, 1.0))
    is_silent = (gone[0, 0] - signals[0, 0].mean()).abs() < 0.5
    assert 0.05 < float(is_silent.float().mean()) < 0.21
    torch.testing.assert_close(gone[0, 1, is_silent].mean(), torch.tensor(7.0), atol=0.2, rtol=0)


def test_drift_is_slow_and_as_large_as_it_says():
    wandered = apply("drift", wave(50), amount=(0, 5, 2.0), waves=(0, 5, 3.0))
    change = wandered - wave(50)
    assert amplitude(change, 3) == pytest.approx(2 / math.sqrt(2), rel=0.01)
    assert amplitude(change, 50) < 1e-3


@pytest.mark.parametrize(
    ("name", "shape", "remedy"),
    [
        ("drift", (100,), r"needs signals \[channels, samples\], got inputs \[100\]: reshape them"),
        ("drift", (3, 8, 8), "choose another, see themis perturbations"),
        ("drift", (100, 2), "with the channels in another place: permute them"),
        ("edit", (1, 100), "or choose another, see themis perturbations"),
    ],
)
def test_inputs_of_another_shape_are_refused(name, shape, remedy):
    with pytest.raises(UsageError, match=remedy):
        check_fits(PERTURBATIONS[name], shape)


def test_faults_of_signals_are_drawn_as_curves(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv1d(2, 4, 9), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(4 * 42, 3))
    signals = torch.rand(20, 2, 50)
    result = run(Target(net), signals, "signal_noise(snr=0:60)", out=tmp_path / "run", max_tests=300)
    fault = result.faults.most_telling(1)[0]
    clean, disturbed, difference = pictures(fault.replay())
    assert clean.shape == disturbed.shape == difference.shape
    assert not (clean == disturbed).all()
    assert draw_faults(result, tmp_path / "faults.png", n=2)
    assert (tmp_path / "faults.png").stat().st_size > 5000


def test_a_curve_is_grey_where_the_signal_was_and_red_where_it_is():
    clean = torch.zeros(1, 100)
    drawn = curves(clean, clean + 1).reshape(-1, 3).tolist()
    assert drawn.count(list(CLEAN_COLOUR)) == drawn.count(list(DISTURBED_COLOUR)) == 300
    assert is_signal((2, 100))
    assert not is_signal((100,))
    assert curves(torch.full((9, 5), torch.nan), torch.rand(9, 5)).shape == (4 * 72, 300, 3)
