"""Triton kernels of the judge `gibbs`: one draws the chains of some neurons, the other sums them up.

If Triton is not available, or a kernel cannot be compiled, `gibbs` draws and sums in torch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from themis.compute.gpu import device_of, tl, triton, works_on

CHAIN_NEURONS, CHAIN_WARPS = 128, 1
"""Neurons of a program of `draw_chains`, and its warps: one warp needs no synchronisation to agree on a redraw."""
HALF_NEURONS, HALF_WARPS = 128, 1
"""Neurons of a program of `sum_halves`, and its warps."""
LAGS = 32
"""Lags whose autocovariances `sum_halves` computes; hardly any neuron needs more."""
NEURON_MULTIPLE = 256
"""Neurons are padded to a multiple of this, so that programs need not mask them."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _random(seed, step, attempt, neuron, chain):  # type: ignore[no-untyped-def]
        # Two independent normal variates (Box and Muller) and a uniform one in [0, 1).
        zero = neuron * 0
        a, b, c, _ = tl.philox(seed, zero + step, zero + attempt, neuron, zero + chain)
        radius = tl.sqrt(-2.0 * tl.log(tl.minimum((a >> 1).to(tl.int32).to(tl.float32) * 4.656612873e-10 + 1e-10, 1.0)))
        # The angle is up to 45 degrees from an axis, which two bits choose: polynomials of low degree are exact.
        angle = ((b & 0x3FFFFFFF).to(tl.int32).to(tl.float32) * 9.31322575e-10 - 0.5) * 1.5707963268
        square = angle * angle
        sine = angle * (1 + square * (-1.6666667e-1 + square * (8.3333310e-3 + square * -1.9839334e-4)))
        cosine = 1 + square * (-0.5 + square * (4.1666666e-2 + square * (-1.3888889e-3 + square * 2.4760495e-5)))
        is_turned = (b & 0x40000000) != 0
        radius = tl.where((b & 0x80000000) != 0, -radius, radius)
        one = radius * tl.where(is_turned, -sine, cosine)
        other = radius * tl.where(is_turned, cosine, sine)
        return one, other, (c >> 8).to(tl.int32).to(tl.float32) * 5.960464478e-8

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _rejection(y, shape):  # type: ignore[no-untyped-def]
        # The chance that Marsaglia and Tsang reject the normal `y sqrt(9 shape)`, `1 - exp(log_accept)` with
        # log_accept = shape (3 (log(1 + y) - y + y^2 / 2) - y^3); near 0 by their series, as both would cancel.
        series = 0.25 - y * (0.2 - y * (0.16666667 - y * (0.14285714 - y * (0.125 - y * (0.11111111 - y * (
            0.1 - y * (0.09090909 - y * 0.08333333)))))))  # fmt: skip
        root = tl.maximum(1.0 + y, 1e-30)
        direct = 3.0 * (tl.log(root) - y + 0.5 * y * y) - y * y * y
        log_accept = shape * tl.where(tl.abs(y) < 0.25, -3.0 * series * (y * y) * (y * y), direct)
        small = -log_accept * (1.0 + log_accept * (0.5 + log_accept * (0.16666667 + log_accept * 0.041666668)))
        chance = tl.where(log_accept > -0.1, small, 1.0 - tl.exp(log_accept))
        return tl.where(y > -1.0, chance, 1.0)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _advance(w, n, shape, width, seed, step, neuron, chain):  # type: ignore[no-untyped-def]
        # A draw of z given w, and of w given z.
        e, x, u = _random(seed, step, 0, neuron, chain)
        is_rejected = u < _rejection(x * width, shape)
        attempt = 1
        while tl.max(is_rejected.to(tl.int32), 0) > 0:
            _, other, u = _random(seed, step, attempt, neuron, chain)
            x = tl.where(is_rejected, other, x)
            is_rejected = is_rejected & (u < _rejection(x * width, shape))
            attempt += 1
        root = 1.0 + x * width
        z = tl.sqrt(w) * e
        return z, (n - 1.0 + z * z) * 0.5 / (shape * root * root * root)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _draw_kernel(  # type: ignore[no-untyped-def]
        counts, starts, seeds, firsts, draws, warm_up, n_draws, stride, size: tl.constexpr
    ):
        neuron, chain = tl.program_id(0) * size + tl.arange(0, size), tl.program_id(1)
        n = tl.load(counts + neuron)
        shape = 0.5 * n - 0.33333334
        width = 1.0 / tl.sqrt(9.0 * shape)
        seed = tl.load(seeds)
        stream = tl.load(firsts).to(tl.int32) + neuron
        w = tl.load(starts + chain) + n * 0.0
        to = draws + chain.to(tl.int64) * n_draws * stride + neuron
        for step in range(0, warm_up):
            _, w = _advance(w, n, shape, width, seed, step, stream, chain)
        for step in range(warm_up, warm_up + n_draws):
            z, w = _advance(w, n, shape, width, seed, step, stream, chain)
            tl.store(to, z)
            to += stride

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _normal_score(z, freedom):  # type: ignore[no-untyped-def]
        # The normal quantile at which the t distribution has z (Wallace's approximation).
        y = z * z / freedom
        series = y * (1.0 - y * (0.5 - y * (0.33333334 - y * (0.25 - y * (0.2 - y * (0.16666667 - y * (
            0.14285714 - y * 0.125)))))))  # fmt: skip
        log1p = tl.where(y < 0.2, series, tl.log(1.0 + y))
        size = tl.sqrt(freedom * log1p) * ((8.0 * freedom + 1.0) / (8.0 * freedom + 3.0))
        return tl.where(z < 0.0, -size, size)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _folded_score(score):  # type: ignore[no-untyped-def]
        # The normal quantile at which the absolute value of a normal variate has |score|: the inverse error function
        # by Giles' approximation in single precision.
        p = tl.minimum(tl.maximum(tl.math.erf(tl.abs(score) * 0.70710678), 6e-8), 0.9999999)
        w = -tl.log(4.0 * p * (1.0 - p))
        a = w - 2.5
        near = 2.81022636e-08
        near = 3.43273939e-07 + near * a
        near = -3.5233877e-06 + near * a
        near = -4.39150654e-06 + near * a
        near = 0.00021858087 + near * a
        near = -0.00125372503 + near * a
        near = -0.00417768164 + near * a
        near = 0.246640727 + near * a
        near = 1.50140941 + near * a
        b = tl.sqrt(tl.maximum(w, 0.0)) - 3.0
        far = -0.000200214257
        far = 0.000100950558 + far * b
        far = 0.00134934322 + far * b
        far = -0.00367342844 + far * b
        far = 0.00573950773 + far * b
        far = -0.0076224613 + far * b
        far = 0.00943887047 + far * b
        far = 1.00167406 + far * b
        far = 2.83297682 + far * b
        return 1.41421356 * (2.0 * p - 1.0) * tl.where(w < 5.0, near, far)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _halves_kernel(  # type: ignore[no-untyped-def]
        draws, counts, sums, products, n_draws, half, stride, lags: tl.constexpr, size: tl.constexpr
    ):
        neuron, part = tl.program_id(0) * size + tl.arange(0, size), tl.program_id(1)
        freedom = tl.load(counts + neuron) - 1.0
        first = (part // 2) * n_draws + (part % 2) * (n_draws - half)
        row = draws + first.to(tl.int64) * stride + neuron
        total = tl.zeros([size], tl.float32)
        square = tl.zeros([size], tl.float32)
        bulk = tl.zeros([size], tl.float32)
        bulk_square = tl.zeros([size], tl.float32)
        tail = tl.zeros([size], tl.float32)
        tail_square = tl.zeros([size], tl.float32)
        at = row
        for _ in range(0, half):
            z = tl.load(at)
            score = _normal_score(z, freedom)
            folded = _folded_score(score)
            total += z
            square += z * z
            bulk += score
            bulk_square += score * score
            tail += folded
            tail_square += folded * folded
            at += stride
        to = sums + part.to(tl.int64) * stride + neuron
        step = tl.num_programs(1).to(tl.int64) * stride
        tl.store(to, total)
        tl.store(to + step, square)
        tl.store(to + 2 * step, bulk)
        tl.store(to + 3 * step, bulk_square)
        tl.store(to + 4 * step, tail)
        tl.store(to + 5 * step, tail_square)

        mean = total / half
        lag = tl.arange(0, lags)[:, None]
        covariance = tl.zeros([lags, size], tl.float32)
        at = row
        later = row[None, :] + lag.to(tl.int64) * stride
        n_whole = tl.maximum(half - lags + 1, 0)
        for _ in range(0, n_whole):
            a = tl.load(at) - mean
            covariance += a[None, :] * (tl.load(later) - mean[None, :])
            at += stride
            later += stride
        for t in range(n_whole, half):
            a = tl.load(at) - mean
            is_inside = (t + lag < half) & (neuron >= 0)[None, :]
            b = tl.load(later, mask=is_inside, other=0.0) - mean[None, :]
            covariance += tl.where(is_inside, a[None, :] * b, 0.0)
            at += stride
            later += stride
        place = part.to(tl.int64) * lags + lag
        tl.store(products + place * stride + neuron[None, :], covariance)


def draw_chains(counts: Tensor, starts: Tensor, seed: Tensor, first: Tensor, warm_up: int, n_draws: int) -> Tensor:
    """Draws of `z` for neurons with `counts` tests, float32 `[chains, draws, neurons]`, after `warm_up` steps.

    counts: float32, a multiple of `NEURON_MULTIPLE` of them. starts: where each chain starts in `w`, float32
    `[chains]`. seed: int64 `[1]`. first: int64 `[1]`, the number of the first neuron; its draws depend on the seed and
    this alone.
    """
    draws = counts.new_empty(len(starts), n_draws, len(counts))
    _draw_kernel[(len(counts) // CHAIN_NEURONS, len(starts))](
        counts, starts, seed, first, draws, warm_up, n_draws, len(counts), size=CHAIN_NEURONS, num_warps=CHAIN_WARPS
    )
    return draws


def sum_halves(draws: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the halves of each chain of draws `[chains, draws, neurons]` (a middle draw is left out).

    The first are sums of the draws, their normal scores and the scores of their absolute values, each followed by the
    sum of squares: float32 `[6, halves, neurons]`. Scores are those of the t distribution, from which the chains draw.
    The second are sums of products of draws that are 0, 1, ... draws apart, less their mean:
    `[halves, lags, neurons]`.
    """
    n_chains, n_draws, n_neurons = draws.shape
    sums = draws.new_empty(6, 2 * n_chains, n_neurons)
    products = draws.new_empty(2 * n_chains, LAGS, n_neurons)
    _halves_kernel[(n_neurons // HALF_NEURONS, 2 * n_chains)](
        draws, counts, sums, products, n_draws, n_draws // 2, n_neurons, lags=LAGS, size=HALF_NEURONS,
        num_warps=HALF_WARPS,
    )  # fmt: skip
    return sums, products


@cache
def can_draw(device: torch.device) -> bool:
    """Whether the kernels compile on `device` and agree with torch there."""

    def check() -> bool:
        counts = torch.full((NEURON_MULTIPLE,), 10.0, device=device)
        with device_of(counts):
            starts, number = torch.ones(4, device=device), torch.ones(1, dtype=torch.int64, device=device)
            draws = draw_chains(counts, starts, number, number, 10, 200)
            sums, products = sum_halves(draws, counts)
        halves = draws.view(8, 100, NEURON_MULTIPLE)
        centred = halves - halves.mean(1, keepdim=True)
        covariance = torch.stack([(centred[:, k:] * centred[:, : 100 - k]).sum(1) for k in range(LAGS)], 1)
        return (
            torch.allclose(sums[0], halves.sum(1), atol=1e-3)
            and torch.allclose(sums[1], halves.square().sum(1), rtol=1e-3)
            and torch.allclose(products, covariance, atol=1e-2, rtol=1e-3)
            and bool((draws.square().mean() - 9 / 7).abs() < 0.05)
            and bool((sums[2::2].sum((1, 2)) / draws.numel()).abs().max() < 0.05)
            and bool((sums[3::2].sum((1, 2)) / draws.numel() - 1).abs().max() < 0.1)
        )

    return works_on(device, check)
