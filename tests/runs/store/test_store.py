"""The run folder: what is kept, who can read it, and what happens when the disk fails."""

import errno
import json
import sqlite3
import subprocess
import threading
from contextlib import closing

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from digit_campaign import campaign
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from warm_python import warm_python

import themis
from themis import StoreError, UsageError
from themis.campaign import recorder
from themis.runs.faults import telling
from themis.runs.store import tensors, writer
from themis.runs.store.reader import Reader
from themis.runs.store.schema import SCHEMA_VERSION
from themis.runs.store.tensors import choose_kept, read_tensors

pytestmark = pytest.mark.xdist_group("campaign")

faults_found = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5)), max_size=40
)  # seed, answer, score


@pytest.mark.quick
@given(faults_found, st.integers(0, 12), st.data())
def test_which_faults_are_kept_does_not_depend_on_when_they_were_chosen(found, n, data):
    seed, answer, score = (np.array([each[k] for each in found], dtype=np.int64) for k in range(3))
    id = np.arange(len(found))
    at_once = set(id[choose_kept(seed, answer, score.astype(float), id, n)].tolist())
    held = np.zeros(0, dtype=np.int64)
    first = 0
    while first < len(found):
        stop = first + data.draw(st.integers(1, 10))
        held = np.concatenate([held, id[first:stop]])
        held = held[choose_kept(seed[held], answer[held], score[held].astype(float), held, n)]
        first = stop
    assert set(held.tolist()) == at_once
    assert len(at_once) == min(n, len(found))


@given(faults_found, st.integers(1, 12))
def test_every_seed_and_outcome_is_kept_once_before_any_is_kept_twice(found, n):
    seed, answer, score = (np.array([each[k] for each in found], dtype=np.int64) for k in range(3))
    id = np.arange(len(found))
    kept = choose_kept(seed, answer, score.astype(float), id, n)
    counts = {}
    for k in id[kept]:
        counts.setdefault((seed[k], answer[k]), []).append(score[k])
    distinct = {(s, a) for s, a, _ in found}
    if any(len(each) > 1 for each in counts.values()):
        assert set(counts) == distinct
    for (s, a), scores in counts.items():
        everything = sorted(z for x, y, z in found if (x, y) == (s, a))
        assert sorted(scores) == everything[: len(scores)], "the most telling first"


