"""The report of campaigns that were not completed: one that failed, early or late, and one that was killed."""

import shutil
import sqlite3
from contextlib import closing

import pytest
from torch import nn
from wavering import ENDLESS, Wavering, pictures

import themis
from themis.errors import ModelError
from themis.report.page import read_view


class Failing(nn.Module):
    """A net that fails after a number of forward passes."""

    def __init__(self, left):
        super().__init__()
        self.net, self.left = Wavering(), left

    def forward(self, x):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("<b>out of luck</b>")
        return self.net(x)


def fail(out, left):
    options = {"magnitude": 0.5, "max_tests": 5000, "round_size": 200, **ENDLESS}
    with pytest.raises(ModelError):
        themis.run(Failing(left), pictures(), "gaussian", out=out, **options)


@pytest.mark.parametrize(("left", "n_rounds"), [(10, 1), (25, 3)], ids=["in its first round", "later"])
def test_the_view_of_a_failed_campaign_says_why_it_failed(left, n_rounds, tmp_path):
    fail(tmp_path / "run", left)
    view = read_view(tmp_path / "run")
    assert view.state == "failed"
    assert "<b>out of luck</b>" in view.stop
    assert len(view.rounds) == n_rounds
    assert 0 < view.counts.tests <= 200 * n_rounds
    assert view.counts.faults == view.faults.n > 0
    assert view.fault_rate is not None
    assert f"themis resume {tmp_path / 'run'}" in {each.command for each in view.reproduce}


def test_a_resumed_campaign_that_fails_at_once_keeps_the_stop_reason(tmp_path):
    fail(tmp_path / "run", 24)
    before = read_view(tmp_path / "run")
    with pytest.raises(ModelError):
        themis.resume(tmp_path / "run", Failing(1), pictures())
    after = read_view(tmp_path / "run")
    assert (after.state, after.stop) == ("failed", before.stop)
    assert after.fault_rate == before.fault_rate is not None


def test_a_campaign_that_failed_in_its_first_round_can_be_resumed_to_the_same_result(tmp_path):
    fail(tmp_path / "run", 9)
    options = {"magnitude": 0.5, "max_tests": 600, "round_size": 200, **ENDLESS}
    whole = themis.run(Wavering(), pictures(), "gaussian", **options)
    run = themis.resume(tmp_path / "run", Failing(10**9), pictures(), max_tests=600)
    assert [each.tests for each in run.rounds] == [each.tests for each in whole.rounds]
    assert run.faults.columns["id"].tolist() == whole.faults.columns["id"].tolist()
    assert read_view(tmp_path / "run").state == "ended"


def test_a_model_with_neurons_that_are_not_finite_has_failed(tmp_path):
    class Breaking(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.relu, self.calls = Wavering(), nn.ReLU(), 0

        def forward(self, x):
            self.calls += 1
            inner = self.relu(x * (float("inf") if self.calls > 7 else 1))  # 0 times infinity
            return self.net(inner.nan_to_num(0.5, 0.5))

    with pytest.raises(ModelError):
        themis.run(Breaking(), pictures() * (pictures() > 0.5), "gaussian", magnitude=0.5, out=tmp_path / "run")
    view = read_view(tmp_path / "run")
    assert view.state == "failed"
    assert view.stop.startswith("Stopped because it failed: ")
    assert view.coverage is None  # what is not finite cannot be judged


def test_the_view_of_a_killed_campaign(tmp_path):
    fail(tmp_path / "run", 24)
    failed = read_view(tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    assert read_view(tmp_path / "run").stop == failed.stop
    with closing(sqlite3.connect(tmp_path / "run" / "run.sqlite")) as database:  # as a kill leaves it
        database.execute("DELETE FROM run WHERE name = 'failed'")
        database.commit()
    killed = read_view(tmp_path / "run")
    assert killed.state == "killed"
    assert "themis resume" in killed.stop
    assert killed.counts.faults == failed.counts.faults
    shutil.rmtree(tmp_path / "run" / "state")
    assert read_view(tmp_path / "run").rates == []
