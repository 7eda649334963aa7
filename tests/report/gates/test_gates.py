"""Gates on real runs, and the files that they write for CI systems."""

import json
import shutil
from xml.etree import ElementTree

import pytest
import torch
from junit_schema import complaints
from torch import nn

import themis
from themis.errors import StoreError, UsageError
from themis.report.gates.gates import METRICS, GateResult, GateResults, Gates, check_gates, write_junit, write_markdown
from themis.report.gates.results import legal
from themis.runs.display.text import about

pytestmark = pytest.mark.xdist_group("gates")


def net(limit=0.5):
    """A net that tells whether the mean of an input exceeds a limit."""

    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.over = nn.ReLU(), nn.Parameter(torch.tensor(limit))

        def forward(self, x):
            over = self.relu(x).flatten(1).mean(1) - self.over
            return torch.stack([-over, over], 1)

    return Mean()


def data():
    means = torch.cat([torch.linspace(0.3, 0.4, 60), torch.full((60,), 0.1)]).view(-1, 1, 1, 1)
    return means + 0.02 * torch.rand(120, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.zeros(120).long()


def campaign(limit=0.5, **options):
    options = {"max_tests": 600, "policy": "random", **options}
    return themis.run(net(limit), data(), "brightness", **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    campaign(out=folder)
    return folder


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the run folder that a test may damage."""
    shutil.copytree(run, tmp_path / "copy")
    return tmp_path / "copy"


def by_gate(results):
    return {result.gate: result for result in results.results}


def test_gates_pass_within_their_limits_and_fail_beyond_them(run):
    summary = json.loads((run / "summary.json").read_text())
    high = summary["fault_rate"]["high"]
    good = check_gates(
        run, Gates.of(["coverage=0.2", "clean_accuracy=1"], max_fault_rate=high + 1e-6, allow_constant=True)
    )
    assert not good.has_failed
    assert [line.split()[0] for line in good.lines] == ["passed"] * 4
    assert good.sentence == "All 4 gates passed."
    bad = check_gates(
        run, Gates.of({"coverage_low": 1.0, "clean_accuracy": 1.0}, max_fault_rate=high - 1e-6, allow_constant=True)
    )
    found = by_gate(bad)
    assert bad.has_failed
    assert found["clean_accuracy"].has_passed
    assert found["max_fault_rate"].value == high
    assert found["max_fault_rate"].line.startswith("FAILED  max_fault_rate: ")
    advice = "the rate itself is within the limit: more seeds and tests narrow the interval"
    assert advice in found["max_fault_rate"].line
    assert len(set(found["max_fault_rate"].text.replace(",", "").split()) & {f"{100 * (high - 1e-6):.4f}%"}) == 1
    strict = by_gate(check_gates(run, Gates.of(max_fault_rate=0.001, allow_constant=True)))["max_fault_rate"]
    assert f"retrain on the faults (themis retrain {run} --judge DATA," in strict.remedy


def test_retraining_needs_no_other_data_if_the_run_was_split(tmp_path):
    campaign(out=tmp_path / "split", split=(0.5, 0.2, 0.3))
    result = by_gate(check_gates(tmp_path / "split", Gates.of(max_fault_rate=0.001, allow_constant=True)))[
        "max_fault_rate"
    ]
    assert f"retrain on the faults (themis retrain {tmp_path / 'split'}, or" in result.remedy


def test_retraining_is_no_advice_for_a_black_box():
    box = themis.BlackBox(lambda inputs: net()(torch.as_tensor(inputs)).detach().numpy(), bounds=(0, 1))
    run = themis.run(box, data(), "brightness", max_tests=300, policy="random")
    result = by_gate(check_gates(run, Gates.of(max_fault_rate=0.001, allow_constant=True)))["max_fault_rate"]
    assert result.remedy == "improve the model, or raise the limit"


def test_a_model_that_is_no_better_than_a_constant_passes_no_limit_on_faults(run, tmp_path):
    summary = json.loads((run / "summary.json").read_text())
    assert summary["constant"] == "all 120 clean answers are the same"  # all labels too
    result = by_gate(check_gates(run, Gates.of("coverage=0.2", max_fault_rate=1.0)))["max_fault_rate"]
    assert not result.has_passed
    assert result.text.endswith(
        "within the limit of 100.0%, but all 120 clean answers are the same, so that it says nothing"
    )
    assert result.remedy.endswith("or accept it with --allow-constant (allow_constant=True)")
    assert not check_gates(run, Gates.of("coverage=0.2", max_fault_rate=1.0, allow_constant=True)).has_failed
    assert not Gates.of(allow_constant=True)  # it is no limit
    varied = data()[0].clone()
    varied[:60] += 0.5
    good = themis.run(net(), (varied, (torch.arange(120) < 60).long()), "brightness", max_tests=100)
    assert good.start.constant is None
    assert not check_gates(good, Gates.of(max_fault_rate=1.0)).has_failed


def test_a_run_in_memory_has_the_same_results_as_its_folder(run):
    gates = Gates.of("coverage=0.2,coverage_all=0.2", max_fault_rate=0.9)
    made, read = check_gates(campaign(), gates), check_gates(run, gates)
    assert [each.value for each in made.results] == [each.value for each in read.results]
    assert [fault.id for fault in made.telling] == [fault.id for fault in read.telling]
    assert (made.run, made.folder, read.folder) == ("the run", None, run)
    assert check_gates(campaign(), gates, folder=run).folder == run


def test_new_faults_do_not_break_the_model_of_the_baseline():
    base, same, worse = campaign(), campaign(random_seed=5), campaign(0.45, random_seed=6)
    kept = check_gates(same, Gates.of(max_new_faults=0, baseline=base))
    assert not kept.has_failed
    assert by_gate(kept)["max_new_faults"].value == 0
    lost = check_gates(worse, Gates.of(max_new_faults=0, baseline=base))
    result = by_gate(lost)["max_new_faults"]
    assert lost.has_failed
    assert result.value == len(lost.diff.new) > 0
    assert "The model after is worse" in result.text
    assert [fault.id for fault in lost.telling] == [fault.id for fault in lost.diff.new_faults[:3]]
    allowed = check_gates(worse, Gates.of(max_new_faults=int(result.value), baseline=base))
    assert not allowed.has_failed


def test_faults_that_could_not_be_compared_do_not_pass():
    base, strong = campaign(magnitude=0.001), campaign(magnitude=1.0)
    assert len(strong.faults)
    result = by_gate(check_gates(strong, Gates.of(max_new_faults=0, baseline=base)))["max_new_faults"]
    assert result.value == 0
    assert not result.has_passed
    assert "could not be compared" in result.text


@pytest.mark.parametrize(
    "name", ["coverage", "coverage_all", "coverage_low", "coverage_uniform", "recall", "clean_accuracy"]
)
def test_every_metric_of_this_run_has_a_result(run, name):
    result = by_gate(check_gates(run, Gates.of({name: 0.0})))[name]
    assert result.has_passed
    assert METRICS[name].about in result.text


def test_figures_that_a_run_does_not_have_are_refused(run, tmp_path):
    with pytest.raises(UsageError, match="clean_iou needs a figure that the run does not have: the task is not a segm"):
        check_gates(run, Gates.of("clean_iou=0.5"))
    with pytest.raises(UsageError, match="the campaign had no criterion: run it with --criterion NAME"):
        check_gates(run, Gates.of("criterion=0.5"))
    alone = campaign(uniform_share=0.0, out=tmp_path / "searched")
    with pytest.raises(UsageError, match="needs uniform tests, but the run has none: run it with --uniform-share"):
        check_gates(alone, Gates.of(max_fault_rate=0.5))
    with pytest.raises(UsageError, match="needs a uniform_share above 0"):
        Gates.of(max_fault_rate=0.5).check_ahead(0.0)
    with pytest.raises(UsageError, match="no uniform tests: run it with --uniform-share"):
        check_gates(tmp_path / "searched", Gates.of("coverage_uniform=0.5"))


def test_the_recall_is_gated_by_the_faults_within_reach():
    some = campaign(max_tests=300, coverage=None)
    recall, more = some.summary()["recall"], some.summary()["forecast_faults_tests"]
    assert 0 < recall < 0.9
    failed = by_gate(check_gates(some, Gates.of("recall=0.9")))["recall"]
    assert not failed.has_passed
    assert failed.value == recall
    assert failed.remedy.startswith(f"{about(more)} more tests are forecast: ")
    assert by_gate(check_gates(some, Gates.of({"recall": recall})))["recall"].has_passed


def test_without_a_fault_the_residual_risk_decides_on_the_recall():
    few, many = (campaign(limit=2.0, max_tests=n, coverage=None) for n in (1000, 2500))
    failed, passed = (by_gate(check_gates(run, Gates.of("recall=0.9")))["recall"] for run in (few, many))
    assert not few.faults
    assert (failed.has_passed, passed.has_passed) == (False, True)
    assert failed.text == "no fault was found; the residual risk is at most 1.8%, at most 1.0% allowed"
    assert passed.text == "no fault was found; the residual risk is at most 0.7%, at most 1.0% allowed"


def test_a_criterion_is_gated_by_its_score():
    led = campaign(criterion="nc", max_tests=200)
    score = led.summary()["criterion"]["score"]
    assert not check_gates(led, Gates.of({"criterion": score})).has_failed
    assert check_gates(led, Gates.of({"criterion": score + 0.01})).has_failed


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fail_under": "coverag=0.9"}, "known METRIC=NUMBER, got 'coverag': did you mean 'coverage'"),
        ({"fail_under": "coverage"}, "coverage must be a number in 0..1, got '': write coverage=0.99 for 99%"),
        ({"fail_under": "coverage=much"}, "must be a number in 0..1, got 'much'"),
        ({"fail_under": "coverage=97.5"}, "must be a number in 0..1, got '97.5': write coverage=0.99 for 99%"),
        ({"fail_under": {"coverage": -1}}, "must be a number in 0..1, got -1"),
        ({"fail_under": "criterion=nan"}, "the limit on criterion must be a number, got 'nan'"),
        ({"max_fault_rate": 5}, "max_fault_rate must lie in 0..1, got 5: write 0.05 for 5%"),
        ({"max_new_faults": -1, "baseline": "x"}, "max_new_faults must be 0 or more"),
        ({"max_new_faults": 0}, "max_new_faults and baseline must be given together, but baseline is missing"),
        ({"baseline": "x"}, "baseline and max_new_faults must be given together, but max_new_faults is missing"),
    ],
)
def test_wrong_limits_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        Gates.of(**options)


def test_without_limits_the_only_gate_is_the_end_of_the_campaign(run, copy):
    assert not Gates.of()
    assert "no limit was set" in check_gates(run, Gates.of()).sentence
    summary = json.loads((copy / "summary.json").read_text())
    (copy / "summary.json").write_text(json.dumps({**summary, "stop_reason": "user", "stop": "the user stopped it"}))
    early = check_gates(copy, Gates.of())
    assert early.has_failed
    assert f"the campaign ended early: resume it with themis resume {copy}" in early.lines[0]


def test_runs_that_cannot_be_checked_are_refused_with_a_reason(copy, tmp_path):
    with pytest.raises(UsageError, match=r"a run must be a folder with run.sqlite, but .*nowhere is not one"):
        check_gates(copy, Gates.of(max_new_faults=0, baseline=tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"a run must be a folder with run.sqlite"):
        check_gates(tmp_path / "nowhere", Gates.of())
    messages = {"[]": "its content must be an object with names and values", "{": "is damaged"}
    for damage, says in messages.items():
        (copy / "summary.json").write_text(damage)
        with pytest.raises(StoreError, match=says):
            check_gates(copy, Gates.of())
    (copy / "summary.json").unlink()
    with pytest.raises(StoreError, match="was killed: resume it with themis resume"):
        check_gates(copy, Gates.of())
    (copy / "run.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(StoreError, match=r"run\.sqlite cannot be read"):
        check_gates(copy, Gates.of())


@pytest.fixture(scope="module")
def failed(run):
    """Results with one failed gate."""
    return check_gates(run, Gates.of("coverage=0.2", max_fault_rate=0.0))


def test_junit_has_one_case_per_gate_in_the_order_of_the_schemas(failed, run, tmp_path):
    write_junit(tmp_path / "gates.xml", failed, report=run / "report.html")
    root = ElementTree.parse(tmp_path / "gates.xml").getroot()
    assert complaints(tmp_path / "gates.xml") == []
    (suite,) = root
    tags = [child.tag for child in suite]
    assert tags == ["properties", "testcase", "testcase", "testcase", "system-out", "system-err"]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "0")
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {"campaign", "coverage", "max_fault_rate"}
    assert all(case.get("classname") and float(case.get("time")) >= 0 for case in cases.values())
    assert [len(case) for case in cases.values()] == [0, 0, 1]
    (failure,) = cases["max_fault_rate"]
    assert (failure.tag, failure.get("type")) == ("failure", "GateFailed")
    assert "over the limit of 0.0%" in failure.get("message")
    out = suite.find("system-out").text
    assert len(failed.telling) == 3
    for fault in failed.telling:
        assert f"fault {fault.id}: seed {fault.seed_id}, " in out
    assert f"themis replay {run} {' '.join(str(fault.id) for fault in failed.telling)}" in out
    assert out.endswith(f"report: {run / 'report.html'}")


HOSTILE = "a\x00b\x0b\ud800\uffff<script>]]>&|`x`\U0001f600"


def test_markup_and_characters_that_xml_does_not_allow_are_text(failed, tmp_path):
    assert legal(HOSTILE) == "a\ufffdb\ufffd\ufffd\ufffd<script>]]>&|`x`\U0001f600"
    some = GateResults(HOSTILE, (GateResult("x", False, 1.0, 0.0, HOSTILE, HOSTILE),), failed.summary, failed.telling)
    members = (("some", some), ("failed", failed))
    write_junit(tmp_path / "hostile.xml", GateResults("suite", (), {}, folder=tmp_path, members=members))
    suites = ElementTree.parse(tmp_path / "hostile.xml").getroot()
    assert complaints(tmp_path / "hostile.xml") == []
    assert [suite.get("id") for suite in suites] == ["0", "1"]
    assert suites[0].find("testcase/failure").get("message") == legal(HOSTILE)
    write_markdown(tmp_path / "hostile.md", some)
    text = (tmp_path / "hostile.md").read_text()
    assert "<script>" not in text
    assert r"\<script\>" in text


def test_the_markdown_summary_is_appended(failed, run, tmp_path):
    page = tmp_path / "summary.md"
    page.write_text("# Before\n")
    write_markdown(page, failed, report="report.html")
    text = page.read_text()
    assert text.startswith("# Before\n## ❌ Themis: 1 of 3 gates failed: max\\_fault\\_rate.")
    assert "| ✅ passed | coverage | " in text
    assert "| ❌ failed | max\\_fault\\_rate | " in text
    rate = failed.summary["fault_rate"]
    assert f"{100 * rate['value']:.2f}% on average over seeds (95%: {100 * rate['low']:.2f}% to " in text
    assert f"Replay them: `themis replay {run} " in text
    assert "Report: `report.html`" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in rows if "---" not in line} == {1, 3}


def test_a_passing_run_without_faults_lists_no_faults(tmp_path):
    calm = check_gates(campaign(2.0, max_tests=100), Gates.of(max_fault_rate=0.5, allow_constant=True))
    assert (calm.has_failed, calm.telling) == (False, ())
    write_junit(tmp_path / "calm.xml", calm)
    write_markdown(tmp_path / "calm.md", calm)
    assert "most telling" not in (tmp_path / "calm.md").read_text()
    assert complaints(tmp_path / "calm.xml") == []
    assert ElementTree.parse(tmp_path / "calm.xml").getroot()[0].get("failures") == "0"


def test_a_file_that_cannot_be_written_is_reported(failed, tmp_path):
    with pytest.raises(UsageError, match=r"must be in an existing folder, .*no does not exist"):
        write_junit(tmp_path / "no" / "gates.xml", failed)
    with pytest.raises(StoreError, match="cannot be written"):
        write_markdown(tmp_path / "no" / "gates.md", failed)
