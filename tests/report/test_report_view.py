"""The view: what a page shows of a run, read from its folder only, for every task and however the run ended."""

import json
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.oracle import Compare
from themis.report.page import read_view
from themis.runs.analysis.shrink import Robustness

pytestmark = pytest.mark.xdist_group("report_view")

ENDLESS = {"tolerance": 1e-12, "plateau": None, "round_size": 200}


@pytest.fixture(scope="module")
def digits_run(trained, tmp_path_factory):
    """A campaign on real digits."""
    model, held_out = trained
    out = tmp_path_factory.mktemp("view") / "digits"
    options = {"magnitude": 2.0, "policy": "random", "max_tests": 1500, **ENDLESS}
    run = themis.run(model, held_out[torch.arange(300)], "gaussian + rotate", out=out, **options)
    return run, out


def run_small(out, net, data, perturbation="gaussian", oracle="auto", **options):
    target = themis.Target(net, oracle=oracle)
    return themis.run(target, data, perturbation, out=out, **{"max_tests": 400, **ENDLESS, **options})


def small_net(n_outputs, shape=(1, 8, 8)):
    torch.manual_seed(0)
    n = int(np.prod(shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(n, 16), nn.ReLU(), nn.Linear(16, n_outputs))


def pictures(n=60, shape=(1, 8, 8)):
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))


def assert_survives_json(view):
    """The JSON form is plain data without a number that JSON cannot hold."""
    plain = view.as_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_a_view_says_what_the_run_found(digits_run):
    run, out = digits_run
    view, last, summary = read_view(out), run.rounds[-1], run.summary()
    assert_survives_json(view)
    assert view.state == "ended"
    assert view.stop == run.stop
    assert view.counts.tests == 1500
    assert view.counts.distinct_faults == last.distinct_faults > 20
    assert view.faults.n == len(run.faults) == view.faults.n_listed
    assert asdict(view.fault_rate) == summary["fault_rate"]
    assert asdict(view.residual_risk) == summary["residual_risk"]
    assert asdict(view.reach["faults"]) == summary["reachable_faults"]
    assert asdict(view.reach["seeds"]) == summary["reachable_seeds"]
    assert view.reach["found"] == last.distinct_faults
    assert view.coverage["interval"] == summary["coverage_interval"]
    assert view.verdict == run.verdict
    assert view.verdict.tone == "broken"
    assert [each["number"] for each in view.rounds] == [each.number for each in run.rounds]
    assert view.normality == summary["normality"]
    assert asdict(view.seconds) == summary["seconds"]
    assert view.task == "wrong"


def test_rows_are_the_faults_with_the_most_telling_first(digits_run):
    run, out = digits_run
    columns = read_view(out).faults.columns
    by_id = {fault.id: fault for fault in run.faults}
    assert {len(column) for name, column in columns.items() if name != "theta"} == {len(by_id)}
    for k, id in enumerate(columns["id"]):
        fault = by_id[id]
        assert (columns["seed_id"][k], columns["answer"][k]) == (fault.seed_id, fault.answer)
        assert columns["confidence"][k] == pytest.approx(fault.confidence, rel=1e-4)
        assert [each[k] for each in columns["theta"]] == pytest.approx(list(fault.theta.values()), rel=1e-4)
        assert columns["layer"][k] == max(range(len(fault.signature)), key=[*fault.signature.values()].__getitem__)
    pairs = list(zip(columns["seed_id"], columns["answer"], strict=True))
    n = run.rounds[-1].distinct_faults
    assert len(set(pairs[:n])) == n == len(set(pairs))  # each seed and wrong answer once before any twice


def test_the_strength_is_that_of_the_theta_with_the_largest_share(digits_run):
    run, out = digits_run
    columns = read_view(out).faults.columns
    assert [t.identity for t in run.start.theta] == [0, 0]
    theta = np.abs(np.array(columns["theta"]).T)
    shares = theta / [t.high for t in run.start.theta]  # rotate goes as far one way as the other
    assert columns["strength"] == pytest.approx(shares.max(1).tolist(), rel=1e-3)


