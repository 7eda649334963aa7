"""The options of the executor ray, and what is said if the extra is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import themis
from themis import MissingExtraError, UsageError
from themis.campaign.setup import choose_executor
from themis.cli import BAD_USAGE, RUN_FAILED, main
from themis_integrations import RayExecutor
from themis_integrations.ray.pool import WorkerHost


@pytest.fixture
def without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be a whole number of at least 1, got 0"),
        ({"gpus_per_worker": -1}, "gpus_per_worker must be a number of at least 0, got -1"),
        ({"gpus_per_worker": 1.5}, "gpus_per_worker must be a whole number if it is above 1, got 1.5"),
    ],
)
def test_impossible_workers_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        RayExecutor(**options)


def test_the_local_executor_needs_no_ray(without_ray):
    assert choose_executor(None) is None
    assert choose_executor("local") is None
    with pytest.raises(UsageError, match=r"executor must be one of local, ray, or an object such as .*'spark'"):
        choose_executor("spark")


def test_a_model_on_a_gpu_needs_workers_with_one():
    with pytest.raises(UsageError, match="gpus_per_worker must exceed 0 for a cuda model"):
        RayExecutor().check_device("cuda")
    RayExecutor(gpus_per_worker=0.5).check_device("cuda")


def test_a_missing_extra_is_named_before_anything_runs(without_ray, tmp_path):
    with pytest.raises(MissingExtraError, match=r'pip install "themis-dl\[ray\]"'):
        themis.run(torch.nn.Linear(4, 2), torch.rand(8, 4), "gaussian", out=tmp_path / "run", executor="ray")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["run", "--executor", "ray"], RUN_FAILED, 'pip install "themis-dl[ray]"'),
        (["run", "--workers", "2"], BAD_USAGE, "--workers must come with --executor ray"),
        (["run", "--address", "auto"], BAD_USAGE, "--address must come with --executor ray"),
        (["compare", "--executor", "ray"], RUN_FAILED, 'pip install "themis-dl[ray]"'),
        (["compare", "--gpus-per-worker", "1"], BAD_USAGE, "--gpus-per-worker must come with --executor ray"),
    ],
)
def test_commands_name_what_is_missing(words, code, message, without_ray, capsys):
    case = ["--model", "no_such_module:net", "--data", "digits", "--perturb", "gaussian"]
    assert main([*words, *case]) == code
    assert message in capsys.readouterr().err


def test_an_evaluation_names_what_is_missing(without_ray, capsys):
    assert main(["evaluate", "--smoke", "--executor", "ray"]) == RUN_FAILED
    assert 'pip install "themis-dl[ray]"' in capsys.readouterr().err


@pytest.mark.parametrize("exists", [True, False])
def test_a_worker_looks_up_modules_and_data_where_the_driver_does(exists, tmp_path, monkeypatch):
    here, folders = tmp_path / "here", [tmp_path / name for name in ("work", "modules", "data")]
    for folder in [here, *(folders if exists else [])]:
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("THEMIS_DATA", "own")
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT")
    monkeypatch.setattr(sys, "path", before := [*sys.path])
    work, modules, data = map(str, folders)
    variables = {"THEMIS_DATA": data, "MKL_CBWR": "COMPATIBLE"}
    WorkerHost(work, [modules], variables, torch.get_num_threads())
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"
    assert os.getcwd() == (work if exists else str(here))
    assert os.environ["THEMIS_DATA"] == (data if exists else "own")
    assert (modules in sys.path) == exists
    assert before[0] == sys.path[0]


def test_results_that_depend_on_the_threads_fix_their_number():
    pytest.importorskip("ray")
    assert choose_executor("ray", 1) == RayExecutor(cpus_per_worker=1)
    with pytest.raises(
        UsageError, match="cpus_per_worker must be 1, the threads that these results are computed with, got 2"
    ):
        choose_executor(RayExecutor(cpus_per_worker=2), 1)


def test_few_workers_are_busy_in_long_rounds():
    benchmark = Path(__file__).parents[3] / "benchmarks" / "scaling.py"
    cluster = {"chunk": 0.1, "reply": 2e5, "sums": 8.5e6, "add": 1e-3, "judging": 0.03}
    options = ["--one", 8, "--cluster", json.dumps(cluster), "--chunk", 32, "--tests", 50_000]
    command = [sys.executable, str(benchmark), *map(str, options)]
    share = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 0.8 < float(share) < 1
