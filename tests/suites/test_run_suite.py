"""A suite: its members are ordinary runs, the clean inputs are run once, and it resumes as if never stopped."""

import json
import re
import warnings
from contextlib import closing

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from suites import MEMBERS, classifier, pictures, small_suite

import themis
from themis import ModelError, UsageError
from themis.perturb import disturb
from themis.report.gates.gates import Gates, check_suite_gates
from themis.report.suite import read_suite_view
from themis.suites.budget import MemberProgress, fixed_steps, next_step
from themis.suites.definition import read_suite
from themis.suites.folder import SuiteFolder
from themis.suites.result import sentences, slice_sentences

pytestmark = pytest.mark.xdist_group("suites")


class StopAfter(themis.Callback):
    """Ctrl-C after some rounds of all members."""

    def __init__(self, n):
        self.n = n

    def on_round(self, round):
        self.n -= 1
        if self.n == 0:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return small_suite(tmp_path_factory.mktemp("suite") / "first")


def columns(run):
    return {name: np.asarray(values) for name, values in run.faults.columns.items()}


def assert_same_faults(first, second):
    first, second = columns(first), columns(second)
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_a_member_finds_what_a_run_of_its_own_finds(suite, tmp_path):
    net = classifier()
    steps = [step["max_tests"] for step in suite.record["schedule"] if step["member"] == "gaussian-0.4"]
    options = {"magnitude": 0.4, "uniform_share": 0.5}
    themis.run(net, pictures(net), "gaussian", out=tmp_path / "alone", max_tests=steps[0], **options)
    for n in steps[1:]:
        themis.resume(tmp_path / "alone", net, pictures(net), max_tests=n)
    alone = themis.open_run(tmp_path / "alone")
    assert len(alone.faults) > 10
    assert_same_faults(suite["gaussian-0.4"], alone)
    assert alone.rounds[-1].passes - suite["gaussian-0.4"].rounds[-1].passes == 120 + 11  # sweep, tracing and checks


def test_the_clean_inputs_are_run_once(suite):
    tests = sum(row.tests for row in suite.rows)
    graded = sum(grade["passes"] for grades in suite.record["grades"].values() for grade in grades)
    probes = 6 * len(suite)
    assert suite.record["passes"] == 120 + 11
    assert graded == 3 * 120
    assert suite.passes == 120 + 11 + graded + sum(row.passes for row in suite.rows)
    assert sum(row.passes for row in suite.rows) >= tests + probes
    assert tests == 600


def test_the_error_at_a_level_is_that_of_a_plain_loop(suite):
    net = classifier()
    inputs, labels = pictures(net)
    for name, spec, levels in (
        ("gaussian-0.4", "gaussian(sigma=0:0.4)", [{"sigma": 0.1}, {"sigma": 0.4}]),
        ("fog", "fog", [{"density": 1.8, "patchiness": 0.3, "scale": 0.5}]),
    ):
        with torch.no_grad():
            is_wrong = torch.stack([net(disturb(spec, inputs, theta)).argmax(1) != labels for theta in levels])
        wrong = is_wrong.double().mean(1).tolist()
        assert suite.errors[name] == pytest.approx(wrong, abs=1e-12)
        assert max(wrong) > 0.1
        assert suite.grades.wrong[name].tolist() == is_wrong.sum(0).tolist()
        for error, count in zip(suite.grades.level_errors[name], is_wrong.sum(1).tolist(), strict=True):
            limits = binomtest(count, 120).proportion_ci(0.95)
            assert (error.low, error.high) == pytest.approx((limits.low, limits.high), abs=1e-5)
        [row] = [row for row in suite.rows if row.name == name]
        assert row.error_interval == (suite.grades.member_errors[name].low, suite.grades.member_errors[name].high)
        assert row.error_interval[0] < row.error < row.error_interval[1]
    assert suite.clean_error == pytest.approx(0.1)
    assert suite.mean_score == pytest.approx(1 - np.mean([np.mean(levels) for levels in suite.errors.values()]))
    assert suite.grades.relative_score == pytest.approx(suite.mean_score / 0.9)


