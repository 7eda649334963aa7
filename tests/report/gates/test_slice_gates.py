"""Gates per slice, and the slices of a run: on real campaigns with one class or kind of input that is weak."""

import json
from contextlib import closing
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from junit_schema import complaints
from torch import nn

import themis
from themis.cli import main
from themis.errors import DataError, UsageError
from themis.judge.risk import fault_rate
from themis.report.gates.gates import Gates, check_gates
from themis.report.page import read_view
from themis.runs.display.text import summary_rows
from themis.runs.estimates import read_progress
from themis.runs.store.reader import Reader

pytestmark = pytest.mark.xdist_group("slice-gates")
N = 400
WEATHER = ["night" if k % 4 == 0 else "hail" if k in (1, 2, 3) else "day" for k in range(N)]


class Net(nn.Module):
    """Its first value says the class; a tenth of brightness breaks only inputs whose second value is 1."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(x).flatten(1)
        is_broken = (x[:, 2] > 0.3) & (x[:, 1] > 0.9)
        odd = (x[:, 0] > 0.5) ^ is_broken
        return torch.stack([1.0 - 2 * odd.float(), 2 * odd.float() - 1.0], 1)


def data():
    k = torch.arange(N)
    odd, is_night = (k // 4 % 2).float(), (k % 4 == 0).float()
    return torch.stack([0.2 + 0.6 * odd, 0.2 + 0.8 * is_night, torch.full((N,), 0.25)], 1), odd.long()


def moved(inputs, theta, rng, context):
    return torch.cat([inputs[:, :2], inputs[:, 2:] + theta[:, :1]], 1)


SHIFT = themis.Perturbation("shift", (themis.Theta("by", 0, 0.1),), moved, is_random=False)
OPTIONS = {"policy": "random", "uniform_share": 1.0, "max_tests": 1600, "plateau": None}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("tables") / "scenes.csv"
    rows = (f"{weather},frame{k},{k / 7:.3f}" for k, weather in enumerate(WEATHER))
    path.write_text("weather,frame,hour\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture(scope="module")
def run(table, tmp_path_factory):
    target = themis.Target(Net(), bounds=(0, 1))
    out = tmp_path_factory.mktemp("runs") / "run"
    return themis.run(target, data(), SHIFT, out=out, slice_by=f"class,{table}:weather", **OPTIONS)


def words(results):
    return {result.gate: result.word for result in results.results}


def test_only_the_weak_slice_is_worst(run):
    assert [rate.name for rate in run.worst_slices] == ["weather night"]
    night = run.worst_slices[0]
    assert (night.seeds, night.at_least > run.fault_rate.high) == (100, True)
    assert [rate.name for rate in run.slices] == ["class 0", "class 1", "weather day", "weather hail", "weather night"]
    assert dict(summary_rows(run))["worst slices"].startswith("weather night ")
    view = read_view(run.folder)
    assert (view.slices, view.worst_slices) == (run.slices, ["weather night"])


def test_a_gate_fails_for_the_slice_over_the_limit_and_skips_those_too_small(run):
    results = run.gate(max_fault_rate=0.2, allow_constant=True)
    assert words(results) == {
        "campaign": "passed",
        "max_fault_rate": "passed",
        "slices": "passed",
        "max_fault_rate[class 0]": "passed",
        "max_fault_rate[class 1]": "passed",
        "max_fault_rate[weather day]": "passed",
        "max_fault_rate[weather hail]": "skipped",
        "max_fault_rate[weather night]": "FAILED",
    }
    lines = {result.gate: result.text for result in results.results}
    needed = "4 of 5 slices can be judged, which takes 9 tested seeds"
    assert lines["slices"] == f"{needed}; the smallest of them is weather night with 100"
    assert lines["max_fault_rate[weather hail]"].endswith("; 9 are needed to judge it")
    assert words(check_gates(run.folder, Gates.of(max_fault_rate=0.2))) == words(results)


def test_the_limits_of_slices_are_those_of_fault_rate(run):
    night = run.worst_slices[0]
    with closing(Reader(run.folder)) as reader:
        progress = read_progress(reader)
    mine = np.array(WEATHER) == "night"
    counts = progress.uniform_tests_by_seed[mine], progress.uniform_faults_by_seed[mine]
    assert night.fault_rate == fault_rate(*counts)
    assert night.at_least == fault_rate(*counts, tail=0.05 / 5).low


def test_a_finished_run_is_divided_by_other_columns_without_its_model(run, table, tmp_path):
    results = check_gates(run.folder, Gates.of(max_fault_rate=0.2, slice_by=f"{table}:hour"))
    assert next(gate for gate in words(results) if "[" in gate) == "max_fault_rate[hour 0 to 14.25]"
    junit, page = tmp_path / "gates.xml", run.folder / "report.html"
    run.report()
    limits = ["--max-fault-rate", "0.2", "--slice-by", f"{table}:weather", "--junit", str(junit)]
    assert main(["gate", str(run.folder), *limits, "--quiet"]) == 1
    assert complaints(junit) == []
    (suite,) = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("6", "1", "1")
    cases = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert cases["max_fault_rate[weather night]"] == ["failure"]
    assert cases["max_fault_rate[weather hail]"] == ["skipped"]
    assert cases["max_fault_rate[weather day]"] == []
    rows = json.loads((run.folder / "gates.json").read_text())["rows"]
    assert [row["gate"] for row in rows if not row["is_judged"]] == ["max_fault_rate[weather hail]"]
    assert "are needed to judge it" in page.read_text()


def test_slices_that_are_all_too_small_do_not_pass(run, table):
    results = check_gates(run.folder, Gates.of(max_fault_rate=0.9999, slice_by=f"{table}:weather"))
    assert words(results)["slices"] == "FAILED"
    assert {words(results)[f"max_fault_rate[weather {each}]"] for each in ("day", "night", "hail")} == {"skipped"}


def test_a_slice_without_a_test_is_listed(table):
    inputs, labels = data()
    labels[1:4] = 1 - labels[1:4]  # the model is wrong on clean hail, which is then not tested
    target = themis.Target(Net(), bounds=(0, 1))
    run = themis.run(target, (inputs, labels), SHIFT, slice_by=f"{table}:weather", **OPTIONS)
    hail = run.slices[1]
    assert (hail.name, hail.tests, hail.fault_rate, hail.at_least) == ("weather hail", 0, None, 0.0)
    assert words(run.gate(max_fault_rate=0.2, allow_constant=True))["max_fault_rate[weather hail]"] == "skipped"


def test_slices_of_a_run_with_weights_are_weighted(table, tmp_path):
    weights = tmp_path / "often.csv"
    weights.write_text("often\n" + "\n".join("9" if k % 8 else "1" for k in range(N)))
    target = themis.Target(Net(), bounds=(0, 1))
    options = {**OPTIONS, "seed_weights": f"{weights}:often", "out": tmp_path / "run"}
    run = themis.run(target, data(), SHIFT, slice_by=f"{table}:weather", **options)
    again = check_gates(run.folder, Gates.of(max_fault_rate=0.2, slice_by=f"{table}:weather"))
    assert again.results[2:] == check_gates(run.folder, Gates.of(max_fault_rate=0.2)).results[2:]


def test_a_table_may_be_a_part_of_a_sample(table, tmp_path):
    target = themis.Target(Net(), bounds=(0, 1))
    run = themis.run(target, data(), SHIFT, slice_by=f"{table}:weather", max_seeds=100, **OPTIONS)
    assert [rate.name for rate in run.worst_slices] == ["weather night"]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ("{table}:nothing", "must have the column 'nothing': known: frame, hour, weather"),
        ("{table}:frame", "slice_by needs columns with 2 to 100 values, or numbers, but .*:frame has fewer or more"),
        ("{table}:weather,{table}:weather", "slice_by must name each column once"),
        ("weather", "slice_by must be FILE:COLUMN, or about class, got 'weather'"),
        ("missing.csv:weather", "slice_by must name a CSV table"),
        ("{short}:weather", "must have a row per input, but has 2 for at least 400"),
    ],
)
def test_columns_that_are_none_are_refused_before_the_first_test(run, table, tmp_path, column, reason):
    short = tmp_path / "short.csv"
    short.write_text("weather\nday\nnight\n")
    slice_by = column.format(table=table, short=short)
    with pytest.raises((UsageError, DataError), match=reason):
        check_gates(run.folder, Gates.of(max_fault_rate=0.2, slice_by=slice_by))
    net, answered = Net(), []
    net.register_forward_hook(lambda module, inputs, output: answered.append(len(output)))
    with pytest.raises((UsageError, DataError), match=reason):
        themis.run(net, data(), SHIFT, slice_by=slice_by, max_tests=100)
    assert sum(answered) < 100, "the clean inputs may be many, and the model slow"


def test_slices_without_a_limit_are_refused():
    with pytest.raises(UsageError, match="slice_by needs a limit, but max_fault_rate is missing"):
        Gates.of({"coverage": 0.5}, slice_by="class")
    with pytest.raises(UsageError, match=r"slice_by must be text such as class,scenes\.csv:weather, got 3"):
        themis.run(Net(), data(), SHIFT, slice_by=3)


def test_a_run_that_stops_when_it_has_decided_has_no_slices(tmp_path):
    with pytest.raises(UsageError, match="slice_by must be left out with decide, which stops before slices are known"):
        themis.run(Net(), data(), SHIFT, slice_by="class", decide="fault_rate<=0.5")
    target = themis.Target(Net(), bounds=(0, 1))
    run = themis.run(target, data(), SHIFT, out=tmp_path / "run", decide="fault_rate<=0.5")
    assert run.slices == ()
    with pytest.raises(UsageError, match="slice_by needs a run without a claim about the fault rate"):
        check_gates(run.folder, Gates.of(max_fault_rate=0.2, slice_by="class"))


def test_a_resumed_run_has_the_same_slices(run, table, tmp_path):
    target = themis.Target(Net(), bounds=(0, 1))
    options = {**OPTIONS, "max_tests": 800}
    themis.run(target, data(), SHIFT, out=tmp_path / "half", slice_by=f"class,{table}:weather", **options)
    again = themis.resume(tmp_path / "half", target, data(), perturbation=SHIFT, max_tests=1600)
    assert again.slices == run.slices
