"""Displays, figures and tables of real campaigns in a notebook."""

import base64
import io
import re
import subprocess
import sys
import time
from itertools import count

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread

import themis
from themis import UsageError
from themis.perturb import Perturbation, Theta
from themis.runs.faults import Faults


@pytest.fixture(scope="module")
def run(trained):
    target, held_out = trained
    return themis.run(target, held_out[range(0, 1000, 10)], "gaussian", magnitude=0.5, max_tests=1280, random_seed=3)


def drawn(html):
    return [imread(io.BytesIO(base64.b64decode(each))) for each in re.findall(r'base64,([^"]+)"', html)]


def test_a_run_shows_its_verdict_figures_and_three_faults(run):
    html = run._repr_html_()
    assert html.startswith(f"<div><p><b>{run.verdict.text}</b></p>")
    assert run.stop in html
    assert "residual risk" not in html[: html.index("<details>")]
    assert f"{run.rounds[-1].distinct_faults:,} distinct" in html
    assert "fault rate" in html
    shown = drawn(html)
    assert len(shown) == 9
    assert {each.shape for each in shown} == {(28, 28)}
    assert len(html) < 50_000


def test_a_fault_shows_clean_disturbed_and_difference(run):
    fault = run.faults[0]
    html, replay = fault._repr_html_(), fault.replay()
    clean, disturbed, difference = drawn(html)
    assert np.allclose(clean, replay.clean_inputs[0], atol=1 / 255)
    assert np.allclose(disturbed, replay.inputs[0], atol=1 / 255)
    assert max(abs(difference.min() - 0.5), abs(difference.max() - 0.5)) == pytest.approx(0.5, abs=0.01)
    assert f"{fault.clean_answer} becomes <b>{fault.answer}" in html
    assert f"sigma {fault.theta['sigma']:.4g}" in html
    assert run.faults.by_id(fault.id) == fault


def test_a_run_is_printed_with_its_fault_rate(run):
    assert f"fault rate {run.fault_rate.value:.2%} (95%: " in repr(run)


def test_faults_and_replays_are_printed_in_a_line(run):
    assert repr(run.faults) == f"<Faults: {len(run.faults)} under gaussian>"
    replay = repr(run.faults[0].replay())
    assert "is_same=True" in replay
    assert "tensor" not in replay


def test_an_unknown_id_is_refused(run):
    with pytest.raises(UsageError, match="id must be the number of one of"):
        run.faults.by_id(10**9)


def test_faults_are_displayed_as_a_table(run):
    html = run.faults._repr_html_()
    assert html.count("<tr>") == 11
    assert f"{len(run.faults):,} faults by gaussian" in html
    assert "No fault" in Faults("gaussian", ("sigma",), (), None)._repr_html_()


def test_a_fault_that_cannot_be_replayed_shows_the_rest():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    run = themis.run(net, torch.rand(20, 1, 6, 6), "gaussian", magnitude=0.9, max_tests=400)
    net[1].register_forward_hook(lambda *_: 1 / 0)
    html = run.faults[0]._repr_html_()
    assert "becomes" in html
    assert not drawn(html)


def test_names_with_markup_are_shown_as_text():
    evil = "<script>alert(1)</script>"
    move = Perturbation(
        name=evil,
        theta=(Theta("x", 0.0, 1.0, 0.0, "<i>"),),
        apply=lambda inputs, theta, rng, context: inputs + theta[:, :1, None, None],
    )
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    net.add_module("<img src=x>", torch.nn.Flatten())
    net.add_module("$<u>$", torch.nn.Linear(36, 3))
    run = themis.run(net, torch.rand(20, 1, 6, 6), move, max_tests=400)
    assert len(run.faults) > 0
    for each in (run, run.faults, run.faults[0]):
        html = each._repr_html_()
        for mark in ("<script>alert", "<i>", "<img src=x>", "<u>"):
            assert mark not in html
    assert "&lt;script&gt;" in run.faults._repr_html_()


def test_the_robustness_curve_is_a_figure_with_something_on_it(run):
    figure = run.plot_robustness()
    assert isinstance(figure, Figure)
    picture = imread(io.BytesIO(figure._repr_png_()))
    assert (picture[..., :3].min(axis=-1) < 0.9).mean() > 0.005


def test_a_figure_that_takes_long_causes_no_warning(run, monkeypatch):
    """Warnings are errors here, and Matplotlib reads the clock."""
    monkeypatch.setattr(time, "perf_counter", count(step=60).__next__)
    assert run.plot_robustness()._repr_png_()


def test_figures_leave_pyplot_alone():
    code = """
import sys, torch, themis
net = torch.nn.Sequential(torch.nn.Linear(4, 3))
run = themis.run(net, torch.rand(20, 4), "gaussian", magnitude=0.9, max_tests=200)
run.plot_robustness()._repr_png_()
print("matplotlib.pyplot" in sys.modules, repr(run).startswith("<Run: "))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_run_without_faults_is_displayed():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    run = themis.run(net, torch.rand(20, 4), "gaussian", magnitude=1e-6, max_tests=200)
    assert len(run.faults) == 0
    assert run.stop in run._repr_html_()
    assert len(run.faults.to_pandas()) == 0
    assert "theta_sigma" in run.faults.to_pandas().columns


def test_a_frame_has_typed_columns_that_agree_with_the_faults(run):
    pytest.importorskip("pandas")
    frame = run.faults.to_pandas()
    assert len(frame) == len(run.faults)
    assert str(frame.dtypes["label"]) == str(frame.dtypes["clean_answer"]) == "Int64"
    assert str(frame.dtypes["stream"]) == str(frame.dtypes["perturbation"]) == "category"
    assert str(frame.dtypes["raised"]) == "bool"
    last = run.faults[-1]
    row = frame.iloc[-1]
    assert (row["id"], row["seed_id"], row["answer"], row["stream"]) == (
        last.id,
        last.seed_id,
        last.answer,
        last.stream,
    )
    assert row["theta_sigma"] == pytest.approx(last.theta["sigma"])
    layers = [name for name in frame.columns if name.startswith("layer_")]
    assert [name.removeprefix("layer_") for name in layers] == list(last.signature)
    assert frame[layers].sum(axis=1).to_numpy() == pytest.approx(1.0, abs=1e-3)


def test_unknown_values_are_missing_in_a_frame():
    pytest.importorskip("pandas")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    run = themis.run(net, torch.rand(20, 4), "gaussian", magnitude=0.9, max_tests=200)
    frame = run.faults.to_pandas()
    assert frame["label"].isna().all()
    assert frame["ssim"].isna().all()
    assert not frame["clean_answer"].isna().any()
