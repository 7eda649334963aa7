"""The exact judge, in closed form: the posterior of a normal mean is a Student t distribution."""

from __future__ import annotations

import torch

from themis.judge.posterior import PAPER_DRAWS, Posterior
from themis.measure.moments import Moments


def exact(moments: Moments, *, draws: int = PAPER_DRAWS, random_seed: int = 0) -> Posterior:
    """The Student-t posterior, and the MCSE that `draws` independent draws from it would have.

    Its sd is finite from the fourth test on; before that it is infinite and no neuron can converge.
    """
    n = moments.count.double()
    spread = torch.where(n > 3, moments.m2 / (n * (n - 3)).clamp(min=1), torch.inf)
    sd = spread.sqrt()
    return Posterior(
        mean=moments.mean,
        sd=sd,
        ess=torch.full_like(sd, draws),
        mcse=sd / draws**0.5,
        rhat=torch.ones_like(sd),
    )
