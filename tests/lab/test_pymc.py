"""The PyMC judge: its results, its silence, and its error if PyMC is missing."""

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch

from themis.errors import MissingExtraError
from themis.measure.moments import Moments
from themis_lab.pymc import pymc

pytestmark = pytest.mark.xdist_group("pymc")  # importing it takes seconds
needs_pymc = pytest.mark.skipif(importlib.util.find_spec("pymc") is None, reason="the extra bayes is not installed")
MOMENTS = Moments(torch.tensor([3, 30, 300]), torch.tensor([0.1, 0.2, 0.3]).double(), torch.tensor([1, 2, 3]).double())


def test_without_pymc_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymc", None)
    with pytest.raises(MissingExtraError, match=r'pip install "themis-dl\[bayes\]"'):
        pymc(MOMENTS)
    assert logging.root.manager.disable == 0


def test_importing_the_judges_does_not_import_pymc() -> None:
    code = "import sys, themis.judge; sys.exit('pymc' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@needs_pymc
def test_nothing_is_printed_warned_or_logged() -> None:
    code = (
        "import torch; from themis.judge import JUDGES; from themis.measure.moments import Moments;"
        "JUDGES['pymc'](Moments(torch.tensor(20), *torch.rand(2, 2).double()), draws=16)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_pymc
def test_the_same_random_seed_gives_the_same_result_and_each_block_a_different_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.modules["themis_lab.pymc"], "MODEL_NEURONS", 1)
    equal = Moments(torch.tensor(30), torch.ones(2).double(), torch.ones(2).double())
    one, other = pymc(equal, draws=80, random_seed=3), pymc(equal, draws=80, random_seed=3)
    assert torch.equal(one.mean, other.mean)
    assert torch.equal(one.mcse, other.mcse)
    assert one.mean[0] != one.mean[1]


@needs_pymc
def test_another_random_seed_gives_other_draws_of_the_same_posterior() -> None:
    one, other = pymc(MOMENTS, draws=400, random_seed=0), pymc(MOMENTS, draws=400, random_seed=1)
    assert (one.mean[1:] != other.mean[1:]).all()
    assert ((one.mean - other.mean)[1:].abs() < 5 * (one.mcse + other.mcse)[1:]).all()
    assert one.mean[0] == other.mean[0]
    assert one.sd[0] == torch.inf