def test_the_matrix_counts_distinct_faults(digits_run):
    run, out = digits_run
    matrix = read_view(out).matrix
    assert np.sum(matrix["distinct"]) == run.rounds[-1].distinct_faults
    assert np.sum(matrix["faults"]) == len(run.faults)
    r, c = np.unravel_index(np.argmax(matrix["faults"]), np.shape(matrix["faults"]))
    said = [f for f in run.faults if (f.clean_answer, f.answer) == (matrix["rows"][r], matrix["columns"][c])]
    assert len(said) == matrix["faults"][r][c]
    assert len({f.seed_id for f in said}) == matrix["distinct"][r][c]


def test_rates_by_theta_are_those_of_the_uniform_stream(digits_run):
    run, out = digits_run
    uniform = [fault for fault in run.faults if fault.stream == "uniform"]
    rates = read_view(out).rates
    assert [each.name for each in rates] == [t.name for t in run.start.theta]
    for each in rates:
        assert sum(part.tests for part in each.parts) == 300  # a fifth of all
        assert sum(part.faults for part in each.parts) == len(uniform)
        assert all(part.rate_low <= part.rate <= part.rate_high for part in each.parts)
    sigma = rates[0].parts
    strong = [fault.theta["sigma"] >= sigma[-1].low for fault in uniform]
    assert sum(strong) == sigma[-1].faults


def test_random_disturbances_by_strength_are_those_of_the_uniform_stream(digits_run):
    run, out = digits_run
    view = read_view(out)
    assert tuple(view.strengths) == run.correct_by_strength
    assert sum(part.tests for part in view.strengths) == 300
    n_faults = sum(fault.stream == "uniform" for fault in run.faults)
    total = sum(part.tests * part.correct.value for part in view.strengths)
    assert total == pytest.approx(300 - n_faults, abs=8)  # means over seeds, not over tests
    assert all(part.correct.low <= part.correct.value <= part.correct.high for part in view.strengths)


def test_layers_have_coverage_sensitivity_and_their_share(digits_run):
    run, out = digits_run
    layers = read_view(out).layers
    assert [each["name"] for each in layers] == [each.name for each in run.start.layers]
    assert {each["name"]: each["coverage"] for each in layers} == run.judged.by_layer
    assert sum(each["share"] for each in layers) == pytest.approx(1, abs=0.01)
    for each in layers:
        assert 0 <= each["sensitivity"].low <= each["sensitivity"].high
        assert each["sensitivity"].mean > 0


def test_pictures_show_kept_faults_and_each_seed_once(digits_run):
    _, out = digits_run
    view = read_view(out, most_pictures=50)
    inputs = view.inputs
    assert inputs.kind == "pictures"
    assert inputs.shape == (1, 28, 28)
    assert list(inputs.disturbed) == view.faults.columns["id"][:50]
    assert set(inputs.clean) == set(view.faults.columns["seed_id"][:50])
    assert read_view(out, most_pictures=0).inputs.kind == "none"


def test_faults_belong_to_groups(digits_run):
    run, out = digits_run
    view = read_view(out)
    assert sum(each["faults"] for each in view.groups) == len(run.faults)
    counted = np.bincount(view.faults.columns["group"])
    assert counted.tolist() == [each["faults"] for each in view.groups]


def test_the_weakest_faults_give_a_curve_and_shrinking_improves_it(digits_run, tmp_path):
    run, out = digits_run
    found = read_view(out).breaking
    assert "as the campaign found it" in found["source"]
    assert found["points"][0] == [0, 1]
    failing, seeds = run.rounds[-1].failing_seeds, run.start.n_usable
    assert found["points"][-1] == [1, pytest.approx(1 - failing / seeds, abs=1e-4)]
    curve = Robustness(np.array([0.2, 0.4, np.inf, np.inf])).as_dict()
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    (copy / "shrunk.json").write_text(json.dumps({"faults": [], "robustness": curve}))
    better = read_view(copy).breaking
    assert [each[:2] for each in better["points"]] == [[0, 1], [0.2, 0.75], [0.4, 0.5], [1, 0.5]]
    assert "2 of 4 seeds broke" in better["source"]


