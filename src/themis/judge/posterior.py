"""The posterior that every judge returns, the protocol of a judge, and the exact judge, in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from themis.measure.moments import Moments

PAPER_DRAWS = 4000
"""The number of draws, over all chains, at which the paper's `MCSE == 0.0` is defined."""


@dataclass(frozen=True)
class Posterior:
    """What is known of each neuron's mean sensitivity; float64 tensors `[neurons]`.

    `mean` and `sd` describe the posterior; `ess`, `mcse` and `rhat` the draws it was estimated from.
    """

    mean: Tensor
    sd: Tensor
    ess: Tensor
    mcse: Tensor
    rhat: Tensor


class Judge(Protocol):
    """Infers each neuron's mean sensitivity under `D ~ Normal(mu, sigma)`, prior `p(mu, sigma^2) ~ 1/sigma^2`."""

    def __call__(self, moments: Moments, *, draws: int = PAPER_DRAWS, random_seed: int = 0) -> Posterior: ...


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