def test_mce_is_that_of_a_plain_loop(suite, tmp_path):
    other = small_suite(tmp_path / "other", version=3, max_tests=3)
    inputs, labels = pictures(classifier())
    errors = {}
    for seed in (0, 3):
        net = classifier(seed)
        with torch.no_grad():
            wrong = {
                "clean": [net(inputs)],
                "gaussian": [net(disturb("gaussian(sigma=0:0.4)", inputs, {"sigma": s})) for s in (0.1, 0.4)],
                "fog": [net(disturb("fog", inputs, {"density": 1.8, "patchiness": 0.3, "scale": 0.5}))],
            }
        errors[seed] = {
            name: [float((out.argmax(1) != labels).double().mean()) for out in outs] for name, outs in wrong.items()
        }
    ours, base = errors[0], errors[3]
    found = suite.corruption_errors(other)
    assert found.mce == pytest.approx(np.mean([sum(ours[c]) / sum(base[c]) for c in ("gaussian", "fog")]))
    assert found.mce_interval[0] < found.mce < found.mce_interval[1]
    said = " ".join(sentences(suite, found))
    assert re.search(r"Error \d+\.\d% \(95%: .* to .*\) on average over the levels", said)
    assert re.search(r"mCE \d+\.\d% \(95%: \d+\.\d% to \d+\.\d%\), against ", said)
    summary = json.loads(json.dumps(suite.summary()))
    assert summary["level_errors"]["fog"][0]["high"] > suite.errors["fog"][0]
    numbers = {"gaussian-0.4": base["gaussian"], "fog": base["fog"][0]}
    assert suite.corruption_errors(numbers).mce == pytest.approx(found.mce)
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    assert suite.corruption_errors(tmp_path / "numbers.json").mce == pytest.approx(found.mce)


@pytest.mark.parametrize(
    ("baseline", "message"),
    [
        ({"fog": 0.3}, "must have 'gaussian-0.4', which is missing; name a suite, or give errors by member"),
        ({"fog": 30, "gaussian-0.4": 0.2}, "fog must be a finite number from 0 to 1, got 30"),
        ({"fog": 0.3, "gaussian-0.4": [0.1]}, "gaussian-0.4 must be a finite number from 0 to 1, got a list of 1; "),
        (7, "the baseline must be an object with names and values, got 7; name a suite, or give errors"),
        ("nowhere.json", "a baseline that is no suite must be .* but nowhere.json is not: No such file"),
    ],
)
def test_a_baseline_that_does_not_fit_is_refused(suite, baseline, message):
    with pytest.raises(UsageError, match=message):
        suite.corruption_errors(baseline)


def test_the_members_of_a_suite_have_gates_per_slice(suite):
    results = check_suite_gates(suite, Gates.of(max_fault_rate=0.5, slice_by="class"))
    for _, of_member in results.members:
        slices = [result.gate for result in of_member.results if "[" in result.gate]
        assert len(slices) > 1
        assert all(gate.startswith("max_fault_rate[class ") for gate in slices)


def test_slices_are_those_of_the_members(suite):
    for row in suite.rows:
        assert row.slices == suite[row.name].slices
        assert {rate.column for rate in row.slices} == {"class"}
    worst = suite.worst_slices(100)
    assert {(row.member, row.rate) for row in worst} == {
        (name, rate) for name in suite for rate in suite[name].worst_slices
    }
    gaps = [row.rate.at_least - row.overall.value for row in worst]
    assert gaps == sorted(gaps, reverse=True)
    assert min(gaps) > 0

    said = r"Worst slice: class 3 under \S+, where at least \S+% of random disturbances fail, against .* overall\."
    lines = slice_sentences(suite)
    assert len(lines) == len(worst) > 0
    assert all(re.fullmatch(said, line) for line in lines)


def test_a_suite_is_divided_by_columns_of_a_table(tmp_path):
    (tmp_path / "halves.csv").write_text("half\n" + "\n".join(str(k % 2) for k in range(120)))
    suite = small_suite(tmp_path / "suite", slice_by=f"{tmp_path / 'halves.csv'}:half", max_tests=60)
    assert [rate.name for row in suite.rows for rate in row.slices] == ["half 0", "half 1"] * 3


@pytest.mark.parametrize("n_rounds", [2, 4])
def test_a_suite_that_was_stopped_ends_as_if_it_had_not_been(suite, tmp_path, n_rounds):
    net = classifier()
    data = pictures(net)
    stopped = themis.run_suite(
        net, data, {"members": MEMBERS}, out=tmp_path / "s", max_tests=600, callbacks=[StopAfter(n_rounds)]
    )
    assert stopped.state == "interrupted"
    assert stopped.tests < 600
    resumed = themis.resume_suite(tmp_path / "s", net, data)
    assert resumed.state == "ended"
    assert resumed.record["schedule"] == suite.record["schedule"]
    assert resumed.errors == suite.errors
    for name in suite:
        assert_same_faults(resumed[name], suite[name])
    again = themis.run_suite(net, data, {"members": MEMBERS}, out=tmp_path / "s", max_tests=600)
    assert again.record["schedule"] == suite.record["schedule"]  # nothing is left to do
    more = themis.resume_suite(tmp_path / "s", net, data, max_tests=700)
    assert more.tests == 700


