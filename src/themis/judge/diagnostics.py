"""ESS, R-hat and MCSE of Markov chains as ArviZ defines them (`array_stats` of arviz-stats), for all neurons at once.

Draws are `[neurons, chains, draws]`, float32 or float64; results are float64 `[neurons]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log10

import torch
from torch import Tensor

from themis.judge.coverage import Posterior, exact
from themis.measure.moments import Moments

CHUNK_DRAWS = 2**18
"""Draws processed at a time; this few stay in the processor's cache, which halves the time."""

MIN_RANGE = 1e-15
"""Draws with a smaller range count as constant (an absolute value, as in ArviZ)."""

SIGN_TOLERANCE = 1e-5
"""Sums of autocorrelations nearer to zero than this have an uncertain sign in float32 (error about 3e-7)."""


def summarise(draws: Tensor) -> Posterior:
    """Mean, sd, ESS, MCSE and R-hat of draws."""
    n_neurons, n_chains, n_draws = draws.shape
    out = torch.empty(4, n_neurons, dtype=torch.float64)
    size = max(1, CHUNK_DRAWS // (n_chains * n_draws))
    for start in range(0, n_neurons, size):
        chunk = draws[start : start + size]
        unit, scale = _to_unit(chunk)
        of_unit = unit.mean((1, 2), keepdim=True)
        sd = ((unit - of_unit).square_().sum((1, 2)).double() / (n_chains * n_draws - 1)).sqrt() * scale
        mean = chunk[:, 0, 0].double() + of_unit[:, 0, 0].double() * scale
        out[:, start : start + size] = torch.stack((mean, sd, _ess(chunk, unit, scale), rhat(chunk)))
    mean, sd, n_effective, r = out
    return Posterior(mean=mean, sd=sd, ess=n_effective, mcse=sd / n_effective.sqrt(), rhat=r)


def ess(draws: Tensor) -> Tensor:
    """Effective sample size for the mean: split chains, Geyer's initial monotone sequence."""
    return _ess(draws, *_to_unit(draws))


def rhat(draws: Tensor) -> Tensor:
    """Rank-normalised split R-hat: the larger of the values for the draws and for their distances from the median."""
    split = _split(draws)
    n_neurons, n_chains, _ = split.shape
    if n_chains < 4:
        return torch.full((n_neurons,), torch.nan, dtype=torch.float64)
    flat = split.reshape(n_neurons, -1)
    n_all = flat.shape[1]
    # Normal quantiles (Blom) at ranks 1, 1.5, 2, ..., n; ties have half ranks.
    rank = 1 + torch.arange(2 * n_all - 1, dtype=torch.float64) / 2
    scores = torch.special.ndtri((rank - 0.375) / (n_all + 0.25)).to(flat)

    order, ascending, is_tied = _order(flat)
    bulk = _rhat(_score(scores, order, is_tied).view_as(split))

    median = ascending[:, n_all // 2 - 1 : n_all // 2 + 1].mean(1, keepdim=True)
    order, _, is_tied = _order((flat - median).abs())
    tail = _rhat(_score(scores, order, is_tied).view_as(split))

    is_number = ~(ascending[:, 0].isnan() | ascending[:, -1].isnan())
    return torch.where(is_number, torch.where(tail > bulk, tail, bulk), torch.nan)


def _to_unit(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Draws shifted by the first and divided by their range, and the range; float32 is then precise enough."""
    scale = draws.amax((1, 2)).double() - draws.amin((1, 2)).double()
    return (draws - draws[:, :1, :1]) / torch.where(scale > 0, scale, 1).to(draws)[:, None, None], scale


def _ess(draws: Tensor, unit: Tensor, scale: Tensor) -> Tensor:
    """The ESS of draws, given also as `unit` and `scale` from `_to_unit`."""
    unit = _split(unit)
    n_chains, n_draws = unit.shape[1:]
    n_all = n_chains * n_draws
    chain_mean = unit.mean(2, keepdim=True)
    covariance = _mean_autocovariance(unit - chain_mean)
    tau, pairs, end = _integrate(covariance, chain_mean[..., 0].double().var(1), n_draws)
    result = n_all / tau.clamp(min=1 / log10(n_all))
    is_constant = (unit.amax((1, 2)) - unit.amin((1, 2))) * scale < MIN_RANGE
    result = torch.where(scale.isfinite(), torch.where(is_constant, n_all, result), torch.nan)

    if draws.dtype == torch.float32:
        position = torch.arange(pairs.shape[1])
        is_doubtful = ((pairs.abs() < SIGN_TOLERANCE) & (position <= end)).any(1) & ~is_constant
        doubtful = is_doubtful.nonzero()[:, 0]
        if len(doubtful):
            result[doubtful] = ess(draws[doubtful].double())
    return result


def _integrate(covariance: Tensor, variance: Tensor, n_draws: int) -> tuple[Tensor, Tensor, Tensor]:
    """The integrated autocorrelation time of chains with `n_draws` draws by Geyer's initial monotone sequence.

    covariance: autocovariances `[neurons, lags]`, averaged over chains. variance: the variance of the chains' means.
    Also returns the sums of pairs of autocorrelations, and the index of the pair `[neurons, 1]` at which the sequence
    ends: the first pair that is not positive, or the last one.
    """
    within = covariance[:, :1] * (n_draws / (n_draws - 1))
    rho = 1 - (within - covariance) / (covariance[:, :1] + variance[:, None])
    rho[:, 0] = 1
    last = min(max(0, (n_draws - 3) // 2), covariance.shape[1] // 2 - 1)
    pairs = rho[:, : 2 * last + 2].reshape(-1, last + 1, 2).sum(2)
    end = (pairs > 0).cumprod(1).sum(1, keepdim=True).clamp(max=last)
    position = torch.arange(last + 1)
    monotone = pairs.cummin(1).values.masked_fill(position >= end, 0).sum(1)
    after = rho.gather(1, 2 * end)[:, 0]
    is_kept = (after > 0) | (pairs.gather(1, end)[:, 0] >= 0)
    return 2 * monotone - 1 + torch.where(is_kept, after, 0), pairs, end


def _split(draws: Tensor) -> Tensor:
    """The halves of each chain as separate chains, `[neurons, 2 chains, draws // 2]`, without a middle draw."""
    half = draws.shape[2] // 2
    if draws.shape[2] % 2:
        draws = torch.cat((draws[..., :half], draws[..., -half:]), 2)
    return draws.reshape(len(draws), -1, half)


def _mean_autocovariance(centred: Tensor) -> Tensor:
    """Autocovariance at every lag, averaged over chains, float64 `[neurons, draws]`."""
    from scipy.fft import next_fast_len  # takes a while to import

    n_chains, n_draws = centred.shape[1:]
    length = next_fast_len(2 * n_draws, real=True)
    spectrum = torch.fft.rfft(centred, n=length)
    # The average over chains commutes with the inverse transform, so one transform is enough.
    power = (spectrum * spectrum.conj()).real.sum(1)
    covariance: Tensor = torch.fft.irfft(power, n=length)[:, :n_draws].double()
    return covariance / (n_chains * n_draws)


def _order(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order that sorts values, the sorted values, and which of them equal the next one."""
    order = values.numpy().argsort(1)  # NumPy's sort is vectorised
    ascending = values.gather(1, torch.from_numpy(order))
    return torch.from_numpy(order), ascending, ascending[:, 1:] == ascending[:, :-1]


def _score(scores: Tensor, label: Tensor, is_tied: Tensor) -> Tensor:
    """The normal scores of the draws, in their original order; ties share the score of their mean rank."""
    n_neurons, n_all = label.shape
    scored = torch.empty_like(label, dtype=scores.dtype).scatter_(1, label, scores[::2].expand(n_neurons, -1))
    neuron, link = is_tied.nonzero(as_tuple=True)
    if len(link):
        # Neighbouring links belong to one run of equal values, along which place minus number is constant.
        place = neuron * n_all + link
        number = torch.arange(len(place))
        _, length = torch.unique_consecutive(place - number, return_counts=True)
        start = place[length.cumsum(0) - length]
        score = scores[2 * (start % n_all) + length]
        size = length + 1
        offset = torch.arange(int(size.sum())) - (size.cumsum(0) - size).repeat_interleave(size)
        tied = start.repeat_interleave(size) + offset
        scored[tied // n_all, label.view(-1)[tied]] = score.repeat_interleave(size)
    return scored


def _rhat(split: Tensor) -> Tensor:
    """R-hat of chains `[neurons, chains, draws]`, without splitting them."""
    n_chains, n_draws = split.shape[1:]
    mean = split.mean(2, keepdim=True)
    within = (split - mean).square_().sum((1, 2)).double() / (n_chains * (n_draws - 1))
    between = n_draws * mean[..., 0].double().var(1)
    return ((between / within + n_draws - 1) / n_draws).sqrt()


N_CHAINS = 4


def judge_by_chains(moments: Moments, draws: int, sample: Callable[[Tensor, int], Posterior]) -> Posterior:
    """The posterior from `sample(count, draws per chain)`, which samples `z = sqrt(n) (mu - mean) / s` of some neurons.

    Neurons with up to three tests, which have no sd, and neurons without spread get the closed form.
    """
    closed = exact(moments, draws=draws)
    n = moments.count.double().expand_as(moments.mean)
    neurons = ((n > 3) & (moments.m2 > 0)).nonzero()[:, 0]
    if not len(neurons):
        return closed
    n, m2 = n[neurons], moments.m2[neurons]
    z = sample(n, draws // N_CHAINS)
    unit = (m2 / (n * (n - 1))).sqrt()
    return Posterior(
        mean=closed.mean.index_add(0, neurons, z.mean * unit),
        sd=closed.sd.index_copy(0, neurons, z.sd * unit),
        ess=closed.ess.index_copy(0, neurons, z.ess),
        mcse=closed.mcse.index_copy(0, neurons, z.mcse * unit),
        rhat=closed.rhat.index_copy(0, neurons, z.rhat),
    )


def join(parts: Sequence[Posterior]) -> Posterior:
    """Concatenate the posteriors of blocks of neurons."""
    return Posterior(*map(torch.cat, zip(*parts, strict=True)))
