"""Signals and time series: noise, level, filters, timing, gaps and drift.

Signals are `[tests, channels, samples]` in their own unit. Times are shares of the signal's length, and frequencies are
shares of half the sampling rate, so that no perturbation has to know the rate. Levels are relative to each channel,
whose mean counts as silence and whose standard deviation is its level.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from themis.compute.rng import Rng
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta, collector, columns
from themis.perturb.picture import eased

CLEAN_SNR, FADE_DECIBELS = 60.0, 10.0
"""Signal-to-noise ratio at which there is no noise at all, and the range below it in which noise fades, in decibels."""
FLANK_WIDTH = 0.2
"""Width of a filter's flank as a share of its cutoff, and of a gap's flank as a share of half its width."""
MAX_GAPS = 8
MIN_WIDTH = 1e-9
MIN_POWER = 1e-20
"""Power that replaces zero under a root, so that the derivative stays finite."""
BLOCK_SAMPLES = 1024
"""Samples per partial sum; summing in two steps makes the rounding independent of the batch."""
Response = Callable[[Tensor], Tensor]
"""Maps frequencies to the share of each that passes."""


HALF_RATE = "share of half the sampling rate"
SIGNAL: list[Perturbation] = []
_signal = collector(SIGNAL, is_random=False, inputs="signal", family="signal")


@_signal(Theta("snr", 5.0, CLEAN_SNR, CLEAN_SNR, unit="dB, signal to noise", limits=(-40, CLEAN_SNR)), is_random=True)
def signal_noise(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """White noise at a signal-to-noise ratio, which is the same in every channel."""
    (snr,) = columns(theta, signals)
    amplitude = _from_decibels(-snr) * eased((CLEAN_SNR - snr) / FADE_DECIBELS)
    return torch.addcmul(signals, rng.normal(*signals.shape[1:]) * _level(signals), amplitude)


@_signal(Theta("decibels", -12.0, 12.0, unit="dB", limits=(-60, 60)))
def gain(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The signal made louder or quieter; what exceeds the bounds is clipped."""
    (decibels,) = columns(theta, signals)
    return torch.addcmul(signals, signals - _mean(signals), _from_decibels(decibels) - 1)


