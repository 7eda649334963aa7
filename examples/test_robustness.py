"""Robustness in your project's own tests: a small net on scikit-learn's 8x8 digits must stand up to noise and light.

`pytest examples/test_robustness.py -v` runs them; so does this file itself.
"""

import subprocess
import sys

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import themis


@pytest.fixture(scope="session")
def digits():
    """Inputs [1797, 1, 8, 8] in 0..16, and labels."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None], torch.tensor(digits.target)


@pytest.fixture(scope="session")
def target(digits):
    """Your model: here one that is trained in a second."""
    inputs, labels = digits
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
    normalise = themis.Normalize(mean=4.9, std=6.0)
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(normalise(inputs[:1200])), labels[:1200]).backward()
        optimiser.step()
    return themis.Target(net, bounds=(0, 16), preprocess=normalise)


@pytest.fixture
def held_out(digits):
    """What the model has not seen."""
    inputs, labels = digits
    return inputs[1200:], labels[1200:]


def test_noise_hardly_matters(robustness, target, held_out):
    """The fixture: it fails the test if a gate fails, and gives the run back for checks of your own."""
    run = robustness(target, held_out, "gaussian", magnitude=0.1, max_fault_rate=0.05)
    assert run.start.clean_accuracy > 0.9


@pytest.mark.parametrize("perturbation", ["brightness", "contrast"])
def test_light_hardly_matters(robustness, target, held_out, perturbation):
    """Each case has a campaign, a folder and a report of its own."""
    robustness(target, held_out, perturbation, magnitude=0.1, max_fault_rate=0.05)


@pytest.mark.robustness("gaussian", magnitude=0.02)
def test_a_trace_of_noise_breaks_no_sure_answer(target, held_out):
    """The marker: the test returns target and data. Without a gate, one fault fails it."""
    inputs, labels = held_out
    with torch.no_grad():
        scores = target.module(target.preprocess(inputs)).softmax(1)
    is_sure = (scores.max(1).values > 0.999) & (scores.argmax(1) == labels)
    return target, (inputs[is_sure], labels[is_sure])


if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "pytest", __file__, "-v", *sys.argv[1:]]))
