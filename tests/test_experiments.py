"""The experiment runner: plans, folders, cells and executors."""

import json

import pytest
from number_cells import NumberCell, Squares, unprepared

from themis.errors import ModelError, StoreError, UsageError
from themis.experiments import ExperimentFolder, ExperimentPlan, Listener, is_plan
from themis_lab.executors import CellKind, Failure, JsonResults, ProcessExecutor, SerialExecutor, run_cells

CELLS = [NumberCell(number) for number in (3, 1, 4, 15, 9, 2)]
EXECUTORS = {"serial": SerialExecutor(), "processes": ProcessExecutor(2)}


class Recorder(Listener):
    def __init__(self, interrupts_after=None):
        self.started, self.ends, self.interrupts_after = [], [], interrupts_after

    def on_cells(self, n_done, n_cells, noun):
        self.started.append((n_done, n_cells, noun))

    def on_cell_end(self, end):
        self.ends.append(end)
        if len(self.ends) == self.interrupts_after:
            raise KeyboardInterrupt


@pytest.fixture
def folder(tmp_path):
    folder = ExperimentFolder(tmp_path / "out", "test")
    yield folder
    folder.close()


def failed(cell, reason):
    return {"number": cell.number, "error": reason}


def run(folder, prepare, cells=CELLS, *, failed=failed, noun="cell", **options):
    kind = CellKind(noun, lambda cell, result: f"{cell}: {result['square']}", failed)
    return run_cells(cells, prepare, results=JsonResults(folder), kind=kind, **options)


def calls(tmp_path):
    return [int(line) for line in (tmp_path / "calls.txt").read_text().split()]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_results_do_not_depend_on_the_executor(folder, tmp_path, executor):
    listener = Recorder()
    results = run(folder, Squares(str(tmp_path)), executor=EXECUTORS[executor], listener=listener, noun="number")
    assert list(results.items()) == [(cell, {"square": cell.number**2}) for cell in CELLS]
    assert listener.started == [(0, 6, "number")]
    assert [end.n_done for end in listener.ends] == [1, 2, 3, 4, 5, 6]
    assert {end.text for end in listener.ends} == {f"number {cell.number}: {cell.number**2}" for cell in CELLS}
    stored = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out" / "cells").iterdir()}
    assert {name: result["square"] for name, result in stored.items()} == {
        f"{cell.number}.json": cell.number**2 for cell in CELLS
    }


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_interrupted_experiment_resumes_and_no_finished_cell_runs_twice(folder, tmp_path, executor):
    prepare, options = Squares(str(tmp_path)), {"executor": EXECUTORS[executor]}
    with pytest.raises(KeyboardInterrupt):
        run(folder, prepare, listener=Recorder(interrupts_after=2), **options)
    finished = {int(path.stem) for path in (tmp_path / "out" / "cells").iterdir()}
    assert len(finished) == 2
    listener = Recorder()
    results = run(folder, prepare, listener=listener, **options)
    assert listener.started == [(2, 6, "cell")]
    assert len(listener.ends) == 4
    assert list(results) == CELLS
    assert all(calls(tmp_path).count(number) == 1 for number in finished)
    n_calls = len(calls(tmp_path))
    assert run(folder, prepare, listener=listener, **options) == results
    assert listener.started[-1] == (6, 6, "cell")
    assert len(calls(tmp_path)) == n_calls
    more = run(folder, prepare, [*CELLS, NumberCell(7)], **options)
    assert more[NumberCell(7)] == {"square": 49}
    assert calls(tmp_path)[n_calls:] == [7]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_failing_cell_is_reported_with_its_name_and_runs_again(folder, tmp_path, executor):
    listener = Recorder()
    prepare = Squares(str(tmp_path), fails_at=(4,))
    results = run(folder, prepare, executor=EXECUTORS[executor], listener=listener)
    assert results[NumberCell(4)] == {"number": 4, "error": "ZeroDivisionError: cannot square 4"}
    (failure,) = [end for end in listener.ends if end.error is not None]
    assert (failure.cell, failure.text) == (NumberCell(4), "number 4 failed")
    assert failure.error == "ZeroDivisionError: cannot square 4"
    again = run(folder, Squares(str(tmp_path)), executor=EXECUTORS[executor])
    assert again[NumberCell(4)] == {"square": 16}
    assert calls(tmp_path).count(4) == 2
    assert len(calls(tmp_path)) == 7


