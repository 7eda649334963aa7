"""Tests of a model under a perturbation, half of them in the corners of the box of theta."""

import numpy as np
import torch

import themis
from themis.data.seeds import read_seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.sweep import sweep
from themis.measure.tests import Tests
from themis.oracle import choose_oracle
from themis.perturb import choose_perturbation


def faults(net, oracle, perturbation, data, n=40):
    """Which of `n` tests are faults."""
    target, seeds, chosen = themis.Target(net, oracle=oracle), read_seeds(data), choose_perturbation(perturbation)
    low, high = (np.array([getattr(theta, end) for theta in chosen.theta], np.float32) for end in ("low", "high"))
    share = np.random.default_rng(0).random((n, len(low)), dtype=np.float32)
    share[::2] = share[::2].round()
    seed = np.arange(n) % len(seeds)
    tests = Tests(np.arange(n), seed, low + share * (high - low), np.arange(n) * 17, np.full(n, "uniform"))
    with target.opened():
        calculator = Calculator.trace(target, seeds, chosen, choose_oracle(oracle), Limits(1 << 30))
        sweep(calculator)
        _, outputs, motion = calculator.run_chunk(tests, n)
        verdict = calculator.clean.compare(torch.from_numpy(seed), outputs, motion)
    assert verdict.margin.isfinite().all()
    return verdict.is_fault
