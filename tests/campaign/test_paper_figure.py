"""The paper's figure on real data: tests until ResNet-56 is covered under Gaussian noise; `benchmarks/paper.py`."""

import os
import runpy
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "paper.py"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("THEMIS_DATA"), reason="needs CIFAR-10: set THEMIS_DATA to the data folder")
def test_resnet56_is_covered_after_about_as_many_tests_as_in_the_prototype(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    paper = runpy.run_path(str(BENCHMARK), run_name="paper")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = paper["read_target"](None, device)
    seeds = paper["correct_seeds"](target, paper["read_pictures"](None))
    assert len(seeds) == 2000
    result = paper["run_paper"](target, seeds, max_tests=30_000)
    assert result.stop_reason == "coverage"
    assert 0.8 * 23_000 <= result.rounds[-1].tests <= 1.2 * 23_000
