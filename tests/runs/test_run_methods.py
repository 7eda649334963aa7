"""What a run offers in Python: its report, its gates and its comparison with another run."""

import pytest
import torch
from torch import nn

import themis

torch.manual_seed(0)
NETS = [nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3)).eval() for _ in range(2)]
DATA = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def campaign(k=0, **options):
    return themis.run(NETS[k], DATA, "gaussian", magnitude=0.3, max_tests=300, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("methods") / "run"


@pytest.fixture(scope="module")
def run(folder):
    return campaign(out=folder)


def test_a_report_is_written_into_the_folder_or_to_another_file(run, folder, tmp_path):
    assert run.report() == folder / "report.html"
    assert run.verdict.text in run.report(tmp_path / "other.html").read_text()
    assert themis.open_run(folder).report(tmp_path / "opened.html").is_file()
    with pytest.raises(themis.UsageError, match="pass out='runs/NAME'"):
        campaign().report(tmp_path / "none.html")


def test_gates_are_true_if_they_pass_and_print_as_lines(run, folder):
    assert run.gate(max_fault_rate=1.0, fail_under={"coverage": 0.0})
    failed = run.gate(max_fault_rate=0.0001)
    assert not failed
    assert [line[:6] for line in str(failed).splitlines()] == ["passed", "FAILED"]
    assert str(themis.open_run(folder).gate(max_fault_rate=0.0001)) == str(failed)
    assert not campaign(1).gate(max_new_faults=0, baseline=run)
    with pytest.raises(themis.UsageError, match="a gate must be given"):
        run.gate()


def test_runs_are_compared_as_by_diff(run):
    other = campaign(1)
    assert run.diff(other, tests=100).as_dict() == themis.diff(run, other, tests=100).as_dict()
