"""The interval of coverage, from a jackknife over blocks of seeds on a panel of neurons."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from themis.judge.coverage import Rule, exact
from themis.judge.estimate import Estimate
from themis.measure.moments import Moments

MIN_JACKKNIFE_TESTS = 30
"""With fewer tests, the interval is 0 to 1, because a jackknife would be meaningless."""

# Errors of a standard deviation are skewed: the effect of a few seeds is mostly missed and rarely overstated. The upper
# limit, which fails more often, therefore gets the smaller part of the 5%.
_UPPER_TAIL, _LOWER_TAIL, _MIN_TAIL = 0.01, 0.025, 1e-4


def coverage_interval(
    blocks: Moments, point: float, rule: Rule, is_judged: Tensor | None = None, n_neurons: int | None = None
) -> Estimate:
    """The interval of the coverage `point` of all judged neurons, from the panel's moments by block of seeds.

    It is for the coverage at this number of tests if every neuron's spread over all seeds and thetas were known.
    `is_judged` marks the panel's neurons that count; `n_neurons` is how many count in total (None: many more).

    All spreads are moved together, first to their upper limits, then to their lower limits, as if all errors had one
    cause, such as seeds that move the whole network. If errors are independent, some exceed their limit by chance, so
    the share within the limits is divided by the smallest share expected. A neuron that no test has moved may have a
    spread that is small enough.
    """
    panel = _pick(blocks, is_judged)
    n_tests, n_panel = int(panel.count.sum()), panel.mean.shape[1]
    if n_tests < MIN_JACKKNIFE_TESTS or n_panel == 0 or len(panel.count) < 3:
        return Estimate(point, 0.0, 1.0)
    total, without = _leave_one_out(panel)
    count = panel.count.double()
    freedom = max(1.0, float(count.sum().square() / count.square().sum()) - 1)  # fewer if blocks are uneven
    above, below = _tails(_UPPER_TAIL), _tails(_LOWER_TAIL)
    is_converged = rule.converged(exact(total, draws=rule.draws), total)
    least = _share(total, _upper(total, without, _quantiles(above, freedom)), rule)
    most = _share(total, _lower(total, without, _quantiles(below, freedom)), rule)
    most += ((total.mean == 0) & ~is_converged).double().mean()
    here = float(is_converged.double().mean())
    down = here - max(0.0, float((1 - (1 - least) / _within(above, n_panel)).max()))
    up = min(1.0, float((most / _within(below, n_panel)).min())) - here
    down, up = (_widen(max(0.0, moved), n_panel, n_neurons) for moved in (down, up))
    return Estimate(point, max(0.0, point - down), min(1.0, point + up))


def design_effect(blocks: Moments) -> float | None:
    """The variance of a mean sensitivity relative to that with independent tests, as the median over the panel.

    None if no neuron moved, or if there are too few seeds.
    """
    panel = _pick(blocks, None)
    if len(panel.count) < 3 or int(panel.count.sum()) < 4:
        return None
    total, without = _leave_one_out(panel)
    has_moved = total.m2 > 0
    if not has_moved.any():
        return None
    naive = total.variance / total.count
    return float((_jackknife_variance(without.mean) / naive)[has_moved].median())


def _pick(blocks: Moments, is_judged: Tensor | None) -> Moments:
    """The blocks with tests, restricted to judged neurons, on the CPU."""
    count, neurons = blocks.count.cpu(), slice(None) if is_judged is None else is_judged.cpu()
    is_used = count[:, 0] > 0
    return Moments(count[is_used], *(part.cpu()[is_used][:, neurons] for part in (blocks.mean, blocks.m2)))


def _leave_one_out(blocks: Moments) -> tuple[Moments, Moments]:
    """The moments of all blocks together, `[panel]`, and of all but one, `[blocks, panel]`."""
    n = blocks.count.sum()
    mean = (blocks.mean * blocks.count).sum(0) / n
    gap = blocks.mean - mean
    m2 = (blocks.m2 + gap.square() * blocks.count).sum(0)
    rest = (n - blocks.count).clamp(min=1)
    m2_rest = (m2 - blocks.m2 - gap.square() * (blocks.count * n / rest)).clamp(min=0)
    return Moments(n, mean, m2), Moments(rest, mean - gap * (blocks.count / rest), m2_rest)


def _jackknife_variance(replicates: Tensor) -> Tensor:
    """Variance of a statistic from its delete-one-block replicates `[blocks, ...]`."""
    k = len(replicates)
    return (replicates - replicates.mean(0)).square().sum(0) * ((k - 1) / k)


def _tails(most: float) -> Tensor:
    return torch.from_numpy(np.geomspace(most, _MIN_TAIL, 12))


def _within(tails: Tensor, n_panel: int) -> Tensor:
    """The smallest share of neurons expected to have a spread within its limit if errors are independent."""
    return (1 - tails - 1.645 * (tails * (1 - tails) / n_panel).sqrt()).clamp(min=0.5)


def _quantiles(tails: Tensor, freedom: float) -> Tensor:
    """Student's upper quantiles, `[tails, 1]`."""
    from scipy.special import stdtrit

    return torch.from_numpy(stdtrit(freedom, 1 - tails.numpy()))[:, None]


def _upper(total: Moments, without: Moments, quantiles: Tensor) -> Tensor:
    """Upper limits of the spreads as multiples of them, `[tails, panel]`, by Hall's correction of t for skewness."""
    k = len(without.m2)
    # Only the spread of a replicate is used, so that its smaller number of tests does not lower the coverage.
    pseudo = k * total.variance - (k - 1) * without.variance
    deviations = pseudo - pseudo.mean(0)
    spread = deviations.square().mean(0).sqrt()
    skewness = (deviations**3).mean(0) / (spread**3).clamp(min=1e-300) * (math.sqrt(k * (k - 1)) / (k - 2))
    bend = skewness / math.sqrt(k)
    bend = torch.where(bend.abs() < 1e-6, 1e-6, bend)
    argument = 1 - bend * (quantiles + bend / 6)
    corrected = 3 / bend * (argument.sign() * argument.abs().pow(1 / 3) - 1)
    error = spread / math.sqrt(k - 1) / total.variance.clamp(min=1e-300)
    return (1 - corrected * error).clamp(min=1)


def _lower(total: Moments, without: Moments, quantiles: Tensor) -> Tensor:
    """Lower limits of the spreads as multiples of them, `[tails, panel]`, by a jackknife of the logarithm."""
    # A neuron that only one block moves has no spread without it, so zero is replaced by a thousandth.
    relative = without.variance / total.variance.clamp(min=1e-300)
    error = _jackknife_variance(relative.clamp(min=1e-3).log()).sqrt()
    return (-quantiles * error).exp()


def _share(total: Moments, factors: Tensor, rule: Rule) -> Tensor:
    """The coverage of the panel after its spreads are multiplied by each row of `factors [tails, panel]`; `[tails]`."""
    moved = Moments(total.count, total.mean.expand_as(factors).flatten(), (total.m2 * factors).flatten())
    return rule.converged(exact(moved, draws=rule.draws), moved).view_as(factors).double().mean(1)


def _widen(moved: float, n_panel: int, n_neurons: int | None) -> float:
    """Add the sampling error of the panel to the share by which its coverage moves."""
    from scipy.special import betaincinv

    unwatched = 1.0 if n_neurons is None else max(0.0, 1 - n_panel / max(n_neurons, 1))
    limit = 1.0 if moved >= 1 else float(betaincinv(moved * n_panel + 1, n_panel * (1 - moved), 0.975))
    return math.hypot(moved, (limit - moved) * math.sqrt(unwatched))
