"""The progress of a campaign and the summary at its end, as printed."""

import io

import pytest
import torch
from rich.console import Console

import themis
from themis.report.progress import ShowProgress
from themis.text import percent


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0%"), (1e-9, "<0.1%"), (0.5, "50.0%"), (0.9989, "99.9%"), (0.99999, ">99.9%"), (1, "100.0%")],
)
def test_a_percentage_is_100_or_0_only_if_it_is_exact(share, text):
    assert percent(share) == text


def shown(is_terminal, **options):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
    options = {"magnitude": 0.5, "max_tests": 640, "tolerance": 1e-6, **options}
    result = themis.run(
        net, torch.rand(30, 4), "gaussian", callbacks=[ShowProgress(console, is_verbose=True)], **options
    )
    return result, file.getvalue()


def test_plain_lines_without_a_terminal():
    result, text = shown(False)
    assert "\x1b" not in text
    assert "11 neurons in 2 layers, 30 of 30 seeds to test" in text
    assert "round 1: coverage 0.0%" in text
    assert f"{result.rounds[-1].distinct_faults} distinct faults" in text
    assert "more tests to reach the coverage goal" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80
    assert text.rstrip().endswith("Stopped because the budget of 640 tests is spent.")


def test_a_live_line_in_a_terminal():
    _, text = shown(True)
    assert "\x1b[" in text  # the line is redrawn in place
    assert "coverage" in text
    assert "Stopped because" in text


def test_unknown_figures_are_reported_as_unknown():
    _, text = shown(False, uniform_share=0.0)
    assert "unknown: no uniform tests" in text


def test_a_goal_out_of_reach_is_reported_as_such():
    _, text = shown(False, tolerance=1e-12)
    assert "the coverage goal is out of reach" in text
    assert "to the coverage goal" not in text
    assert "left in the budget" not in text
