"""Models without hidden layers: forests, linear models and functions have no neurons to cover."""

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import themis
from themis.report.gates.gates import Gates, check_gates, write_junit, write_markdown
from themis.report.page import read_view, write_report
from themis.report.progress import ShowProgress
from themis.runs.store.reader import Reader
from themis_integrations.pytest_plugin.plugin import describe_properties
from themis_integrations.pytest_plugin.robustness import properties_of
from themis_integrations.trackers import results_of, verdict_of

WEIGHTS = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
DATA = torch.rand(30, 8, generator=torch.Generator().manual_seed(0))
WORDS = ("coverage", "neuron", "markov", "normal")


def predict(inputs):
    return inputs @ WEIGHTS


def run(target, **options):
    return themis.run(target, DATA, "gaussian", **{"magnitude": 0.3, "max_tests": 1000, **options})


@pytest.mark.parametrize("is_terminal", [False, True])
def test_nothing_is_said_of_neurons(is_terminal, tmp_path):
    text = io.StringIO()
    console = Console(file=text, force_terminal=is_terminal, width=120)
    result = run(themis.BlackBox(predict), callbacks=[ShowProgress(console)], out=tmp_path / "run", max_tests=3000)
    lines = text.getvalue().lower().replace("no hidden layers, so no coverage goal", "")
    assert not [word for word in WORDS if word in lines]
    assert "coverage" not in repr(result)
    assert themis.open_run(tmp_path / "run").requests == result.requests


def test_the_report_has_no_coverage(tmp_path):
    out = tmp_path / "run"
    run(themis.BlackBox(predict), out=out)
    write_report(out)
    reader = Reader(out)
    assert not read_view(reader).covers_neurons
    reader.close()
    assert json.loads((out / "summary.json").read_text())["requests"]["inputs"] > 1000


def test_gates_and_trackers_say_nothing_of_coverage(tmp_path):
    result = run(themis.BlackBox(predict), out=tmp_path / "run")
    for source in (result, tmp_path / "run"):
        results = check_gates(source, Gates.of(max_fault_rate=1.0))
        write_markdown(tmp_path / "summary.md", results)
        write_junit(tmp_path / "junit.xml", results)
        for metric in ("coverage", "coverage_all", "coverage_low", "coverage_uniform"):
            with pytest.raises(
                themis.UsageError, match="no hidden layers, so there are no neurons to cover: remove this"
            ):
                check_gates(source, Gates.of(fail_under={metric: 0.5}))
    texts = [(tmp_path / name).read_text() for name in ("summary.md", "junit.xml")]
    texts += [str(results_of(result)), str(properties_of(result, tmp_path, None, 1)), verdict_of(result)]
    texts += describe_properties(dict(properties_of(result, tmp_path, None, 1)))
    assert not [word for word in WORDS for text in texts if word in text.lower()]


@pytest.mark.parametrize("target", [themis.BlackBox(predict), nn.Linear(8, 3)], ids=["function", "linear"])
def test_the_campaign_stops_when_little_is_left_to_find(target):
    torch.manual_seed(0)
    result = run(target, magnitude=1e-6, max_tests=20_000)
    assert result.stop_reason == "found"
    assert result.stop.startswith("Stopped because no fault was found: the residual risk is at most")
    assert run(target, magnitude=1e-6, coverage=None).stop_reason == "tests"


def test_a_plateau_is_one_of_faults_alone():
    result = run(themis.BlackBox(predict), magnitude=1e-6, recall=None, round_size=10, plateau=3)
    assert result.stop == "Stopped because 3 rounds brought no new distinct fault."


def test_a_model_with_hidden_layers_has_a_goal_still():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    assert run(net, recall=None, tolerance=1.0).stop_reason == "coverage"
