"""Run folders that were damaged or edited: every command works, or refuses them in one line, and none hangs."""

import json
import shutil
import sqlite3
import struct
from contextlib import closing, suppress
from pathlib import Path
from random import Random

import earlier_net
import pytest
import tiny_pictures
import torch
from fuzzing import CELLS, check_command, dump_json, mutate_bytes, mutate_place, mutate_plain, time_limit
from safetensors.torch import load_file, save_file

import themis
from themis.errors import ThemisError
from themis.report.page import read_view
from themis_integrations.browser.server import WatchedFolder

pytestmark = pytest.mark.xdist_group("fuzzed_folders")

EARLIER = Path(__file__).with_name("earlier_run")
N_MUTATIONS, N_SLOW_MUTATIONS = 60, 3000
"""Mutations per test, in `make test` and in `make slow`."""
SIGNATURES = [
    "[]",
    "[1]",
    "[-5,3]",
    "[1,2,3,4,5,6,7]",
    "[1e999,0]",
    "[999999,1]",
    "[[1,2]]",
    "[1,2",
    "[1[2]",
    '["a","b"]',
    "[NaN,1]",
    "{}",
    "7",
    "[0.5,0.5]",
]
ARRAY_CHANGES = ["remove", "double", "half", "shorter", "flat", "nan", "negative", "large", "extra", "swap", "ints"]
EXTRA_FILES = ["run.sqlite-wal", "run.sqlite-shm", "run.sqlite-journal", "shrunk.json", "run.lock", "report.html"]
EXTRA_CONTENT = [b"", b"[" * 5000, b'{"robustness": {"strengths": 3}}', b'{"faults": [1]}', b"\xff" * 99]


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A run folder of an earlier version, and one of this version with pictures, classes, a split and a criterion."""
    folder = tmp_path_factory.mktemp("originals")
    shutil.copytree(EARLIER, folder / "earlier")
    options = {"max_tests": 200, "round_size": 100, "magnitude": 0.6, "max_stored": 5, "split": [0.6, 0.2, 0.2]}
    themis.run(
        tiny_pictures.make_net(),
        tiny_pictures.make_data(),
        "gaussian",
        out=folder / "fresh",
        criterion="nc",
        classes=["cat", "dog", "owl"],
        **options,
    )
    return folder


def mutate_cell(folder, rng):
    """Change a cell of the database, even to a value that its column does not allow."""
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        table = rng.choice(["run", "rounds", "faults", "faults", "checkpoint"])
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        rows = database.execute(f"SELECT {columns[0]} FROM {table}").fetchall()
        column, value = rng.choice(columns), rng.choice(CELLS)
        database.execute("PRAGMA writable_schema = ON")
        before = database.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()[0]
        loose = before.replace(" NOT NULL", "").replace("CHECK (one = 1)", "")
        database.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (loose, table))
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        try:
            if rows:
                query = f'UPDATE {table} SET "{column}" = ? WHERE "{columns[0]}" = ?'
                database.execute(query, (value, rng.choice(rows)[0]))
        except sqlite3.Error:
            pass  # a key must be a number
        database.execute("PRAGMA writable_schema = ON")
        database.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", (before, table))
    return f"{table}.{column} = {value!r:.40}"


def mutate_record(folder, rng):
    """Change a value in the record of the run."""
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        rows = dict(database.execute("SELECT name, value FROM run"))
        name = rng.choice(sorted(rows))
        if rng.random() < 0.1:
            database.execute("DELETE FROM run WHERE name = ?", (name,))
            return f"removed {name}"
        value, change = mutate_plain({name: json.loads(rows[name])}, rng)
        value = value.get(name) if isinstance(value, dict) else value
        database.execute("UPDATE run SET value = ? WHERE name = ?", (dump_json(value), name))
        return f"record: {change}"


def mutate_rounds(folder, rng):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        [number, text] = database.execute("SELECT number, coverage_by_layer FROM rounds").fetchone()
        value, change = mutate_plain(json.loads(text), rng)
        database.execute("UPDATE rounds SET coverage_by_layer = ? WHERE number = ?", (dump_json(value), number))
        return f"coverage by layer: {change}"


def mutate_signature(folder, rng):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        values = [
            "[]",
            "[1]",
            "[-5, 3]",
            "[1, 2, 3, 4, 5, 6, 7]",
            "[1e999, 0]",
            "[999999, 1]",
            "[[1, 2]]",
            "[1, 2",
            "[1 2]",
        ]
        value = rng.choice([*values, '["a", "b"]', "[NaN, 1]", "{}", "[" * 900])
        database.execute("UPDATE faults SET signature = ? WHERE id = (SELECT max(id) FROM faults)", (value,))
        return f"signature {value[:40]}"


def mutate_schema(folder, rng):
    """Change a table, a view or a trigger."""
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    choices = {
        "endless faults": f"ALTER TABLE faults RENAME TO old; CREATE VIEW faults AS {endless} SELECT * FROM old, n",
        "endless record": f"ALTER TABLE run RENAME TO old; CREATE VIEW run AS {endless} SELECT name, value FROM old, n",
        "endless rounds": f"ALTER TABLE rounds RENAME TO old; CREATE VIEW rounds AS {endless} SELECT * FROM old, n",
        "endless search": (
            f"ALTER TABLE rounds RENAME TO o; DELETE FROM o; "
            f"CREATE VIEW rounds AS {endless} SELECT o.* FROM n, o WHERE i < 0"
        ),
        "endless checkpoint": f"DROP TABLE checkpoint; CREATE VIEW checkpoint AS {endless} SELECT i AS tests FROM n",
        "another view": "DROP VIEW distinct_faults; CREATE VIEW distinct_faults AS SELECT * FROM rounds",
        "a trigger": "CREATE TRIGGER t AFTER INSERT ON run BEGIN DELETE FROM faults; END",
        "no index": "DROP INDEX faults_by_outcome",
        "no rounds": "DROP TABLE rounds",
        "no faults": "DROP TABLE faults",
        "no record": "DROP TABLE run",
        "a column": "ALTER TABLE faults ADD COLUMN extra TEXT",
        "a table": "CREATE TABLE extra (a)",
        "another version": "PRAGMA user_version = 9",
        "an old version": "PRAGMA user_version = 1",
        "another application": "PRAGMA application_id = 1",
        "no rows": "DELETE FROM rounds; DELETE FROM checkpoint",
        "no faults left": "DELETE FROM faults",
    }
    name = rng.choice(sorted(choices))
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        if "RENAME" in choices[name]:
            database.execute("DROP VIEW IF EXISTS distinct_faults")
        database.executescript(choices[name])
    return name


def mutate_summary(folder, rng):
    path = folder / "summary.json"
    value, change = mutate_plain(json.loads(path.read_text()), rng)
    path.write_text(dump_json(value))
    return f"summary: {change}"


def mutate_checkpoint(folder, rng):
    """Change a value or an array of the checkpoint."""
    path = rng.choice(sorted((folder / "state").glob("*")))
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    (folder / "summary.json").unlink()  # so that the checkpoint is used
    if rng.random() < 0.5:
        value, change = mutate_plain(json.loads(header["__metadata__"]["values"]), rng)
        header["__metadata__"]["values"] = dump_json(value)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
        return f"checkpoint: {change}"
    return f"checkpoint: {mutate_arrays(path, rng, header.get('__metadata__'))}"


def mutate_arrays(path, rng, metadata=None):
    """Change an array of a safetensors file."""
    arrays = load_file(path)
    name = rng.choice(sorted(arrays))
    kind = rng.choice(
        ["remove", "double", "float", "shorter", "flat", "nan", "negative", "large", "extra", "swap", "ints"]
    )
    array = arrays[name]
    if kind == "remove":
        del arrays[name]
    elif kind == "double":
        arrays[name] = array.double()
    elif kind == "half":
        arrays[name] = array.half()
    elif kind == "shorter":
        arrays[name] = array[:-1].clone() if array.ndim and len(array) else array[None].clone()
    elif kind == "flat":
        arrays[name] = array.reshape(-1).clone()
    elif kind == "nan":
        arrays[name] = torch.full(array.shape, torch.nan)
    elif kind == "negative":
        arrays[name] = ~array if array.dtype == torch.bool else -array - 1
    elif kind == "large":
        arrays[name] = torch.full_like(array, {torch.bool: 1, torch.uint8: 200}.get(array.dtype, 2**31 - 1))
    elif kind == "extra":
        arrays["extra"] = torch.zeros(3)
    elif kind == "swap":
        other = rng.choice(sorted(arrays))
        arrays[name], arrays[other] = arrays[other].clone(), array.clone()
    else:
        arrays[name] = array.to(torch.int32)
    save_file({key: value.contiguous() for key, value in arrays.items()}, path, metadata)
    return f"{kind} {name} of {path.name}"


def mutate_tensors(folder, rng):
    paths = [path for name in ("tensors/*", "parts.safetensors") for path in folder.glob(name)]
    return mutate_arrays(rng.choice(sorted(paths)), rng)


def mutate_file(folder, rng):
    """Damage a file, or put something else in its place."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if rng.random() < 0.4:
        return f"{path.name}: {mutate_place(path, rng)}"
    content, change = mutate_bytes(path.read_bytes(), rng)
    path.write_bytes(content)
    return f"{path.name}: {change}"