@pytest.fixture(scope="module")
def stored(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("stored") / "run"
    return path, campaign(trained, out=path, max_stored=40, batch_size=64)


def test_large_inputs_that_will_not_be_stored_are_not_copied(stored, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "MIN_SELECTED_BYTES", 0)
    copied, add = [], writer.Writer.add_faults

    def watch(self, stop, columns, tensors):
        copied.append(0 if tensors is None else len(tensors))
        return add(self, stop, columns, tensors)

    monkeypatch.setattr(writer.Writer, "add_faults", watch)
    result = campaign(trained, out=tmp_path / "run", max_stored=40, batch_size=64)
    assert 40 < sum(copied) < len(result.faults)
    with closing(Reader(stored[0])) as expected, closing(Reader(tmp_path / "run")) as run:
        kept = [id for (id,) in run.select("id", "tensors IS NOT NULL")]
        assert kept == [id for (id,) in expected.select("id", "tensors IS NOT NULL")]
        others = expected.tensors(kept)
        for id, each in run.tensors(kept).items():
            for name in ("clean_inputs", "inputs", "outputs"):
                assert torch.equal(getattr(each, name), getattr(others[id], name))


def test_no_input_is_copied_if_none_is_stored(trained, tmp_path, monkeypatch):
    copied, add = [], writer.Writer.add_faults

    def watch(self, stop, columns, tensors):
        copied.append(0 if tensors is None else len(tensors))
        return add(self, stop, columns, tensors)

    monkeypatch.setattr(writer.Writer, "add_faults", watch)
    result = campaign(trained, out=tmp_path / "run", max_stored=0)
    assert sum(copied) == 0
    with closing(Reader(tmp_path / "run")) as run:
        assert run.count() == len(result.faults) > 0
        assert list(run.select("id", "tensors IS NOT NULL")) == []


@pytest.mark.quick
def test_portions_have_every_row_once_whatever_the_sizes_of_the_parts(monkeypatch):
    monkeypatch.setattr(tensors, "NEW_FILE_BYTES", 400)
    clean, seed = torch.rand(4, 5), torch.randint(4, (40,))
    parts = []
    for first, stop in ((0, 3), (3, 3), (3, 30), (30, 31), (31, 40)):
        ids = torch.arange(first, stop)
        parts.append(
            tensors.Tensors(ids, clean, clean[seed[first:stop]] + 1, ids[:, None] + 0.5, seed=seed[first:stop])
        )
    wanted = np.array([0, 2, *range(4, 29), 30, 39])
    portions = list(tensors._pick(parts, wanted))
    assert all(sum(part.nbytes for part in portion) <= 2 * 400 + 100 for portion in portions)
    joined = tensors.Tensors.join(part for portion in portions for part in portion)
    assert joined.id.tolist() == wanted.tolist()
    assert torch.equal(joined.clean_inputs, clean[seed[joined.id]])
    assert torch.equal(joined.outputs[:, 0], joined.id + 0.5)


@pytest.mark.quick
def test_all_rows_and_the_most_telling_tensors_are_kept(stored):
    path, result = stored
    columns = result.faults.columns
    expected = choose_kept(
        columns["seed_id"], columns["answer"], telling(columns["distance"], columns["confidence"]), columns["id"], 40
    )
    with closing(Reader(path)) as run:
        assert run.count() == len(result.faults) > 40
        kept = [id for (id,) in run.select("id", "tensors IS NOT NULL")]
        assert kept == columns["id"][expected].tolist()
        tensors = run.tensors(kept)
    by_id = {fault.id: fault for fault in result.faults}
    for id, each in tensors.items():
        again = by_id[id].replay()
        assert torch.equal(each.inputs[0], again.inputs)
        assert torch.equal(each.clean_inputs[0], again.clean_inputs)
        assert torch.equal(each.outputs[0], again.outputs)
    on_disk = sum(len(read_tensors(file)) for file in (path / "tensors").iterdir())
    assert on_disk <= 2 * 40


def test_no_tensors_are_stored_if_max_stored_is_zero(trained, tmp_path):
    campaign(trained, out=tmp_path / "run", max_stored=0, max_tests=1280)
    with closing(Reader(tmp_path / "run")) as run:
        assert run.count() > 0
        assert run.count("tensors IS NOT NULL") == 0
    assert list((tmp_path / "run/tensors").iterdir()) == []


def test_many_small_files_are_merged(trained, tmp_path, written_at_once):
    result = campaign(trained, out=tmp_path / "run", max_tests=6400, magnitude=0.9, max_stored=9999)
    with closing(Reader(tmp_path / "run")) as run:
        assert len(run.tensors([fault.id for fault in result.faults])) == len(result.faults)
    assert len(result.faults) > 1000
    assert len(list((tmp_path / "run/tensors").iterdir())) < 40


def test_pending_tensors_do_not_fill_the_memory_while_a_slow_disk_is_spared(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "WRITING_SHARE", 1e-12)  # writing takes more than its share of the time
    monkeypatch.setattr(writer, "MAX_FAULT_DELAY", 1e9)
    monkeypatch.setattr(writer, "NEW_FILE_BYTES", 1 << 17)
    monkeypatch.setattr(tensors, "NEW_FILE_BYTES", 1 << 15)
    pending, flush = [], writer.Writer.flush

    def watch(self, *arguments, **options):
        n_stored = flush(self, *arguments, **options)
        pending.append(sum(part.nbytes for part in self._pending.tensors))
        return n_stored

    monkeypatch.setattr(writer.Writer, "flush", watch)
    result = campaign(trained, out=tmp_path / "run")
    assert 0 < max(pending) < 1 << 17
    files = list((tmp_path / "run" / "tensors").iterdir())
    assert len(files) > 1
    stored = torch.cat([read_tensors(path).id for path in files])
    assert sorted(stored.tolist()) == sorted(result.faults.columns["id"].tolist())


def test_tests_run_while_faults_are_written_and_nobody_hears_of_them_before(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "WRITING_SHARE", 1e-12)  # writing takes more than its share, so nobody waits for it
    monkeypatch.setattr(writer, "MAX_FAULT_DELAY", 0.0)
    path, has_run, overlaps, heard = tmp_path / "run", threading.Event(), [], []
    write = writer._Store.write_rows

    def write_after_more_tests(self, pending, state):
        has_run.clear()
        # The first batch is waited for, since none has shown how long writing takes; after the last, no test is left.
        overlaps.append(has_run.wait(5) if overlaps and pending.stop < 1280 else None)
        write(self, pending, state)

    class Listener(themis.Callback):
        def on_fault(self, fault):
            with closing(sqlite3.connect(path / "run.sqlite")) as database:
                heard.append(database.execute("SELECT COUNT(*) FROM faults WHERE id = ?", (fault.id,)).fetchone())

    monkeypatch.setattr(writer._Store, "write_rows", write_after_more_tests)
    options = {"magnitude": 0.9, "max_tests": 1280, "batch_size": 64, "tolerance": 1e-9, "plateau": None}
    with trained[0].register_forward_pre_hook(lambda *_: has_run.set()):
        result = campaign(trained, out=path, callbacks=[Listener()], **options)
    assert len(overlaps) > 3
    assert False not in overlaps
    assert heard == [(1,)] * len(result.faults)
    assert len(heard) > 100


def test_a_disk_that_fails_beside_the_campaign_stops_it(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MAX_FAULT_DELAY", 0.0)
    heard, written, write = [], [], writer._Store.write_rows

    def fail_later(self, pending, state):
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, pending, state)
        written.append(pending.stop)

    class Listener(themis.Callback):
        def on_fault(self, fault):
            heard.append(fault.id)

    monkeypatch.setattr(writer._Store, "write_rows", fail_later)
    with pytest.raises(StoreError, match="No space left on device; free some space, or lower max_stored"):
        campaign(trained, out=tmp_path / "run", magnitude=0.9, callbacks=[Listener()])
    with closing(Reader(tmp_path / "run")) as run:
        assert heard == [id for (id,) in run.select("id", limit=len(heard))] != []
    monkeypatch.setattr(writer._Store, "write_rows", write)
    resumed = themis.resume(tmp_path / "run", *trained)
    whole = campaign(trained, magnitude=0.9)
    assert [fault.id for fault in resumed.faults] == [fault.id for fault in whole.faults]


def test_columns_that_share_their_memory_are_written_and_read(tmp_path):
    inputs = torch.rand(3, 1, 4, 4)
    rows = tensors.Tensors(torch.arange(3), inputs, inputs, inputs[:, 0, 0])
    content = b"".join(tensors.content_of(tensors.columns_of([rows])))
    (tmp_path / "000001.safetensors").write_bytes(content)
    read = read_tensors(tmp_path / "000001.safetensors")
    assert torch.equal(read.clean_inputs, inputs)
    assert torch.equal(read.inputs, inputs)
    assert torch.equal(read.outputs, inputs[:, 0, 0])


ARRAYS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in tensors._DTYPE_NAMES},
    "turned": torch.rand(4, 5).T,
    "one number": torch.tensor(3.5),
    "a row of another array": torch.arange(12.0).reshape(3, 4)[1],
    "repeated": torch.ones(1).expand(3, 2),
    "without stride": torch.ones(1).expand(1),
    "empty": torch.zeros(0, 4),
    "größe": torch.rand(2),
}


