"""Coverage that is reached before it can mean anything is called that."""

import pytest
import torch
from torch import nn

import themis
from themis.report.gates.gates import Gates, check_gates
from themis.runs.display.text import summary_rows
from themis.runs.run import coverage_caution

INPUTS = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def faint():
    """A net whose activations hardly move in absolute units."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(0.03)
    return net


@pytest.mark.parametrize(
    ("coverage", "n_tests", "n_seeds", "expected"),
    [
        (0.995, 32, 1000, "(most of them were not tested)"),
        (0.995, 32, 20, "(fewer than 2 per seed)"),
        (0.9, 39, 20, "(fewer than 2 per seed)"),
        (0.995, 40, 20, None),
        (0.89, 1, 1000, None),
    ],
)
def test_high_coverage_needs_two_tests_per_seed(coverage, n_tests, n_seeds, expected):
    caution = coverage_caution(coverage, n_tests, n_seeds, "absolute")
    assert caution is None if expected is None else expected in caution
    assert expected is None or "--scale relative" in caution
    assert expected is None or "--scale" not in coverage_caution(coverage, n_tests, n_seeds, "relative")


def test_a_model_with_small_activations_is_not_called_covered_without_a_word(faint):
    run = themis.run(faint, INPUTS, "gaussian", magnitude=0.1, round_size=32, recall=None)
    assert run.stop_reason == "coverage"
    assert run.rounds[-1].tests == 32
    caution = run.summary()["coverage_caution"]
    assert "after 32 tests on 200 seeds (most of them were not tested) says little" in caution
    assert ("attention", caution) in summary_rows(run)
    results = check_gates(run, Gates.of("coverage=0.9")).results
    (gate,) = [result for result in results if result.gate == "coverage"]
    assert caution in gate.text


def test_the_relative_scale_asks_for_more_tests(faint):
    run = themis.run(faint, INPUTS, "gaussian", magnitude=0.1, round_size=32, max_tests=800, scale="relative")
    assert run.rounds[0].coverage.sampled < 0.5
    assert run.rounds[-1].tests >= 160
