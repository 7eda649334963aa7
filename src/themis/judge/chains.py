"""What the judges that sample Markov chains share: coordinates in which only the number of tests matters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from themis.errors import UsageError
from themis.judge.exact import exact
from themis.judge.posterior import Posterior
from themis.measure.moments import Moments

CHAINS = 4


def judge_by_chains(moments: Moments, draws: int, sample: Callable[[Tensor, int], Posterior]) -> Posterior:
    """The posterior by `sample(count, draws per chain)`, which samples `z = sqrt(n) (mu - mean) / s` of some neurons.

    Neurons with up to three tests (no sd) and neurons without spread (nothing to sample) get the closed form.
    """
    if draws % CHAINS or draws < 4 * CHAINS:
        raise UsageError(
            f"draws must be a multiple of {CHAINS} (the chains) and at least {4 * CHAINS}, got {draws}: use 4000"
        )
    closed = exact(moments, draws=draws)
    n = moments.count.double().expand_as(moments.mean)
    neurons = ((n > 3) & (moments.m2 > 0)).nonzero()[:, 0]
    if not len(neurons):
        return closed
    n, m2 = n[neurons], moments.m2[neurons]
    z = sample(n, draws // CHAINS)
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
    return Posterior(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Posterior)))