def test_a_failure_that_is_not_handled_ends_the_experiment(folder, tmp_path):
    prepare = Squares(str(tmp_path), fails_at=(4,))
    with pytest.raises(ZeroDivisionError, match="cannot square"):
        run(folder, prepare, failed=None)
    with pytest.raises(ModelError, match="number 4 failed: ZeroDivisionError"):
        run(folder, prepare, failed=None, executor=EXECUTORS["processes"])


def test_a_worker_that_dies_costs_its_cell_and_is_replaced(folder, tmp_path):
    results = run(folder, Squares(str(tmp_path), dies_at=(1,)), executor=ProcessExecutor(2))
    assert results[NumberCell(1)]["error"] == "its process ended with exit code 7"
    assert sum("square" in result for result in results.values()) == 5


@pytest.mark.parametrize(("lookahead", "order"), [(1, [3, 2, 5, 4]), (None, [3, 5, 2, 4])])
def test_workers_keep_to_the_order_of_cells_as_far_as_they_may_not_look_ahead(tmp_path, lookahead, order):
    cells = [NumberCell(number) for number in (3, 2, 5, 4)]  # a group of odd numbers, and one of even numbers
    executor = ProcessExecutor(1, lookahead=lookahead)
    assert [cell.number for cell, _ in executor.map(Squares(str(tmp_path)), cells)] == order


def test_workers_that_cannot_prepare_are_explained(folder):
    with pytest.raises(ModelError, match=r"OSError: no such model: run with one worker.*__main__"):
        run(folder, unprepared, executor=ProcessExecutor(2))


def test_without_a_path_nothing_is_stored(tmp_path):
    folder = ExperimentFolder(None, "test")
    results = run(folder, Squares(str(tmp_path)))
    assert results[NumberCell(9)] == {"square": 81}
    assert [path.name for path in tmp_path.iterdir()] == ["calls.txt"]


def test_executors_yield_failures_instead_of_raising(tmp_path):
    prepare = Squares(str(tmp_path), fails_at=(1,))
    for executor in EXECUTORS.values():
        outcomes = dict(executor.map(prepare, CELLS[:3]))
        assert outcomes[NumberCell(3)] == {"square": 9}
        assert isinstance(outcomes[NumberCell(1)], Failure)
        assert list(executor.map(prepare, [])) == []


def plan(**options):
    record = {"plan": {"size": 3, "resamples": 5, **options}, "recipe": {"epochs": 2}, "model_sha256": "ab"}
    return ExperimentPlan(record, free=("resamples",))


def test_a_plan_that_changes_finished_cells_is_refused_in_words(folder, tmp_path):
    folder.begin(plan(), {"torch": "1"})
    folder.begin(plan(resamples=9), {"torch": "1"})
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["plan"]["resamples"] == 9
    with pytest.raises(UsageError, match=r"holds another test \(size 3 .*4 .*\): pass the same options, or choose"):
        folder.begin(plan(size=4), {"torch": "1"})
    other = ExperimentPlan({**plan().record, "recipe": {"epochs": 4}})
    with pytest.raises(UsageError, match="epochs 2"):
        folder.begin(other, {"torch": "1"})
    with pytest.warns(RuntimeWarning, match="resumed in another environment"):
        folder.begin(plan(), {"torch": "2"})


def test_a_folder_has_one_writer_and_is_not_shared_with_other_files(folder, tmp_path):
    with pytest.raises(StoreError, match="one writer"):
        ExperimentFolder(tmp_path / "out", "test")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").touch()
    for name, phrase in (("comparison", "a comparison"), ("evaluation", "an evaluation")):
        with pytest.raises(UsageError, match=f"or the folder of {phrase}, but .* contains other files"):
            ExperimentFolder(tmp_path / "notes", name)


def test_a_folder_may_hold_several_plans(tmp_path):
    for name in ("first", "second"):
        folder = ExperimentFolder(tmp_path / "out", "test", f"cells/{name}/plan.json")
        folder.begin(plan(size=len(name)), {})
        folder.close()
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"made_by": "themis 0.1"', "[]", None], ids=["deep", "cut", "list", "endless"]
)
def test_what_is_not_a_plan_is_recognised_without_being_read_to_the_end(tmp_path, content):
    path = tmp_path / "plan.json"
    if content is None:
        path.symlink_to("/dev/zero")
    else:
        path.write_text(content)
    assert not is_plan(path)
