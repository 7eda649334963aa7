"""Run folders that cannot be written, resumed, listed or replayed: each is reported in one line with its exit code."""

import importlib
import os
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from wrong_use import FIRST, HELD, MODULE, enter, finished_run, refused, run, weights_of_a_net, write

import themis
from themis.cli import main
from themis.errors import UsageError
from themis.runs.store.writer import Writer


def run_with_weights():
    import mine

    torch.save(mine.net().state_dict(), "net.pt")
    assert main(run("--weights net.pt --magnitude 0.9 --out done")) == 0


def then(*steps):
    """Create a finished run, then apply the steps."""

    def setup():
        finished_run()
        for step in steps:
            step()

    return setup


def cut(pattern: str, size: float = 0.5):
    """Truncate a file to a share of its size, as a bad disk might."""

    def step():
        path = min(Path("done").glob(pattern))
        path.write_bytes(path.read_bytes()[: int(size * path.stat().st_size)])

    return step


def change_the_module(before: str, after: str):
    def step():
        Path("mine.py").write_text(MODULE.replace(before, after))
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()

    return step


def remove_the_module():
    Path("mine.py").unlink()
    sys.modules.pop("mine", None)
    importlib.invalidate_caches()


def begin_an_experiment():
    Path("plan.json").write_text("{}")


def write_the_schema(version: int):
    def step():
        with closing(sqlite3.connect("done/run.sqlite")) as database:
            database.execute(f"PRAGMA user_version = {version}")

    return step


def run_from_python():
    import mine

    themis.run(mine.net(), mine.data(), "gaussian", magnitude=0.9, max_tests=200, out="done")


def write_at_the_same_time():
    """Let another writer hold the folder."""
    finished_run()
    HELD.append(Writer("done"))


