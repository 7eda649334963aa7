"""Test robustness in your project's own test suite: a small net on 8x8 digits must withstand noise and light.

Run `pytest examples/test_robustness.py -v`, or this file itself.
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
    """Return inputs [1797, 1, 8, 8] in 0..16, and labels."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32)[:, None], torch.tensor(digits.target)


@pytest.fixture(scope="session")
def target(digits):
    """Return your model: here one that is trained within a second."""
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
    """Return data that the model has not seen."""
    inputs, labels = digits
    return inputs[1200:], labels[1200:]


def test_noise_hardly_matters(robustness, target, held_out):
    """The fixture fails the test if a gate fails, and returns the run for further checks."""
    run = robustness(target, held_out, "gaussian", magnitude=0.1, max_fault_rate=0.05)
    assert run.start.clean_accuracy > 0.9


@pytest.mark.parametrize("perturbation", ["brightness", "contrast"])
def test_light_hardly_matters(robustness, target, held_out, perturbation):
    """Each case has its own campaign, folder and report."""
    robustness(target, held_out, perturbation, magnitude=0.1, max_fault_rate=0.05)


@pytest.mark.robustness("gaussian", magnitude=0.02)
def test_faint_noise_changes_no_confident_answer(target, held_out):
    """With the marker, the test returns target and data. Without a gate, a single fault fails it."""
    inputs, labels = held_out
    with torch.no_grad():
        scores = target.module(target.preprocess(inputs)).softmax(1)
    is_confident = (scores.max(1).values > 0.999) & (scores.argmax(1) == labels)
    return target, (inputs[is_confident], labels[is_confident])


if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, "-m", "pytest", __file__, "-v", *sys.argv[1:]]))
