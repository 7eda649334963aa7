"""Which files and folders Themis writes to: nothing of others is replaced, deleted or reached through a link."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
import torch
from torch import nn

import themis
from themis import ModelError, StoreError, UsageError
from themis.runs.store.files import Lock, check_free, fresh_file, has_mark, remove_leftovers, replacement, write_file
from themis.runs.store.reader import Reader
from themis.runs.store.writer import Writer

DATA = torch.rand(30, 4, generator=torch.Generator().manual_seed(0))
OPTIONS = {"max_tests": 200, "round_size": 100, "magnitude": 0.9, "tolerance": 1e-12, "plateau": None}


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def snapshot(folder):
    """Content and time of every file; links are not followed."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mtime_ns,
            os.readlink(path) if path.is_symlink() else content(path),
        )
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def content(path):
    return path.read_bytes() if path.is_file() else None


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "run"
    themis.run(net(), DATA, "gaussian", out=out, **OPTIONS)
    return out


@pytest.fixture
def finished(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


OTHERS = [
    "state/terraform.tfstate",
    "tensors/mine.pt",
    "run.sqlite.bak",
    "config.yaml",
    "summary.json",
    "report.html",
    "run.lock",
    "notes.txt",
]


@pytest.mark.quick
@pytest.mark.parametrize("name", OTHERS)
def test_a_run_does_not_begin_in_a_folder_with_other_files(tmp_path, name):
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"must be a new or empty folder, .*mine contains other files \(.*\)"):
        themis.run(net(), DATA, "gaussian", out=tmp_path / "mine", **OPTIONS)
    with pytest.raises(UsageError, match="contains other files"):
        Writer(tmp_path / "mine")
    assert snapshot(tmp_path) == before