WRONG = {
    # the folder of the results
    "out is a file": (run("--out mine.py"), 2, "out must be a folder, but mine.py is a file"),
    "out in a file": (
        run("--out mine.py/here"),
        3,
        "mine.py/here cannot be written: Not a directory; choose another path",
    ),
    "out holds a run": (run("--out done"), 2, "done already holds a run", finished_run),
    "out in use": (run("--out done"), 3, "done must have one writer, but process", write_at_the_same_time),
    "a negative number to keep": (run("--max-stored -1"), 2, "max_stored must be 0 or more, got -1"),
    # resume
    "resume nothing": (["resume"], 2, "RUN must be given"),
    "resume nowhere": (["resume", "nowhere"], 2, "a run must be a folder with run.sqlite, but nowhere is not one"),
    "resume a file": (["resume", "mine.py"], 2, "a run must be a folder with run.sqlite, but mine.py is not one"),
    "resume with another random seed": (
        ["resume", "done", "--random-seed", "1"],
        2,
        "unknown option --random-seed",
        finished_run,
    ),
    "resume to no tests": (["resume", "done", "--max-tests", "0"], 2, "max_tests must be positive", finished_run),
    "resume to many": (["resume", "done", "--max-tests", "many"], 2, "must be a whole number", finished_run),
    "resume without the module": (["resume", "done"], 2, "No module named 'mine'", then(remove_the_module)),
    "resume with another model": (
        ["resume", "done"],
        3,
        "the model must be the same as in the run",
        then(change_the_module("torch.manual_seed(0)", "torch.manual_seed(1)")),
    ),
    "resume with other data": (
        ["resume", "done"],
        3,
        "the data must be the same as in the run",
        then(change_the_module("RNG = torch.Generator().manual_seed(0)", "RNG = torch.Generator().manual_seed(1)")),
    ),
    "resume without the weights": (
        ["resume", "done"],
        3,
        "net.pt is not a file",
        run_with_weights,
        lambda: Path("net.pt").unlink(),
    ),
    "resume with other weights": (
        ["resume", "done", "--weights", "net.pt"],
        3,
        "the model must be the same as in the run",
        run_with_weights,
        weights_of_a_net(lambda value: value + 1),
    ),
    "resume what Python began": (["resume", "done"], 2, "it was started from Python", run_from_python),
    "resume what Python began, half": (
        ["resume", "done", "--model", "mine:net"],
        2,
        "--model and --data must both be given",
        run_from_python,
    ),
    "resume what another writes": (["resume", "done"], 3, "must have one writer, but process", write_at_the_same_time),
    "resume a newer run": (["resume", "done"], 3, "a newer Themis wrote it", then(write_the_schema(9))),
    "resume a damaged run": (["resume", "done"], 3, "run.sqlite cannot be read", then(cut("run.sqlite"))),
    "resume a damaged state": (["resume", "done"], 3, "is damaged", then(cut("state/*"))),
    "resume an empty state": (["resume", "done"], 3, "is damaged", then(cut("state/*", 0))),
    # faults
    "faults of nothing": (["faults"], 2, "must be given: see themis faults --help"),
    "faults of nowhere": (["faults", "nowhere"], 2, "nowhere is not one: check the path"),
    "faults of an experiment": (["faults", "."], 2, "holds the results of an experiment", begin_an_experiment),
    "faults of a folder of runs": (["faults", "."], 2, ". is a folder of runs: name one of them (done)", finished_run),
    "a folder of runs to watch": (["watch", "."], 2, ". is a folder of runs: name one of them (done)", finished_run),
    "a fault that is none": (["faults", "done", "99999"], 2, "the run has no fault 99999", finished_run),
    "a fault in words": (["faults", "done", "first"], 2, "FAULT must be a whole number", finished_run),
    "unknown column": (["faults", "done", "--where", "anser = 3"], 2, "did you mean 'answer'", finished_run),
    "half a condition": (
        ["faults", "done", "--where", "answer ="],
        2,
        "must be selected by an SQL condition",
        finished_run,
    ),
    "a harmful condition": (["faults", "done", "--where", "1; DROP TABLE faults"], 2, "syntax error", finished_run),
    "unknown order": (["faults", "done", "--sort", "distanc"], 2, "did you mean 'distance'", finished_run),
    "unknown stream": (["faults", "done", "--stream", "serch"], 2, "did you mean 'search'", finished_run),
    "export of an unknown kind": (["faults", "done", "--export", "a.xlsx"], 2, "must end in", finished_run),
    "export over a file": (["faults", "done", "--export", "a.csv"], 2, "exist", finished_run, write("a.csv", "mine")),
    "export to nowhere": (["faults", "done", "--export", "no/where/a.csv"], 2, "no/where does not", finished_run),
    "faults of a newer run": (["faults", "done"], 3, "a newer Themis wrote it", then(write_the_schema(9))),
    "faults of a damaged run": (["faults", "done"], 3, "run.sqlite cannot be read", then(cut("run.sqlite"))),
    "a summary cut short": (["faults", "done"], 3, "summary.json is damaged", then(cut("summary.json"))),
    # replay
    "replay nothing": (["replay", "done"], 2, "FAULT must be given", finished_run),
    "replay what is no fault": (["replay", "done", "99999"], 2, "the run has no fault 99999", finished_run),
    "replay without the module": (["replay", "done", FIRST], 2, "No module named 'mine'", then(remove_the_module)),
    "replay what Python began": (["replay", "done", FIRST], 2, "it was started from Python", run_from_python),
    "replay with data of another size": (
        ["replay", "done", FIRST, "--data", "mine:wide"],
        3,
        "the model raised RuntimeError",
        finished_run,
    ),
    "replay with no data": (["replay", "done", FIRST, "--data", "mine:empty"], 3, "at least one seed", finished_run),
    "replay a damaged tensor": (
        ["replay", "done", FIRST],
        3,
        "is damaged",
        then(cut("tensors/*")),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_reported_in_one_line_with_its_exit_code(tmp_path, monkeypatch, capsys, name):
    enter(tmp_path, monkeypatch)
    words, code, message, *setup = WRONG[name]
    assert message in refused(words, code, setup, capsys)


def test_a_folder_of_many_runs_names_the_newest_first(tmp_path):
    for number in range(10):
        (tmp_path / f"run {number}").mkdir()
        database = tmp_path / f"run {number}" / "run.sqlite"
        database.touch()
        os.utime(database, (number, number))
    newest = ", ".join(f"'{tmp_path / f'run {number}'}'" for number in (9, 8, 7, 6, 5, 4, 3, 2))
    with pytest.raises(UsageError, match=re.escape(f"folder of runs: name one of them ({newest} and 2 more)")):
        themis.open_run(tmp_path)


def test_the_table_of_wrong_folders_is_long():
    assert len(WRONG) >= 40
