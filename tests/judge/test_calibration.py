"""Expected calibration errors: closed cases, and intervals that hold the truth in simulated campaigns."""

import json

import numpy as np
import pytest
import torch
from scipy.stats import norm
from tiny_pictures import make_data, make_net

import themis
from themis.judge.calibration import N_BINS, calibration_error, sum_gaps
from themis.report.page import read_view
from themis.runs.display.text import summary_rows


def error_of(seed, confidence, is_correct):
    gaps = sum_gaps(seed, np.asarray(confidence, np.float32), is_correct)
    return calibration_error(gaps, np.bincount(seed))


def direct(confidence, is_correct):
    """The ECE by its definition."""
    bins = np.minimum((confidence * N_BINS).astype(int), N_BINS - 1)
    parts = [np.flatnonzero(bins == k) for k in range(N_BINS)]
    return sum(len(at) / len(bins) * abs(confidence[at].mean() - is_correct[at].mean()) for at in parts if len(at))


def test_the_value_is_that_of_the_definition():
    draw = np.random.default_rng(0)
    confidence, seed = draw.random(1000).astype(np.float32), draw.integers(0, 300, 1000)
    is_correct = draw.random(1000) < 0.6
    assert error_of(seed, confidence, is_correct).value == pytest.approx(direct(confidence, is_correct), rel=1e-5)


def test_certain_and_always_wrong_is_one_and_an_infinite_output_counts_as_certain():
    seed = np.arange(200)
    assert error_of(seed, np.full(200, np.nan), np.zeros(200, bool)).value == 1
    right = error_of(seed, np.ones(200), np.ones(200, bool))
    assert (right.value, right.low, right.high) == (0, 0, 0)


def test_few_seeds_have_no_error():
    assert error_of(np.zeros(50, int), np.ones(50), np.zeros(50, bool)) is None


def world(draw, n_seeds, n_tests, power, alike):
    """Tests whose answer is correct with probability `confidence ** power`; those of one seed are alike."""
    seed = draw.integers(0, n_seeds, n_tests)
    of_seed, luck = draw.normal(size=(2, n_seeds))
    confidence = 1 / (1 + np.exp(-1.5 - 0.84 * (of_seed[seed] + draw.normal(size=n_tests))))
    score = alike * luck[seed] + np.sqrt(1 - alike**2) * draw.normal(size=n_tests)
    return seed, confidence, norm.cdf(score) < confidence**power


@pytest.mark.parametrize("alike", [0.0, 0.8])
@pytest.mark.parametrize(
    ("power", "least", "most"), [(1.0, 0.90, 1), (1.15, 0.93, 1), (1.5, 0.92, 1), (3.0, 0.91, 0.98)]
)
def test_the_interval_holds_the_truth_in_about_95_of_100_campaigns(power, least, most, alike):
    """Calibrated (power 1) to badly overconfident models; the truth is that of four million independent tests."""
    _, confidence, _ = world(np.random.default_rng(1), 2_000_000, 2_000_000, power, 0.0)
    bins = np.minimum((confidence * N_BINS).astype(int), N_BINS - 1)
    truth = np.abs(np.bincount(bins, confidence - confidence**power)).sum() / len(bins)
    held = []
    for k in range(300):
        error = error_of(*world(np.random.default_rng(k), 500, 1000, power, alike))
        held.append(error.low <= truth <= error.high)
    assert least <= np.mean(held) <= most


def test_a_campaign_states_the_error_of_its_uniform_tests(tmp_path):
    inputs, labels = make_data()
    target = themis.Target(make_net(), oracle="changed")
    labels[::5] = (labels[::5] + 1) % 3  # some clean answers are wrong
    run = themis.run(target, (inputs, labels), "gaussian", magnitude=0.5, max_tests=600, out=tmp_path / "run")
    with torch.no_grad():
        outputs = make_net()(inputs)
    clean = direct(outputs.softmax(1).amax(1).numpy(), (outputs.argmax(1) == labels).numpy())
    assert run.calibration.clean.value == pytest.approx(clean, rel=1e-4)
    assert run.calibration.disturbed.low <= run.calibration.disturbed.value <= run.calibration.disturbed.high
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["calibration"]
    assert summary["disturbed"]["value"] == run.calibration.disturbed.value
    assert themis.open_run(tmp_path / "run").calibration == run.calibration
    shown = [f"{error.value:.2%}" for error in (run.calibration.clean, run.calibration.disturbed)]
    text = "confidence and share of correct answers are apart by {} on clean inputs (95%"
    assert read_view(tmp_path / "run").calibration.startswith(text.format(shown[0]))
    assert text.format(shown[0]) in dict(summary_rows(run, is_verbose=True))["calibration"]


def test_the_disturbed_error_is_that_of_what_the_model_was_sent():
    """Bright pictures are of class 1; another pixel says how sure the model is, and a third whether it is right."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(80) % 2
    inputs = (0.2 + 0.6 * labels).view(-1, 1, 1, 1) + 0.1 * torch.rand(80, 1, 6, 6, generator=draw)
    sent = []

    def predict(pictures):
        is_bright = pictures.mean((1, 2, 3)) > 0.5
        is_right = (pictures[:, 0, 0, 0] - pictures[:, 0, 1, 1]) < 0.1
        sureness = 0.55 + 0.4 * np.abs(pictures[:, 0, 5, 5] - pictures[:, 0, 4, 4])
        is_first = is_bright != is_right
        sent.extend(zip(map(bytes, pictures), sureness, is_right, strict=True))
        return np.stack([np.where(is_first, sureness, 1 - sureness), np.where(is_first, 1 - sureness, sureness)], 1)

    options = {"magnitude": 0.1, "max_tests": 500, "uniform_share": 1.0, "policy": "random"}
    run = themis.run(themis.BlackBox(predict, oracle="changed"), (inputs, labels), "gaussian", **options)
    clean = set(map(bytes, inputs.numpy()))
    tests = [(sureness, is_right) for picture, sureness, is_right in sent if picture not in clean]
    assert len(tests) == 500
    confidence, is_right = map(np.array, zip(*tests, strict=True))
    assert 0.1 < is_right.mean() < 0.9
    assert run.calibration.disturbed.value == pytest.approx(direct(confidence, is_right), rel=1e-4)


def test_a_resumed_campaign_has_the_same_error(tmp_path):
    options = {"magnitude": 0.5, "policy": "random", "uniform_share": 1.0}
    whole = themis.run(make_net(), make_data(), "gaussian", max_tests=900, **options)
    themis.run(make_net(), make_data(), "gaussian", max_tests=350, out=tmp_path / "run", **options)
    resumed = themis.resume(tmp_path / "run", make_net(), make_data(), max_tests=900)
    assert resumed.calibration == whole.calibration


@pytest.mark.parametrize("case", ["no labels", "regression"])
def test_tasks_without_classes_or_labels_have_none(case):
    inputs, _ = make_data()
    data = inputs if case == "no labels" else (inputs, make_net()(inputs).detach()[:, :1])
    net = make_net() if case == "no labels" else torch.nn.Sequential(*make_net()[:3], torch.nn.Linear(32, 1))
    assert themis.run(net, data, "gaussian", max_tests=100).calibration is None
