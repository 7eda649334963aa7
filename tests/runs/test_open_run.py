"""A run folder opened as the result of its campaign: ended, running, killed, made here or by another process."""

import json
import shutil

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn
from user_module import SMALL

import themis
from themis.errors import UsageError

OPTIONS = {"magnitude": 0.5, "max_tests": 600, "round_size": 200, "tolerance": 1e-9, "plateau": None}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run and its folder."""
    out = tmp_path_factory.mktemp("opened") / "run"
    options = {**OPTIONS, "criterion": "nc", "policy": "random", "classes": ("a", "b", "c")}
    return themis.run(net(), data(), "gaussian + rotate", out=out, **options), out


def test_an_opened_run_equals_the_returned_run(made):
    run, out = made
    opened = themis.open_run(out)
    assert isinstance(opened, themis.Run)
    assert opened.summary() == json.loads((out / "summary.json").read_text())
    assert opened.start == run.start
    assert opened.rounds == run.rounds
    assert opened.near_ties == run.near_ties
    assert opened.environment == run.environment
    assert [each.id for each in opened.faults] == [each.id for each in run.faults]
    assert repr(opened) == repr(run)
    for name, column in run.faults.columns.items():
        if column.dtype.kind == "f":
            np.testing.assert_allclose(opened.faults.columns[name], column, atol=1e-4)
        else:
            assert (opened.faults.columns[name] == column).all()


def test_an_opened_run_is_shown_and_tabulated_without_its_model(made):
    run, out = made
    opened = themis.open_run(str(out))
    assert run.stop in opened._repr_html_()
    assert "becomes" in opened.faults[0]._repr_html_()
    assert len(opened.faults.to_pandas()) == len(run.faults)
    with pytest.raises(UsageError, match="does not record how to create its"):
        opened.faults[0].replay()


def test_an_opened_run_replays_and_shrinks_with_a_given_model(made):
    run, out = made
    opened = themis.open_run(out, net(), data())
    first, again = run.faults[0].replay(), opened.faults[0].replay()
    assert again.is_same
    assert torch.equal(again.inputs, first.inputs)
    assert opened._repr_html_().count("base64") == 9
    assert isinstance(opened.plot_robustness(), Figure)


def test_a_run_of_the_command_line_replays_without_a_given_model(tmp_path, monkeypatch, capsys):
    from themis.cli import main

    (tmp_path / "opened_here.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--model", "opened_here:net", "--data", "opened_here:data", "--perturb", "gaussian", "--magnitude", "0.5"]
    assert main(["run", *words, "--max-tests", "300", "--out", "run", "--quiet", "--no-report"]) == 0
    opened = themis.open_run("run")
    replay = opened.faults[0].replay()
    assert replay.is_same
    assert (replay.input_gap, replay.output_gap) == (0.0, 0.0)


def test_a_running_campaign_is_opened_in_its_current_state(tmp_path, written_at_once):
    seen = []

    class Look(themis.Callback):
        def on_round(self, round):
            seen.append((round, themis.open_run(tmp_path / "run")))

    run = themis.run(net(), data(), "gaussian", out=tmp_path / "run", callbacks=[Look()], **OPTIONS)
    assert len(seen) == len(run.rounds) == 3
    for round, opened in seen:
        assert (opened.stop, opened.stop_reason) == ("The campaign is still running.", "running")
        assert opened.rounds[-1] == round
        assert len(opened.faults) == round.faults
        assert opened.normality is None
    assert seen[-1][1].fault_rate == run.fault_rate
    assert seen[-1][1].residual_risk == run.residual_risk
    assert sum(each["tests"] for each in seen[-1][1].kinds.values()) == 600
    assert "still running" in seen[-1][1]._repr_html_()


def test_a_killed_run_is_opened_and_folders_without_a_round_are_refused(made, tmp_path, written_at_once):
    _, out = made
    copy = shutil.copytree(out, tmp_path / "copy")
    (copy / "summary.json").unlink()
    opened = themis.open_run(copy)
    assert opened.stop_reason == "killed"
    assert "themis resume" in opened.stop
    assert opened.faults[0].seed_id == made[0].faults[0].seed_id
    shutil.rmtree(copy / "state")
    assert themis.open_run(copy).fault_rate is None
    with pytest.raises(UsageError, match="must be a folder with"):
        themis.open_run(tmp_path / "nowhere")

    class Begun(themis.Callback):
        def on_start(self, start):
            with pytest.raises(UsageError, match="must have finished a round"):
                themis.open_run(tmp_path / "begun")
            self.was_refused = True

    begun = Begun()
    themis.run(net(), data(), "gaussian", out=tmp_path / "begun", callbacks=[begun], **OPTIONS)
    assert begun.was_refused