def test_a_view_of_a_running_campaign(tmp_path, written_at_once):
    views = []

    class Look(themis.Callback):
        def on_round(self, round):
            views.append(read_view(tmp_path / "run"))

    run_small(tmp_path / "run", small_net(3), pictures(), magnitude=0.5, max_tests=800, callbacks=[Look()])
    assert len(views) >= 2
    assert {each.state for each in views} == {"running"}
    assert views[-1].stop == "The campaign is still running."
    assert views[-1].verdict.text.startswith("So far, ")
    assert views[-1].fault_rate.low < views[-1].fault_rate.value
    assert views[0].counts.tests < views[-1].counts.tests
    assert views[-1].groups == []
    ended = read_view(tmp_path / "run")
    assert ended.fault_rate == views[-1].fault_rate  # the last round's, from the checkpoint as from the summary
    assert_survives_json(views[-1])


def test_a_view_without_a_fault(tmp_path):
    run_small(tmp_path / "run", small_net(3), pictures(), magnitude=1e-6)
    view = read_view(tmp_path / "run")
    assert view.verdict.tone == "standing"
    assert view.verdict.text.startswith("No fault in 400 tests on 60 seeds under gaussian")
    assert view.faults.columns["id"] == []
    assert view.matrix["rows"] == []
    assert view.breaking is None
    assert_survives_json(view)


def test_a_view_without_a_uniform_stream(tmp_path):
    run_small(tmp_path / "run", small_net(3), pictures(), magnitude=0.5, uniform_share=0.0)
    view = read_view(tmp_path / "run")
    assert view.fault_rate is None
    assert view.rates == []
    assert "random" not in view.verdict.text


TASKS = {
    "wrong": (small_net(3), (pictures(), small_net(3)(pictures()).argmax(1)), "auto", "wrong"),
    "unlabelled": (small_net(3), pictures(), "auto", "changed"),
    "regression": (small_net(1), pictures(), "regression:0.05", "regression"),
    "multilabel": (small_net(4), pictures(), "multilabel", "multilabel"),
    "threshold": (small_net(1), pictures(), "threshold", "threshold"),
    "own": (small_net(3), pictures(), Compare(lambda a, b, labels: a.argmax(1) != b.argmax(1)), None),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_view_of_each_task(task, tmp_path):
    net, data, oracle, name = TASKS[task]
    run = run_small(tmp_path / "run", net, data, oracle=oracle, magnitude=0.6)
    view = read_view(tmp_path / "run")
    assert len(run.faults) > 0
    assert_survives_json(view)
    assert name is None or view.task == name
    assert all(fault.answer in view.outcomes for fault in run.faults)
    assert np.sum(view.matrix["distinct"]) == run.rounds[-1].distinct_faults
    columns = view.faults.columns
    if task == "regression":
        assert set(view.outcomes.values()) <= {"smaller", "larger"}
        assert None not in columns["value"] + columns["clean_value"]
    if task == "multilabel":
        assert all(each.endswith("flipped") for each in view.outcomes.values())
    if task == "unlabelled":
        assert set(columns["label"]) == {None}


def test_outputs_that_are_not_finite(tmp_path):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x):
            mean = self.relu(x).flatten(1).mean(1)
            return torch.stack([mean, 1 - mean], 1) / (mean < 0.55)[:, None]

    run_small(tmp_path / "run", Fragile(), pictures() * 0.9, "brightness", magnitude=0.5)
    view = read_view(tmp_path / "run")
    assert_survives_json(view)
    assert view.outcomes[-1] == "not finite"
    at = view.faults.columns["answer"].index(-1)
    assert view.faults.columns["margin"][at] is None
