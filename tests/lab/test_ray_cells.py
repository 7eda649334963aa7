"""The cells of experiments in workers on Ray: the same results, resumable, whichever workers die."""

import pytest
import torch
from number_cells import NumberCell, Squares
from ray_case import PICTURES, Slow

from themis import Target
from themis.errors import ModelError
from themis.experiments import ExperimentFolder, Listener
from themis_integrations import RayExecutor
from themis_lab.comparison.api import compare
from themis_lab.executors import CellKind, JsonResults, RayCellExecutor, run_cells

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:a worker has died:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
CELLS = [NumberCell(number) for number in (3, 1, 4, 15, 9, 2)]


@pytest.fixture(scope="module", autouse=True)
def _ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    yield
    ray.shutdown()


class InterruptAfter(Listener):
    def __init__(self, n):
        self.n = n

    def on_cell_end(self, end):
        if end.n_done == self.n:
            raise KeyboardInterrupt


def _run(folder, prepare, **options):
    return run_cells(
        CELLS,
        prepare,
        results=JsonResults(folder),
        kind=CellKind("cell", lambda cell, result: str(cell), lambda cell, reason: {"error": reason}),
        executor=RayCellExecutor(RayExecutor(workers=2)),
        **options,
    )


def test_an_interrupted_experiment_resumes(tmp_path):
    folder = ExperimentFolder(tmp_path / "out", "test")
    with pytest.raises(KeyboardInterrupt):
        _run(folder, Squares(str(tmp_path)), listener=InterruptAfter(2))
    finished = {int(path.stem) for path in (tmp_path / "out" / "cells").iterdir()}
    assert len(finished) == 2
    results = _run(folder, Squares(str(tmp_path)))
    assert list(results.items()) == [(cell, {"square": cell.number**2}) for cell in CELLS]
    calls = [int(line) for line in (tmp_path / "calls.txt").read_text().split()]
    assert all(calls.count(number) == 1 for number in finished)
    folder.close()


def test_cells_that_fail_or_end_their_worker_cost_no_other_cell(tmp_path):
    folder = ExperimentFolder(tmp_path / "out", "test")
    results = _run(folder, Squares(str(tmp_path), fails_at=(4,), dies_at=(15,)))
    assert results[NumberCell(4)] == {"error": "ZeroDivisionError: cannot square 4"}
    assert "3 workers in a row died while they ran number 15" in results[NumberCell(15)]["error"]
    assert sum("square" in result for result in results.values()) == 4
    calls = (tmp_path / "calls.txt").read_text().split()
    assert calls.count("15") in (3, 4)  # the first death may have been that of the call before it
    folder.close()


@pytest.mark.parametrize(("lookahead", "order"), [(1, [3, 2, 5, 4]), (None, [3, 5, 2, 4])])
def test_workers_keep_to_the_order_of_cells_as_far_as_they_may_not_look_ahead(tmp_path, lookahead, order):
    cells = [NumberCell(number) for number in (3, 2, 5, 4)]  # a group of odd numbers, and one of even numbers
    executor = RayCellExecutor(RayExecutor(workers=1), lookahead=lookahead)
    assert [cell.number for cell, _ in executor.map(Squares(str(tmp_path)), cells)] == order


def test_workers_that_cannot_prepare_are_explained(tmp_path):
    def unprepared():
        raise OSError("no such model")

    with pytest.raises(ModelError, match="a worker failed with OSError: no such model"):
        _run(ExperimentFolder(None, "test"), unprepared)


def test_a_comparison_of_a_model_in_memory_is_the_same_on_ray(tmp_path):
    torch.set_num_threads(1)
    options = {"techniques": "nc,scheduled", "magnitudes": "0.2,0.6", "max_passes": 200, "campaigns": 1}
    options |= {"seeds": 30, "judge_seeds": 20}
    serial = compare(Target(Slow()), PICTURES, "gaussian", resamples=50, **options)
    on_ray = compare(Target(Slow()), PICTURES, "gaussian", executor=RayExecutor(workers=2), resamples=50, **options)
    records = [
        [{name: value for name, value in record.items() if "seconds" not in name} for record in result.cells]
        for result in (serial, on_ray)
    ]
    assert len(records[0]) == 8
    assert not any("error" in record for record in records[0])
    assert records[0] == records[1]