@pytest.mark.quick
def test_a_campaign_that_fails_removes_only_what_it_created(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new"):
        with pytest.raises(ModelError):
            themis.run(nn.Linear(9, 3), DATA, "gaussian", out=tmp_path / name, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_files_that_appear_while_a_campaign_begins_are_kept(tmp_path):
    class Untidy(nn.Linear):
        def forward(self, x):
            for name in ("notes.txt", "tensors/mine.pt", "run.sqlite.bak"):
                (tmp_path / "run" / name).write_text("mine")
            raise ValueError("no")

    with pytest.raises(ModelError):
        themis.run(Untidy(4, 3), DATA, "gaussian", out=tmp_path / "run", **OPTIONS)
    left = {str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert left == {"notes.txt", "tensors/mine.pt", "run.sqlite.bak"}


@pytest.mark.quick
def test_resuming_keeps_files_of_others(finished):
    others = ["notes.txt", "run.sqlite.bak", "tensors/mine.pt", "tensors/mine.safetensors", "state/terraform.tfstate"]
    for name in (*others, "state/last.safetensors"):
        (finished / name).write_text("mine")
    assert themis.resume(finished, net(), DATA, max_tests=400).rounds[-1].tests == 400
    assert all((finished / name).read_text() == "mine" for name in others)
    assert (finished / "state/last.safetensors").read_text() == "mine"


@pytest.mark.quick
def test_a_run_that_is_left_as_it_is_does_not_change_by_a_byte(finished):
    before = snapshot(finished)
    assert themis.resume(finished, net(), DATA, max_tests=100).rounds[-1].tests == 200
    assert themis.resume(finished, net(), DATA).stop_reason == "tests"
    assert snapshot(finished) == before
    (finished / "run.lock").unlink()
    shutil.rmtree(finished / "tensors")
    before = snapshot(finished)
    themis.resume(finished, net(), DATA)
    assert snapshot(finished) == before
    assert not (finished / "tensors").exists()


LINKS = ["run.sqlite", "run.sqlite-wal", "run.lock", "summary.json", "config.yaml", "tensors", "state", "track"]


@pytest.mark.quick
@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_run_folder_is_refused_in_words(finished, tmp_path, name):
    path, elsewhere = finished / name, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    elif name == "track":
        elsewhere.mkdir()
    else:
        elsewhere.write_text("")
    if elsewhere.is_dir():
        (elsewhere / "mine.txt").write_text("mine")
    path.symlink_to(elsewhere)
    before = snapshot(tmp_path)
    with pytest.raises((UsageError, StoreError), match=rf"{name} must (not be a symbolic link|be a regular file)"):
        themis.resume(finished, net(), DATA, max_tests=400)
    assert snapshot(tmp_path) == before
    assert name == "run.sqlite-wal" or Reader(finished).rounds(), "it can still be read"


def test_a_folder_that_is_named_by_a_link_is_the_folder(finished, tmp_path):
    (tmp_path / "latest").symlink_to(finished)
    assert themis.resume(tmp_path / "latest", net(), DATA, max_tests=400).rounds[-1].tests == 400


@pytest.mark.quick
def test_a_lock_of_somebody_else_is_not_overwritten(finished):
    (finished / "run.lock").write_text("package = 'mine'")
    with pytest.raises(UsageError, match=r"run.lock must be a lock of Themis"):
        themis.resume(finished, net(), DATA, max_tests=400)
    assert (finished / "run.lock").read_text() == "package = 'mine'"


@pytest.mark.quick
def test_files_are_not_written_through_links_or_to_devices(tmp_path):
    (tmp_path / "mine").write_text("mine")
    for name, target in (("link", "mine"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        with pytest.raises(UsageError, match="must not be a symbolic link"):
            write_file(tmp_path / name, b"new")
        with pytest.raises(UsageError, match="must not be a symbolic link"):
            check_free(tmp_path / name, replaces=True)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", type(tmp_path)("/dev/null")):
        with pytest.raises(UsageError, match="must be a regular file"):
            write_file(path, b"new")
    with pytest.raises(UsageError, match="it is a folder"):
        write_file(tmp_path, b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.quick
def test_temporary_names_cannot_be_predicted_and_two_writers_do_not_disturb_each_other(tmp_path):
    path = tmp_path / "report.html"
    (tmp_path / "report.html.part").symlink_to(tmp_path / "mine")
    (tmp_path / "mine").write_text("mine")
    with replacement(path) as first:
        with fresh_file(path) as second:  # looks for leftovers, and spares those of running processes
            assert first != second
            second.write_text("second")
        first.write_text("first")
    assert path.read_text() == "first"
    assert (tmp_path / "mine").read_text() == "mine"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["mine", "report.html", "report.html.part"]


KILLED = """
import os, sys
from pathlib import Path
from themis.runs.store.files import replacement
with replacement(Path(sys.argv[1])) as part:
    part.write_text("half")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.quick
def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "a.csv")])
    (left,) = tmp_path.iterdir()
    kept = [".themis-short.part", "themis-0123456789abcdef.part", ".themis-0123456789abcdef.part.txt"]
    for name in kept:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".themis-0123456789abcdef.part").symlink_to(tmp_path / kept[0])
    (tmp_path / ".themis-fedcba9876543210.part").mkdir()
    (tmp_path / ".themis-00000000000000ff.part-wal").write_text("")
    remove_leftovers(tmp_path)
    assert not left.exists()
    assert not (tmp_path / ".themis-00000000000000ff.part-wal").exists()
    assert len(list(tmp_path.iterdir())) == 5
    assert all((tmp_path / name).read_text() == "mine" for name in kept)


@pytest.mark.quick
def test_a_new_file_or_one_with_the_mark_of_themis_is_written(tmp_path):
    path = tmp_path / "page.md"
    for text in ("<!-- Written by Themis -->\n# Page", "<!-- Written by Themis -->\n# Again"):
        with fresh_file(path) as part:
            part.write_text(text)
    assert has_mark(path)
    path.write_text("# Mine, quoting <!-- Written by Themis -->")
    with pytest.raises(UsageError, match=r"must be new, .*page.md exists: choose another, or replace it with --force"):
        check_free(path)
    with fresh_file(path, replaces=True) as part:
        part.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.quick
def test_a_file_that_appears_in_the_meantime_is_kept(tmp_path):
    path = tmp_path / "a.csv"

    def write():
        with fresh_file(path) as part:
            part.write_text("ours")
            path.write_text("mine")

    with pytest.raises(UsageError, match="must be new"):
        write()
    assert path.read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


@pytest.mark.quick
def test_the_lock_of_a_deleted_folder_is_not_held(tmp_path):
    (tmp_path / "a").mkdir()
    lock = Lock(tmp_path / "a/lock")
    assert lock.is_held()
    shutil.rmtree(tmp_path / "a")
    assert not lock.is_held()
    (tmp_path / "a").mkdir()
    assert not lock.is_held()
    other = Lock(tmp_path / "a/lock")
    assert other.is_held()
    for each in (lock, other):
        each.release()


@pytest.mark.parametrize("moves", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_folder_that_disappears_during_the_campaign_is_one_sentence(tmp_path, moves, written_at_once):
    class Remove(themis.Callback):
        def on_round(self, round):
            if round.number == 1:
                moves(tmp_path / "run")

    with pytest.raises(StoreError, match=r"run was deleted or moved .* its \d+ tests and their faults are lost"):
        themis.run(net(), DATA, "gaussian", out=tmp_path / "run", callbacks=[Remove()], **OPTIONS)
    assert not (tmp_path / "run").exists()


def test_a_database_of_somebody_else_is_not_opened_for_writing(tmp_path):
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("CREATE TABLE songs (name)")
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match="contains other files"):
        themis.run(net(), DATA, "gaussian", out=tmp_path, **OPTIONS)
    assert snapshot(tmp_path) == before
