"""A run folder written by an earlier layout of the code still opens, replays and resumes."""

import shutil
from pathlib import Path

import earlier_net
import numpy as np
import pytest

import themis
from themis.cli import main

EARLIER = Path(__file__).with_name("earlier_run")


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(earlier_net.__file__).parent))
    return shutil.copytree(EARLIER, tmp_path / "run")


@pytest.mark.filterwarnings("ignore:resumed in another environment")
def test_an_earlier_run_resumes_with_its_own_tests_and_the_present_search(earlier, tmp_path):
    net, data = earlier_net.make_net(), earlier_net.make_data()
    stored = themis.open_run(earlier, net, data).faults.columns
    again = shutil.copytree(earlier, tmp_path / "again")
    resumed, same = (themis.resume(folder, net, data, max_tests=600) for folder in (earlier, again))
    last = resumed.rounds[-1]
    assert last.tests == 600
    assert last.distinct_faults == len({(fault.seed_id, fault.answer) for fault in resumed.faults}) > 55
    for name, column in resumed.faults.columns.items():
        is_float = column.dtype.kind == "f"
        assert np.array_equal(column[: len(stored["id"])], stored[name], equal_nan=is_float), name
        assert np.array_equal(column, same.faults.columns[name], equal_nan=is_float), name
    assert resumed.faults.columns["id"][len(stored["id"]) :].min() >= 320
    assert resumed.residual_risk_uniform == same.residual_risk_uniform
    assert 0 <= resumed.residual_risk.low <= resumed.residual_risk.value <= resumed.residual_risk.high < 0.2
    opened = themis.open_run(earlier)
    assert [each.residual_risk is None for each in opened.rounds] == [each.number <= 2 for each in opened.rounds]
    assert opened.residual_risk == resumed.residual_risk


def test_an_earlier_run_opens_and_replays(earlier):
    run = themis.open_run(earlier, earlier_net.make_net(), earlier_net.make_data())
    assert run.stop == "Stopped because the budget of 320 tests is spent."
    assert len(run.faults) == run.rounds[-1].faults > 50
    for fault in run.faults.most_telling(3):
        assert fault.replay().is_same


def test_commands_read_an_earlier_run(earlier, capsys):
    for command in (["faults", str(earlier)], ["report", str(earlier)], ["groups", str(earlier)]):
        assert main(command) == 0, command
    assert "earlier_run" not in capsys.readouterr().err
