"""The PyMC judge: NUTS on the moments, the reference for the other judges. It needs the extra `bayes`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.errors import needs_extra
from themis.judge.coverage import PAPER_DRAWS, Posterior
from themis.judge.diagnostics import N_CHAINS, join, judge_by_chains, summarise
from themis.measure.moments import Moments

MODEL_NEURONS = 256
"""Neurons per model: NUTS needs longer trajectories for more."""

THINNING = 5
"""Every fifth draw is kept. Neighbouring NUTS draws are negatively correlated: the ESS is up to 2.5 times the number of
draws, which would lower the MCSE without more tests. Draws five steps apart are practically independent, like those of
the other judges (measured: the ESS is 0.99 of the draws)."""


def pymc(moments: Moments, *, draws: int = PAPER_DRAWS, random_seed: int = 0) -> Posterior:
    """Sample four chains with `pm.sample`, `draws` draws in total; ESS, MCSE and R-hat as ArviZ defines them."""

    def sample(n: Tensor, n_draws: int) -> Posterior:
        parts = enumerate(torch.split(n, MODEL_NEURONS))
        return join([summarise(_chains(part, n_draws, (random_seed, k))) for k, part in parts])

    return judge_by_chains(moments, draws, sample)


def _chains(n: Tensor, n_draws: int, stream: tuple[int, int]) -> Tensor:
    """Draws of `z` for neurons with `n` tests, float64 `[neurons, chains, draws]`."""
    pm = _import_pymc()
    n_tests = n.cpu().numpy()
    seed = np.random.SeedSequence((stream[0] % 2**64, stream[1])).generate_state(1)
    with pm.Model(), _quiet():
        z = pm.Flat("z", shape=len(n_tests))
        # log(sigma / s) in units of its own posterior spread, so that NUTS sees only one scale.
        log_sigma = pm.Flat("log_sigma", shape=len(n_tests)) / np.sqrt(2 * n_tests)
        scatter = (n_tests - 1 + z**2) * pm.math.exp(-2 * log_sigma)
        pm.Potential("moments", -n_tests * log_sigma - scatter / 2)
        trace = pm.sample(
            draws=n_draws * THINNING,
            chains=N_CHAINS,
            cores=1,
            random_seed=int(seed[0]),
            var_names=["z"],
            progressbar=False,
            compute_convergence_checks=False,
        )
    kept = trace.posterior["z"].values[:, THINNING - 1 :: THINNING]  # [chains, draws, neurons]
    return torch.from_numpy(kept).permute(2, 0, 1).contiguous().to(n.device)


def _import_pymc() -> Any:
    with needs_extra("bayes", 'the judge "pymc" needs the package pymc'), _quiet():
        import pymc as pm
    return pm


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what PyMC and its libraries print when they are imported and while they sample."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