def mutate_extra_file(folder, rng):
    """Put a file, a pipe or a folder where there is none."""
    name = rng.choice(
        ["run.sqlite-wal", "run.sqlite-shm", "run.sqlite-journal", "shrunk.json", "run.lock", "report.html"]
    )
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_bytes(
        rng.choice([b"", b"[" * 5000, b'{"robustness": {"strengths": 3}}', b'{"faults": [1]}', b"\xff" * 99])
    )
    if rng.random() < 0.6:
        return f"{name}: {mutate_place(path, rng)}"
    return f"{name}: {path.read_bytes()[:30]!r}"


MUTATIONS = (
    mutate_cell,
    mutate_cell,
    mutate_record,
    mutate_record,
    mutate_rounds,
    mutate_signature,
    mutate_schema,
    mutate_summary,
    mutate_checkpoint,
    mutate_checkpoint,
    mutate_tensors,
    mutate_file,
    mutate_file,
    mutate_extra_file,
)
MODULES = {"earlier": "earlier_net", "fresh": "tiny_pictures"}
COMMANDS = {
    "faults": "faults {run}",
    "all faults": "faults {run} --json --distinct --limit 0",
    "one fault": "faults {run} {id}",
    "csv": "faults {run} --export {out}/faults.csv --force",
    "npz": "faults {run} --export {out}/faults.npz --force",
    "png": "faults {run} --export {out}/faults.png --force",
    "groups": "groups {run}",
    "report": "report {run} --out {out}/report.html",
    "gate": "gate {run} --max-fault-rate 0.5 --fail-under coverage=0.5 --junit {out}/a.xml --markdown {out}/a.md",
    "replay": "replay {run} {id} --model {module}:make_net --data {module}:make_data",
    "diff": (
        "diff {run} {original} --model-a {module}:make_net --model-b {module}:make_net --data {module}:make_data "
        "--tests 50"
    ),
    "shrink": "shrink {run} {id} --model {module}:make_net --data {module}:make_data --curve",
    "resume": "resume {run} --model {module}:make_net --data {module}:make_data --max-tests 210 --no-report",
    "config": "run --config {run}/config.yaml --max-tests 20 --quiet --model {module}:make_net",
}


