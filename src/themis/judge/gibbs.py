"""The Gibbs judge: real Markov chains for all neurons at once, from the moments alone.

With `z = sqrt(n) (mu - mean) / s` and `w = sigma^2 / s^2` the chain is `z | w ~ Normal(0, w)`,
`w | z ~ InverseGamma(n / 2, (n - 1 + z^2) / 2)`, the same at every scale, so that float32 is precise enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from themis.judge.coverage import PAPER_DRAWS, Posterior
from themis.judge.diagnostics import N_CHAINS, join, judge_by_chains, summarise
from themis.measure.moments import Moments

CHAIN_STARTS = (0.1, 0.5, 2.0, 10.0)
"""The values of `w` at which the chains start; they are wider apart than its posterior."""

WARM_UP_STEPS = 96
"""Steps that are discarded. The influence of the start halves with each step at 4 tests, and faster with more tests."""

BLOCK_NEURONS = 512
"""Neurons that one thread samples together; each block has its own random stream."""

BLOCK_DRAWS = 2**22
"""Maximum draws per block; blocks with longer chains have fewer neurons, so that a thread needs at most 60 MB."""

MAX_THREADS = 4
"""Maximum number of threads; with more, they wait for the GIL longer than they compute."""

STEPS_PER_DRAW = 32
"""Steps whose random numbers are drawn together; this few stay in the processor's cache."""


def gibbs(moments: Moments, *, draws: int = PAPER_DRAWS, random_seed: int = 0) -> Posterior:
    """Sample four chains per neuron with `draws` draws in total; ESS, MCSE and R-hat are defined as in ArviZ.

    The chains always run on the CPU, so that the same moments give the same posterior on every device.
    """

    def sample(n: Tensor, n_draws: int) -> Posterior:
        def judge(block: int, n: Tensor) -> Posterior:
            state = np.random.SeedSequence((random_seed % 2**64, block)).generate_state(1)
            return summarise(_chains(n, n_draws, torch.Generator().manual_seed(int(state[0]))))

        return join(_map_by_thread(judge, torch.split(n, max(1, min(BLOCK_NEURONS, BLOCK_DRAWS // draws)))))

    here = Moments(moments.count.cpu(), moments.mean.cpu(), moments.m2.cpu())
    return Posterior(*(column.to(moments.mean) for column in judge_by_chains(here, draws, sample)))


def _map_by_thread(judge: Callable[[int, Tensor], Posterior], blocks: Sequence[Tensor]) -> list[Posterior]:
    """Call `judge(number, block)` for each block, in one thread per block.

    This is twice as fast as dividing every operation among threads, which also stalls on a busy machine, and it makes
    the results independent of the number of threads.
    """
    n_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(n_threads, MAX_THREADS), initializer=torch.set_num_threads, initargs=(1,))
    try:
        return list(pool.map(judge, range(len(blocks)), blocks))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_threads)  # otherwise new threads would start with the 1 of the workers


def _chains(n: Tensor, n_draws: int, rng: torch.Generator) -> Tensor:
    """Draws of `z` for neurons with `n` tests, float32 `[neurons, chains, draws]`."""
    n = n.float().repeat_interleave(N_CHAINS)
    shape = n / 2 - 1 / 3
    draws = n.new_empty(n_draws, len(n))
    w = n.new_empty(STEPS_PER_DRAW + 1, len(n))
    w[0] = n.new_tensor(CHAIN_STARTS).repeat(len(n) // N_CHAINS)
    w_rows = w.unbind()
    e = torch.empty_like(w[1:])
    for start in range(-WARM_UP_STEPS, n_draws, STEPS_PER_DRAW):
        # w' = (n - 1 + z^2) / (2 gamma) with z^2 = w e^2 is linear in w: one operation per step.
        inverse = _gamma_over_shape(shape, rng).reciprocal_().mul_(0.5 / shape)
        e.normal_(generator=rng)
        slopes = e.square().mul_(inverse).unbind()
        offsets = inverse.mul_(n - 1).unbind()
        for step in range(STEPS_PER_DRAW):
            torch.addcmul(offsets[step], w_rows[step], slopes[step], out=w_rows[step + 1])
        if start >= 0:
            size = min(STEPS_PER_DRAW, n_draws - start)
            torch.mul(w[:size].sqrt(), e[:size], out=draws[start : start + size])
        w[0] = w[-1]
    return draws.t().contiguous().view(-1, N_CHAINS, n_draws)


def _gamma_over_shape(shape: Tensor, rng: torch.Generator) -> Tensor:
    """Variates of gamma(shape + 1/3) divided by `shape`, `[steps, lanes]`, by the method of Marsaglia and Tsang.

    That is `(1 + x / sqrt(9 shape))**3` for a normal x, which is rarely rejected.
    """
    x = shape.new_empty(STEPS_PER_DRAW, len(shape)).normal_(generator=rng)
    u = torch.empty_like(x).uniform_(generator=rng)
    root = 1 + x * (9 * shape).rsqrt()
    # With shape 5/3 (4 tests) or more, x is rejected with probability < 0.0165 x^4 / shape: the exact test is rare.
    step, lane = (u < x.square().square_().mul_(0.0165 / shape)).nonzero(as_tuple=True)
    if len(step):
        x = _redraw(x[step, lane].double(), u[step, lane].double(), shape[lane].double(), rng)
        root[step, lane] = 1 + x.float() * (9 * shape[lane]).rsqrt()
    return root * root.square()


def _redraw(x: Tensor, u: Tensor, shape: Tensor, rng: torch.Generator) -> Tensor:
    """The normal variates `x`, redrawn where the exact test rejects them until it accepts all."""
    todo = torch.arange(len(x), device=x.device)
    while True:
        root = 1 + x[todo] * (9 * shape[todo]).rsqrt()
        cube = root**3
        log_accept = 0.5 * x[todo] ** 2 + shape[todo] * (1 - cube + cube.log())
        is_rejected = (root <= 0) | (torch.log1p(-u) >= log_accept)
        todo = todo[is_rejected]
        if not len(todo):
            return x
        x[todo] = torch.randn(len(todo), generator=rng, dtype=x.dtype, device=x.device)
        u = torch.rand(len(todo), generator=rng, dtype=x.dtype, device=x.device)
