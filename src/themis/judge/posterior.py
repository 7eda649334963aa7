"""The posterior that every judge returns, and the protocol of a judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