def fuzz(originals, tmp_path, capsys, n, seed):
    """Mutate a folder `n` times; after each mutation, run two commands and open the folder."""
    rng = Random(seed)
    commands = sorted(COMMANDS)
    codes = []
    for k in range(n):
        name = rng.choice(sorted(MODULES))
        folder, out = tmp_path / f"run{k}", tmp_path / "out"
        out.mkdir(exist_ok=True)
        shutil.copytree(originals / name, folder)
        with closing(sqlite3.connect(folder / "run.sqlite")) as database:
            [id] = database.execute("SELECT id FROM faults ORDER BY random()").fetchone()
        mutation = f"mutation {k} of {seed} ({name}): {MUTATIONS[k % len(MUTATIONS)](folder, rng)}"
        values = {"run": folder, "out": out, "id": id, "module": MODULES[name], "original": originals / name}
        for command in rng.sample(commands, 2):
            words = [word.format(**values) for word in COMMANDS[command].split()]
            codes.append(check_command(words, capsys, mutation))
        check_api(folder, mutation, rng)
        shutil.rmtree(folder)
    return codes


def check_api(folder, mutation, rng):
    """Open a folder from Python: it works, or raises an error of Themis."""
    try:
        with time_limit(), suppress(ThemisError):
            if rng.random() < 0.5:
                repr(themis.open_run(folder).summary())
            else:
                json.dumps(read_view(folder).as_json(), allow_nan=False)
    except Exception as error:
        raise AssertionError(f"{mutation}: opening the folder raised {error!r}") from error
    with time_limit():
        message = WatchedFolder(folder).look().message
    assert not message.partition("now: ")[2].startswith("unexpected"), f"{mutation}: {message}"


@pytest.mark.filterwarnings("ignore")
def test_damaged_folders_are_read_or_refused(originals, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(earlier_net.__file__).parent))
    codes = fuzz(originals, tmp_path, capsys, N_MUTATIONS, 0)
    assert {0, 3} <= set(codes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(1, 4))
def test_many_damaged_folders_are_read_or_refused(originals, tmp_path, monkeypatch, capsys, seed):
    monkeypatch.syspath_prepend(str(Path(earlier_net.__file__).parent))
    codes = fuzz(originals, tmp_path, capsys, N_SLOW_MUTATIONS // 3, seed)
    assert {0, 3} <= set(codes)
