"""Run folders made to hang or deceive their readers are refused at once, in one line that names file and remedy."""

import json
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import earlier_net
import pytest
import torch
from fuzzing import time_limit
from safetensors.torch import load_file, save_file

import themis
from themis import StoreError
from themis.cli import main
from themis.report.page import read_view
from themis.runs.store import reader as reader_module
from themis.runs.store.reader import Reader

EARLIER = Path(__file__).parents[1] / "earlier_run"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(EARLIER, tmp_path / "run")


def change(folder, script):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        database.executescript(script)


def change_record(folder, name, **values):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        [text] = database.execute("SELECT value FROM run WHERE name = ?", (name,)).fetchone()
        database.execute("UPDATE run SET value = ? WHERE name = ?", (json.dumps({**json.loads(text), **values}), name))


def refused(folder, capsys, *words):
    """The message of a command that is refused with exit code 3."""
    with time_limit(60):
        code = main([*(words or ("report",)), str(folder)])
    message = capsys.readouterr().err
    assert (code, len(message.splitlines())) == (3, 1), message
    assert "please report it" not in message
    return message


SCHEMAS = {
    "endless record": (
        f"DROP VIEW distinct_faults; ALTER TABLE run RENAME TO o; CREATE VIEW run AS {ENDLESS} SELECT o.* FROM o, n",
        "but its table 'run' is missing",
    ),
    "endless faults": (
        f"DROP VIEW distinct_faults; DROP TABLE faults; CREATE VIEW faults AS {ENDLESS} SELECT * FROM n",
        "must have the tables of a run of Themis, but its ",
    ),
    "endless search for a round": (
        "ALTER TABLE rounds RENAME TO o; DELETE FROM o; "
        f"CREATE VIEW rounds AS {ENDLESS} SELECT o.* FROM n, o WHERE i < 0",
        "must have the tables of a run of Themis, but its ",
    ),
    "endless view": (
        f"DROP VIEW distinct_faults; CREATE VIEW distinct_faults AS {ENDLESS} SELECT * FROM n",
        "but its view 'distinct_faults' was changed",
    ),
    "trigger": (
        "CREATE TRIGGER later AFTER INSERT ON faults BEGIN DELETE FROM faults; END",
        "but its trigger 'later' was added",
    ),
    "another theta": (
        "ALTER TABLE faults RENAME COLUMN theta_sigma TO theta_other",
        "its faults have another theta",
    ),
    "column": ("ALTER TABLE rounds ADD COLUMN more TEXT", "but its table 'rounds' was changed"),
    "index": ("DROP INDEX faults_by_outcome", "but its index 'faults_by_outcome' is missing"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_tables_that_are_not_those_of_a_run_are_refused(folder, capsys, name):
    script, message = SCHEMAS[name]
    change(folder, script)
    for words in (["report"], ["faults"], ["groups"]):
        text = refused(folder, capsys, *words)
        assert message in text
        assert "restore the run folder from a copy" in text


def test_a_query_has_a_time_limit(folder, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_QUERY_SECONDS", 0.2)
    with (
        closing(Reader(folder)) as run,
        time_limit(60),
        pytest.raises(StoreError, match=r"took more than 0\.2 seconds"),
    ):
        run.select("*", "1", (), "1", table=f"({ENDLESS} SELECT count(*) FROM n)")


def test_cells_have_a_largest_size(folder, capsys):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        database.execute("UPDATE run SET value = ? WHERE name = 'start'", (f'"{"a" * (20 << 20)}"',))
    assert "string or blob too big" in refused(folder, capsys)


@pytest.mark.parametrize("name", ["summary.json", "shrunk.json", "state/*", "tensors/*", "run.sqlite-wal"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_regular_files_are_read(folder, capsys, name, kind):
    path = next(folder.glob(name), folder / name)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    assert str(path) in refused(folder, capsys)


def test_a_lock_that_is_a_pipe_is_not_waited_for(folder, capsys):
    (folder / "summary.json").unlink()
    os.mkfifo(folder / "run.lock")
    with time_limit(60):
        assert main(["faults", str(folder)]) == 0


def test_deep_json_is_refused(folder, capsys):
    (folder / "summary.json").write_text("[" * 100_000)
    assert "summary.json is damaged: it has more than 40 levels" in refused(folder, capsys)


VALUES = {
    "a text for a number": ("start", {"n_neurons": "11"}, "start.n_neurons must be a whole number from 0, got '11'"),
    "a number of neurons": ("start", {"n_neurons": 12}, "start.n_neurons must be 11, the sum over its layers, got 12"),
    "a chunk without end": ("start", {"chunk": 2**40}, "start.chunk must be a whole number from 1 to 16,777,216"),
    "bounds": ("start", {"bounds": [1, 0]}, "start.bounds must be two ascending numbers, got [1, 0]"),
    "an unknown name": ("start", {"new": 1}, "start must not have 'new', which this version does not know"),
    "threads": ("environment", {"threads": 10**9}, "environment.threads must be a whole number from 1 to 4,096"),
    "a setting": ("settings", {"alpha": 2}, "settings: alpha must lie in [0.5, 1)"),
    "an unknown setting": (
        "settings",
        {"speed": 2},
        "settings.speed must be a setting that this version of Themis has",
    ),
    "an origin": ("origin", {"weights": 7}, "origin.weights must be text, got 7"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_wrong_value_in_the_record_is_named(folder, capsys, name):
    key, values, message = VALUES[name]
    change_record(folder, key, **values)
    text = refused(folder, capsys)
    assert "run.sqlite is damaged: " in text
    assert message in text
    assert "; restore the run folder from a copy" in text


@pytest.mark.parametrize(
    ("column", "value"),
    {
        "seed_id": -1,
        "perturbation": "'other'",
        "theta_sigma": 10,
        "stream": "'both'",
        "kind": "x'00'",
        "answer": "'three'",
        "confidence": "'high'",
        "margin": "'low'",
        "distance": -1,
        "position": 256,
        "chunk": 0,
        "raised": 2,
        "signature": "'[1]'",
        "tensors": "'../summary.json'",
    }.items(),
)
def test_a_wrong_value_of_a_fault_is_named(folder, capsys, column, value):
    change(folder, f"UPDATE faults SET {column} = {value} WHERE id = 14")
    for words in (["report"], ["faults"], ["groups"]):
        assert f"fault 14 has an invalid {column};" in refused(folder, capsys, *words)


def test_a_wrong_value_of_a_round_or_a_checkpoint_is_named(folder, capsys):
    change(folder, "UPDATE rounds SET coverage = 7")
    assert "rounds.coverage must be a finite number from 0 to 1, got 7.0" in refused(folder, capsys)
    change(folder, "UPDATE rounds SET coverage = 0.7; UPDATE checkpoint SET file = '../tensors/000001.safetensors'")
    assert "checkpoint.file must be the name of a file such as 000000320" in refused(folder, capsys)


def test_a_changed_state_is_refused(tmp_path, capsys):
    """Its name has a checksum."""
    options = {"max_tests": 60, "round_size": 30, "magnitude": 0.3}
    themis.run(earlier_net.make_net(), earlier_net.make_data(), "gaussian", out=tmp_path / "run", **options)
    [path] = (tmp_path / "run" / "state").iterdir()
    with closing(Reader(tmp_path / "run")) as run:
        assert run.checkpoint().tests == 60
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert f"{path} is damaged: it is not what the campaign wrote" in refused(tmp_path / "run", capsys)


def test_a_wrong_value_in_the_summary_is_named(folder, capsys):
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fault_rate": {"value": 0.1}}))
    assert "summary.json is damaged: its content.fault_rate must have 'low', which is missing" in refused(
        folder, capsys
    )


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("inputs", lambda inputs: inputs * torch.nan, "'inputs' must hold finite numbers"),
        ("inputs", lambda inputs: inputs[:0], "its array 'inputs' has the wrong type or shape"),
        ("inputs", lambda inputs: inputs[:, 1:].clone(), "'inputs' and 'clean_inputs' must have the same shape"),
        ("id", lambda ids: ids.float(), "its array 'id' has the wrong type or shape"),
        ("outputs", None, "it must have an array 'outputs', which is missing"),
    ],
)
def test_wrong_tensors_are_named(folder, capsys, name, changed, message):
    for path in (folder / "tensors").iterdir():
        arrays = load_file(path)
        before = arrays.pop(name)
        save_file(arrays if changed is None else {**arrays, name: changed(before)}, path)
    assert message in refused(folder, capsys)


def test_stored_text_cannot_control_the_terminal(folder, capsys):
    escape = "\x1b]0;owned\x07\x1b[2J"
    change_record(folder, "start", fault=escape)
    change(folder, f"UPDATE faults SET kind = '{escape}'")
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        [id] = database.execute("SELECT min(id) FROM faults").fetchone()
    for words in (["faults", folder], ["faults", folder, id], ["faults", folder, "--sort", "kind"], ["groups", folder]):
        assert main([*map(str, words)]) == 0
        assert "\x1b" not in capsys.readouterr().out
    assert main(["faults", str(folder), str(id)]) == 0
    assert "\\x1b]0;owned\\x07\\x1b[2J" in capsys.readouterr().out
    change(folder, f"UPDATE faults SET stream = '{escape}'")
    assert "\x1b" not in refused(folder, capsys)


def test_exported_text_is_not_a_formula(folder, tmp_path, capsys):
    change(folder, "UPDATE faults SET kind = '=cmd|'' /C calc''!A0'")
    assert main(["faults", str(folder), "--export", str(tmp_path / "faults.csv")]) == 0
    lines = (tmp_path / "faults.csv").read_text().splitlines()
    assert all("'=cmd|' /C calc'!A0" in line for line in lines[1:])
    assert len(lines) > 50


def test_an_intact_folder_is_read(folder):
    change(folder, "ANALYZE")  # adds tables of SQLite itself
    assert len(themis.open_run(folder).faults) > 50
    assert read_view(folder).state == "ended"


def test_resuming_reads_no_groups_from_a_pipe(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(earlier_net.__file__).parent))
    net, data, folder = earlier_net.make_net(), earlier_net.make_data(), tmp_path / "run"
    themis.run(net, data, "gaussian", magnitude=0.3, max_tests=40, split=[0.4, 0.3, 0.3], split_by=2, out=folder)
    os.mkfifo(tmp_path / "groups")
    change_record(folder, "settings", split_by=str(tmp_path / "groups"))
    words = ["resume", str(folder), "--model", "earlier_net:make_net", "--data", "earlier_net:make_data"]
    with time_limit(60):
        assert main([*words, "--max-tests", "80"]) == 3
    assert "groups cannot be read (it is a pipe, not a regular file)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "faults", "diff", "gate", "resume"])
def test_a_run_with_tests_has_a_start(folder, capsys, command):
    change(folder, "DELETE FROM run WHERE name = 'start'")
    words = {"diff": ["diff", folder], "gate": ["gate", "--max-fault-rate", "1"]}.get(command, [command])
    assert "is damaged: it has tests, but no start" in refused(folder, capsys, *map(str, words))