def test_other_programs_read_the_files_as_those_of_the_library(tmp_path):
    metadata = {"values": '{"quoted": "é"}', "a": "1"}
    content = b"".join(tensors.content_of(ARRAYS, metadata))
    (tmp_path / "arrays.safetensors").write_bytes(content)
    with safetensors.safe_open(tmp_path / "arrays.safetensors", "pt") as file:
        assert file.metadata() == metadata
        assert sorted(file.keys()) == sorted(ARRAYS)
        for name, array in ARRAYS.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert read.tolist() == array.tolist()


def test_a_file_has_the_same_bytes_as_the_librarys():
    arrays = {"outputs": torch.rand(3, 2), "id": torch.arange(3), "part": torch.zeros(3, dtype=torch.uint8)}
    assert b"".join(tensors.content_of(arrays)) == safetensors.torch.save(arrays)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float64)])
@pytest.mark.parametrize("sizes", [(3,), (3, 0, 4), (1, 1, 1, 1)])
def test_rows_in_several_tensors_are_written_as_one_array(sizes, dtypes):
    parts = [torch.rand(2, n, dtype=dtypes[k % 2]).T for k, n in enumerate(sizes)]
    others = {"id": torch.arange(3), "a": torch.rand(3)}
    whole = b"".join(tensors.content_of({**others, "x": torch.cat(parts)}))
    assert b"".join(tensors.content_of({**others, "x": parts})) == whole