def test_a_suite_whose_time_is_over_can_be_resumed(suite, tmp_path):
    net = classifier()
    data = pictures(net)
    stopped = themis.run_suite(net, data, {"members": MEMBERS}, out=tmp_path / "s", max_tests=600, max_seconds=1e-6)
    assert stopped.state == "out of time"
    assert stopped.tests < 600
    assert stopped.record["options"] == suite.record["options"]
    again = themis.resume_suite(tmp_path / "s", net, data, max_seconds=1e-6)
    assert again.state == "out of time"
    resumed = themis.resume_suite(tmp_path / "s", net, data)
    assert (resumed.state, resumed.tests) == ("ended", 600)
    assert_same_faults(resumed["fog"], suite["fog"])


def test_a_suite_is_compared_with_suites_only(suite):
    with pytest.raises(UsageError, match="a suite must be compared with a suite, got one suite and one run"):
        themis.diff(suite, suite.path / "fog")


REFUSED = {
    "another suite": ({"suite": ["fog"]}, "holds another suite"),
    "another share": ({"share": 0.9}, "share differs"),
    "another setting": ({"random_seed": 5}, "random_seed differs"),
    "fewer tests": ({"max_tests": 100}, "max_tests must be at least 600"),
    "a magnitude": ({"magnitude": 0.2}, "a suite does not take magnitude: give it to a member"),
    "a time limit": ({"max_seconds": 0}, "max_seconds must be positive"),
    "an unknown option": ({"max_test": 10}, "did you mean 'max_tests'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_a_stored_suite_is_refused(suite, name):
    net, (options, message) = classifier(), REFUSED[name]
    options = {"suite": {"members": MEMBERS}, "max_tests": 600, **options}
    with pytest.raises(UsageError, match=message):
        themis.run_suite(net, pictures(net), options.pop("suite"), out=suite.path, **options)


def test_another_model_or_a_foreign_folder_is_refused(suite, tmp_path):
    with pytest.raises(ModelError, match="the model must be the same as in the suite, but its hash is"):
        themis.resume_suite(suite.path, classifier(9), pictures(classifier()))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="contains other files"):
        small_suite(tmp_path)
    with pytest.raises(UsageError, match=r"a suite must be a folder with suite\.json"):
        themis.open_suite(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt"]


def test_a_damaged_suite_is_refused_in_words(suite, tmp_path):
    record = json.loads((suite.path / "suite.json").read_text())
    for change in ({"schedule": [{"member": "nobody", "max_tests": 1, "reason": "share"}]}, {"members": "x"}):
        (tmp_path / "suite.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(themis.StoreError, match="is damaged"):
            themis.open_suite(tmp_path)


def test_a_suite_without_a_process_that_runs_it_was_killed(suite, tmp_path):
    record = json.loads((suite.path / "suite.json").read_text())
    (tmp_path / "suite.json").write_text(json.dumps({**record, "state": "running"}))
    assert themis.open_suite(tmp_path).state == "killed"
    with closing(SuiteFolder(tmp_path)):
        assert themis.open_suite(tmp_path).state == "running"


def test_shares_follow_weights_and_the_rest_goes_where_faults_and_doubt_are():
    members = read_suite(["fog", {"perturb": "snow", "weight": 3}, {"perturb": "rain", "max_tests": 40}]).members
    assert [step.max_tests for step in fixed_steps(members, 1000, 0.5)] == [100, 300, 40]
    progress = {
        "fog": MemberProgress(100, True, 0.3, 0.1),
        "snow": MemberProgress(300, True, 0.01, 2.0),
        "rain": MemberProgress(40, True, 1.0, 9.0),  # has all the tests that it may have
    }
    first, second = (next_step(members, progress, k, 1000, 0.5) for k in range(2))
    assert (first.member, first.reason) == ("fog", "discovery")
    assert (second.member, second.reason) == ("snow", "uncertainty")
    assert next_step(members, progress, 0, 440, 0.5) is None
    closed = {**progress, "fog": MemberProgress(100, False, 0.3, 0.1), "snow": MemberProgress(300, False, 1, 1)}
    assert next_step(members, closed, 0, 1000, 0.5) is None


def test_a_suite_warns_once_of_a_model_that_guesses(tmp_path):
    net = classifier()
    inputs, labels = pictures(net)
    labels = torch.randint(4, labels.shape, generator=torch.Generator().manual_seed(0))
    with pytest.warns(RuntimeWarning, match="no better than always naming class") as caught:
        themis.run_suite(net, (inputs, labels), ["gaussian", "brightness"], out=tmp_path / "a", max_tests=60)
    assert len(caught) == 1


def test_a_suite_that_is_refused_leaves_its_folder_free(tmp_path):
    with pytest.raises(themis.ThemisError, match="seed_weights"):
        small_suite(tmp_path / "suite", seed_weights="missing.csv:often")
    with pytest.raises(themis.ThemisError, match=r"missing\.csv"):
        small_suite(tmp_path / "suite", slice_by=f"{tmp_path / 'missing.csv'}:place")
    small_suite(tmp_path / "suite")


def test_a_suite_of_attacks_and_of_data_without_labels_runs(tmp_path):
    net = classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        suite = themis.run_suite(
            net, pictures(net)[0][:40], ["fgsm", "gaussian"], out=tmp_path / "a", max_tests=60, max_seeds=30
        )
    assert suite.mean_score is None
    assert suite.clean_error is None
    assert suite.tests == 60
    with pytest.raises(UsageError, match="mCE needs members that are graded"):
        suite.corruption_errors({"fgsm": 0.1})


def test_a_notebook_shows_the_table(suite):
    html = suite._repr_html_()
    assert html.count("<tr>") == 1 + len(suite)
    assert "&lt;SuiteRun" in html


def gaussians(*magnitudes, **options):
    return [{"perturb": "gaussian", "magnitude": magnitude, **options} for magnitude in magnitudes]


def test_random_disturbances_name_the_most_fragile_if_their_intervals_tell_it_apart(tmp_path):
    suite = small_suite(tmp_path, members=gaussians(0.001, 5.0), max_tests=400)
    weak, strong = (row.fault_rate for row in suite.rows)
    assert strong.low > weak.high
    assert sentences(suite)[0].startswith(f"Most fragile under gaussian-5: {strong.value:.1%} of random disturbances")
    view = read_suite_view(suite)
    assert view["verdict"] == f"{sentences(suite)[0]} The fault rate is clearly above 5% under 1 of 2 perturbations."
    assert [row["name"] for row in view["members"]] == ["gaussian-5", "gaussian-0.001"]


def test_levels_name_the_most_fragile_if_random_disturbances_are_few(tmp_path):
    suite = small_suite(tmp_path, members=gaussians(0.001, 0.02, 0.4, 0.01, levels=3), max_tests=16)
    assert all(row.fault_rate.low == 0 for row in suite.rows)
    assert max(suite.rows, key=lambda row: row.error).name == "gaussian-0.4"
    share = f"{np.mean(suite.errors['gaussian-0.4']):.1%}"
    assert sentences(suite)[0].startswith(f"Most fragile under gaussian-0.4: {share} of answers are wrong on average")
    view = read_suite_view(suite)
    assert view["verdict"].startswith(sentences(suite)[0])
    assert view["levels"][0]["levels"] == ["strength 0.333333", "strength 0.666667", "strength 1"]


def test_without_levels_few_random_disturbances_name_no_most_fragile(tmp_path):
    suite = small_suite(tmp_path, members=gaussians(1.0, 2.0), max_tests=120)
    first, second = sorted((row.fault_rate for row in suite.rows), key=lambda rate: -rate.value)
    assert 0 < first.low < second.high
    assert re.fullmatch(r"Highest fault rate under gaussian-\d: .*; 1 other may be as high\.", sentences(suite)[0])


def test_a_model_withstands_a_suite_only_if_it_makes_no_errors_at_levels(tmp_path):
    robust = small_suite(tmp_path / "robust", members=gaussians(1e-6, 2e-6, levels=1), max_tests=8)
    assert read_suite_view(robust)["verdict"] == "The model withstood all 2 perturbations of this suite."
    assert sentences(robust)[0] == "No random disturbance failed."
    graded = small_suite(tmp_path / "graded", members=gaussians(1e-6, 0.2, levels=1), max_tests=4, uniform_share=1)
    assert not any(row.faults for row in graded.rows)
    assert read_suite_view(graded)["verdict"].startswith("Most fragile under gaussian-0.2: ")