@_signal(Theta("level", 0.3, 1.0, 1.0, unit="share of the peak", limits=(0.01, 1)))
def clipping(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Peaks cut off, as by an amplifier that is driven too hard."""
    (level,) = columns(theta, signals)
    mean = _mean(signals)
    deviation = signals - mean
    most = level * deviation.abs().amax(2, keepdim=True)
    return signals - (deviation - torch.minimum(torch.maximum(deviation, -most), most))


@_signal(Theta("cutoff", 0.15, 1.0, 1.0, unit=HALF_RATE, limits=(0.001, 1)))
def low_pass(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Frequencies above a cutoff removed: a dull sound, or a slow sensor."""
    (cutoff,) = columns(theta, signals)
    return _filtered(signals, lambda frequency: 1 - eased((frequency / cutoff - 1) / FLANK_WIDTH))


@_signal(Theta("cutoff", 0.0, 0.1, unit=HALF_RATE, limits=(0, 1)))
def high_pass(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Frequencies below a cutoff removed: a thin sound, or a sensor that loses slow changes but not its mean."""
    (cutoff,) = columns(theta, signals)
    return _filtered(signals, lambda frequency: eased((frequency / (cutoff + MIN_WIDTH) - 1) / FLANK_WIDTH + 1))


@_signal(
    Theta("centre", 0.0, 0.5, unit=HALF_RATE, limits=(0, 1)),
    Theta("width", 0.0, 0.1, unit=HALF_RATE, limits=(0, 2)),
)
def band_stop(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A band of frequencies removed."""
    centre, width = columns(theta, signals)

    def response(frequency: Tensor) -> Tensor:
        half = width / 2
        return 1 - eased((half - (frequency - centre).abs()) / (FLANK_WIDTH * half + MIN_WIDTH))

    return _filtered(signals, response)


@_signal(Theta("shift", -0.1, 0.1, unit="share of the length, later", limits=(-1, 1)))
def time_shift(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The signal moved in time; the end that it leaves empty is filled with the mirrored signal."""
    (shift,) = columns(theta, signals)
    return _sampled(signals, _times(signals) - shift)


@_signal(Theta("factor", 0.8, 1.25, 1.0, unit="times as long", limits=(0.1, 10)))
def time_stretch(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """The signal played slower or faster about its middle, which lowers or raises its pitch."""
    (factor,) = columns(theta, signals)
    return _sampled(signals, _times(signals) / factor)


@_signal(
    Theta("share", 0.0, 0.2, unit="share of the length", limits=(0, 1)),
    Theta("gaps", 1.0, MAX_GAPS, 1.0, unit="gaps that share it", limits=(1, MAX_GAPS)),
    is_random=True,
)
def dropouts(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """Gaps at random times, in which all channels fall silent, as when packets are lost or a contact is loose."""
    share, gaps = columns(theta, signals)
    places = rng.uniform(MAX_GAPS, 1, 1).to(signals.dtype) - 0.5
    kept = torch.ones((), dtype=signals.dtype, device=signals.device)
    for k in range(MAX_GAPS):
        half = share / gaps * (gaps - k).clamp(0, 1) / 2
        kept = kept * (1 - eased((half - (_times(signals) - places[:, k]).abs()) / (FLANK_WIDTH * half + MIN_WIDTH)))
    return signals - (signals - _mean(signals)) * (1 - kept)


@_signal(
    Theta("amount", 0.0, 1.0, unit="standard deviations of the signal", limits=(0, 100)),
    Theta("waves", 0.3, 2.0, 0.3, unit="waves over the length", limits=(0, 1000)),
    is_random=True,
)
def drift(signals: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A slow wave added to the signal, as when the baseline of an electrocardiogram wanders."""
    amount, waves = columns(theta, signals)
    phase = rng.uniform(signals.shape[1], 1).to(signals.dtype)
    wave = torch.sin((_times(signals) * waves + phase) * (2 * math.pi))
    return torch.addcmul(signals, wave * _level(signals), amount)


def _mean(signals: Tensor) -> Tensor:
    """The mean of each channel, `[tests, channels, 1]`, with rounding that does not depend on the batch."""
    n, channels, samples = signals.shape
    blocks = F.pad(signals, (0, -samples % BLOCK_SAMPLES)).view(n, channels, -1, BLOCK_SAMPLES)
    return blocks.sum(3).sum(2).div(samples)[..., None]


def _level(signals: Tensor) -> Tensor:
    """The standard deviation of each channel, `[tests, channels, 1]`."""
    return _mean((signals - _mean(signals)).square()).clamp_min(MIN_POWER).sqrt()


def _from_decibels(decibels: Tensor) -> Tensor:
    """Convert decibels to a factor of amplitudes."""
    return torch.exp(decibels * (math.log(10) / 20))


def _times(signals: Tensor) -> Tensor:
    """The times of the samples relative to the middle, in shares of the length, `[1, 1, samples]`."""
    samples = signals.shape[2]
    times = torch.arange(samples, dtype=signals.dtype, device=signals.device)
    return ((times - (samples - 1) / 2) / samples).view(1, 1, -1)


def _sampled(signals: Tensor, times: Tensor) -> Tensor:
    """Sample the signals at other times `[tests, 1, samples]`; beyond its ends, a signal is mirrored.

    Values are interpolated by a cubic through the four samples around a time (Catmull-Rom).
    """
    samples = signals.shape[2]
    place = times * samples + (samples - 1) / 2
    whole = place.detach().floor()
    part = (place - whole).to(signals.dtype)

    def sample(step: int) -> Tensor:
        index = (whole.long() + step) % (2 * samples)
        return signals.gather(2, torch.minimum(index, 2 * samples - 1 - index).expand(signals.shape))

    before, left, right, after = (sample(step) for step in (-1, 0, 1, 2))
    slope, curve = right - before, 2 * before - 5 * left + 4 * right - after
    cubic = 3 * (left - right) + after - before
    return left + part * (slope + part * (curve + part * cubic)) / 2


def _filtered(signals: Tensor, response: Response) -> Tensor:
    """Multiply each frequency of the signals by its response, `[tests, 1, frequencies]`; the mean is kept.

    The signal is extended by its mirror image, so that it is continuous when repeated. The part to remove is computed
    and subtracted, so that a filter that passes everything changes nothing.
    """
    samples = signals.shape[2]
    both = torch.cat([signals, signals.flip(2)], 2)
    is_single = both.shape[0] * both.shape[1] == 1
    spectrum = torch.fft.rfft(both.expand(2, -1, -1) if is_single else both)  # a single signal rounds differently
    frequency = torch.arange(samples + 1, dtype=signals.dtype, device=signals.device).view(1, 1, -1) / samples
    lost = 1 - response(frequency).to(signals.dtype)
    removed: Tensor = torch.fft.irfft(spectrum * torch.where(frequency > 0, lost, 0.0), n=2 * samples)
    return signals - removed[: len(signals), :, :samples]