def test_an_array_whose_type_safetensors_lacks_is_refused():
    with pytest.raises(StoreError, match=r"x must have a type that can be stored, got torch\.complex128: convert it"):
        tensors.content_of({"x": torch.zeros(2, dtype=torch.complex128)})


def test_pandas_reads_the_folder_without_themis(stored):
    path, result = stored
    with closing(sqlite3.connect(path / "run.sqlite")) as database:
        faults = pd.read_sql("SELECT * FROM faults", database)
        rounds = pd.read_sql("SELECT * FROM rounds", database)
        distinct = pd.read_sql("SELECT * FROM distinct_faults", database)
        schema = "\n".join(row[0] for row in database.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"))
    assert len(faults) == len(result.faults)
    assert faults["theta_sigma"].max() == pytest.approx(0.3)
    assert rounds["faults"].iloc[-1] == len(result.faults)
    assert len(distinct) == result.rounds[-1].distinct_faults
    assert "-- the wrong outcome; -1 if the output was not finite" in schema
    assert '"theta_sigma" REAL NOT NULL,  -- 0 to 0.3 share of the input range' in schema
    layers = json.loads(faults["signature"][0])
    assert sum(layers) == pytest.approx(10_000, abs=3)


@pytest.mark.quick
@pytest.mark.parametrize(("version", "whose"), [(SCHEMA_VERSION + 1, "a newer"), (SCHEMA_VERSION - 1, "an older")])
def test_another_schema_is_refused_and_left_unchanged(stored, tmp_path, version, whose):
    import shutil

    shutil.copytree(stored[0], tmp_path / "run")
    with closing(sqlite3.connect(tmp_path / "run/run.sqlite")) as database:
        database.execute(f"PRAGMA user_version = {version}")
    before = (tmp_path / "run/run.sqlite").read_bytes()
    for attempt in (Reader, themis.resume):
        with pytest.raises(
            StoreError, match=f"must have schema {SCHEMA_VERSION}, but it has {version}: {whose} Themis wrote it"
        ):
            attempt(tmp_path / "run")
    assert (tmp_path / "run/run.sqlite").read_bytes() == before


@pytest.mark.quick
def test_damaged_files_are_reported(stored, trained, tmp_path):
    import shutil

    model, digits = trained
    for name, file, message in (
        ("database", "run.sqlite", "run.sqlite cannot be read"),
        ("state", "state/*.safetensors", "is damaged"),
    ):
        shutil.copytree(stored[0], tmp_path / name)
        (damaged,) = (tmp_path / name).glob(file)
        damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
        with pytest.raises(StoreError, match=message):
            themis.resume(tmp_path / name, model, digits, max_tests=10_000)
    shutil.copytree(stored[0], tmp_path / "tensors")
    for file in (tmp_path / "tensors/tensors").iterdir():
        file.unlink()
    with closing(Reader(tmp_path / "tensors")) as run:
        assert run.tensors([id for (id,) in run.select("id", "tensors IS NOT NULL")]) == {}
        assert len(run.faults()) == len(stored[1].faults)


def test_another_database_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as database:
        database.execute("CREATE TABLE songs (name)")
    with pytest.raises(StoreError, match="must be a run of Themis, but it is a different database"):
        Reader(tmp_path)
    with pytest.raises(UsageError, match=r"contains other files \(run.sqlite\)"):
        themis.run(nn.Linear(4, 3), torch.rand(30, 4), "gaussian", out=tmp_path)


def test_two_readers_and_a_writer_work_at_the_same_time(trained, tmp_path, written_at_once):
    path = tmp_path / "run"
    started, ended, seen, errors = threading.Event(), threading.Event(), {0: [], 1: []}, []
    has_read = threading.Condition()

    class Start(themis.Callback):
        def on_round(self, round):
            started.set()
            with has_read:  # on a busy machine the campaign could end before a thread reads again
                enough = {who: len(each) + 2 for who, each in seen.items()}  # one may have begun before this round
                has_read.wait_for(lambda: errors or all(len(seen[who]) >= n for who, n in enough.items()), 60)

    def read(who):
        started.wait(60)
        try:
            while not ended.is_set():
                with closing(Reader(path)) as run:
                    ids = [id for (id,) in run.select("id")]
                    kept = [id for (id,) in run.select("id", "tensors IS NOT NULL", order="id DESC", limit=5)]
                    run.tensors(kept)
                    run.rounds()
                with has_read:
                    seen[who].append(ids)
                    has_read.notify_all()
        except Exception as error:
            errors.append(error)

    readers = [threading.Thread(target=read, args=(who,)) for who in seen]
    for each in readers:
        each.start()
    result = campaign(trained, out=path, max_tests=6400, magnitude=0.9, max_stored=50, callbacks=[Start()])
    ended.set()
    for each in readers:
        each.join()
    assert errors == []
    everything = [fault.id for fault in result.faults]
    for ids in (*seen[0], *seen[1]):
        assert ids == everything[: len(ids)], "a reader sees the faults so far, in order, none missing"
    assert len({len(ids) for ids in seen[0]}) > 3, "it grew while it was read"


FULL = """
import resource, sys, torch, themis
sys.dont_write_bytecode = True  # a module that is imported later would leave a truncated file of bytecode behind
torch.set_num_threads(1)
path, limit = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
data = torch.rand(40, 8, generator=torch.Generator().manual_seed(0))
options = dict(magnitude=0.9, max_tests=6000, tolerance=1e-12, plateau=None)
def go():
    import os
    if os.path.exists(path + "/run.sqlite"):
        return themis.resume(path, net, data)
    return themis.run(net, data, "gaussian", out=path, **options)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
heard = []
try:
    go()
except themis.StoreError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
first = go()
whole = themis.run(net, data, "gaussian", **options)
print([f.id for f in first.faults] == [f.id for f in whole.faults], first.coverage == whole.coverage, len(first.faults))
"""


@pytest.mark.parametrize("limit", [4_000, 20_000, 60_000, 100_000])
def test_a_full_disk_is_explained_and_nothing_is_lost(tmp_path, limit):
    arguments = [warm_python(), "-c", FULL, str(tmp_path / "run"), str(limit)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said, outcome = done.stdout.splitlines()
    assert "run cannot be written: " in said
    assert "free some space, or lower max_stored; what was written before is safe" in said or "disk" in said
    assert outcome.startswith("True True")


def test_a_folder_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"out must be a folder, but .*file is a file"):
        themis.run(nn.Linear(4, 3), torch.rand(30, 4), "gaussian", out=tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be written: Not a directory"):
        themis.run(nn.Linear(4, 3), torch.rand(30, 4), "gaussian", out=tmp_path / "file/run")
    with pytest.raises(StoreError, match=r"/proc/run cannot be written"):
        themis.run(nn.Linear(4, 3), torch.rand(30, 4), "gaussian", out="/proc/run")
