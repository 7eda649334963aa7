"""A run folder written by an earlier layout of the code still opens and replays."""

import shutil
from pathlib import Path

import earlier_net
import pytest

import themis
from themis import StoreError
from themis.cli import main
from themis.runs.analysis.operation import rate_in_operation

EARLIER = Path(__file__).with_name("earlier_run")


@pytest.fixture
def earlier(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(earlier_net.__file__).parent))
    return shutil.copytree(EARLIER, tmp_path / "run")


@pytest.mark.filterwarnings("ignore:resumed in another environment")  # without the C library
def test_an_earlier_run_whose_search_remembered_less_cannot_be_resumed(earlier):
    def content():
        return {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file() and path.name != "run.lock"}

    before = content()
    with pytest.raises(StoreError, match="cannot resume: this run was created by another version of Themis"):
        themis.resume(earlier, earlier_net.make_net(), earlier_net.make_data(), max_tests=600)
    assert content() == before


def test_an_earlier_run_opens_and_replays(earlier):
    run = themis.open_run(earlier, earlier_net.make_net(), earlier_net.make_data())
    assert run.stop == "Stopped because the budget of 320 tests is spent."
    assert len(run.faults) == run.rounds[-1].faults > 50
    for fault in run.faults.most_telling(3):
        assert fault.replay().is_same


def test_uniform_tests_are_those_that_were_drawn_before_there_were_profiles(earlier):
    """A run is weighted only if the theta of its uniform faults is drawn again, to the bit."""
    rate = rate_in_operation(earlier, "sigma~beta(1,1)")
    n_faults = sum(fault.stream == "uniform" for fault in themis.open_run(earlier).faults)
    assert (rate.tests, n_faults) == (64, 14)
    assert rate.fault_rate.low < n_faults / rate.tests < rate.fault_rate.high


def test_commands_read_an_earlier_run(earlier, capsys):
    for command in (["faults", str(earlier)], ["report", str(earlier)], ["groups", str(earlier)]):
        assert main(command) == 0, command
    assert "earlier_run" not in capsys.readouterr().err
