"""Writing a run folder: one writer, beside the campaign; every fault is on disk before callbacks see it."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import StoreError, warn
from themis.judge.estimate import Estimate
from themis.measure.chunk import is_out_of_memory
from themis.measure.tests import Bools, Ints
from themis.runs.fault import COLUMNS
from themis.runs.faults import Array
from themis.runs.run import ESTIMATES, Round
from themis.runs.store import schema
from themis.runs.store.files import (
    LOCK,
    RUN_FILES,
    RUN_FOLDERS,
    SIDECARS,
    Lock,
    as_json,
    check_run_folder,
    explained,
    is_database,
    refuse_links,
    remove_leftovers,
    replacement,
    sync,
    write_file,
)
from themis.runs.store.schema import DATABASE, PARTS, STATE_FILE
from themis.runs.store.tensors import AT_ONCE_BYTES, NewTensors, TensorStore, checksum, content_of, file_name
from themis.runs.trust import TAG, KeyProblem, recorded_code, sign

SHARE = 1 / 100
"""Share of a campaign's time that writing faults may take; checkpoints may take half as much."""
LATEST_FAULTS, LATEST_CHECKPOINT = 1.0, 60.0
"""Seconds after which they are written regardless of the cost; faults also once their tensors have AT_ONCE_BYTES, so
that they do not fill the memory while a slow disk is spared."""
ROWS_AT_ONCE = 500
"""Rows that are made at once: the thread that runs the tests waits meanwhile if it needs the interpreter."""
FIRST_CHECKPOINT = 1.0
"""Seconds before the first checkpoint: so little is quickly run again."""

_STATE = re.compile(STATE_FILE)
"""Names of the files in `state`; others are not ours to remove."""


@dataclass(frozen=True)
class Checkpoint:
    """A campaign's state between two chunks: copies of arrays, and values for JSON."""

    tests: int
    rounds: int
    arrays: dict[str, Tensor]
    values: dict[str, Any]


@dataclass
class _Pending:
    """What has been added and is not being written yet."""

    columns: list[dict[str, Array]] = field(default_factory=list)
    tensors: list[NewTensors] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    nbytes: int = 0
    """The size of the tensors."""


class Writer:
    """The only writer of a run folder, which it locks.

    What a campaign adds is written by a thread while the campaign goes on; whoever else needs the files waits for it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        refuse_links(self.path, *RUN_FILES, "track")
        if not is_database(self.path / DATABASE):
            check_run_folder(self.path)
        self._signs = False
        self._created: list[Path] = []  # by this writer, in order; removed again if the campaign does not begin
        self._has_begun = False
        try:
            with explained(self.path):
                self._make_folder(self.path)
                self._lock = Lock(self.path / LOCK)
                if self._lock.is_new:
                    self._created.append(self.path / LOCK)
                for name in RUN_FOLDERS:
                    self._make_folder(self.path / name)
        except BaseException:
            self.close()
            raise
        self._pending = _Pending()
        self._n_added = self._n_stored = 0  # batches of faults, and rounds
        self._written = 0  # tests up to here are on disk
        self._seen = 0
        self._thread = ThreadPoolExecutor(1, "themis-store")
        self._writing: Future[None] | None = None
        self._write_again: Callable[[], None] | None = None
        self._last_seconds, self._last_ended = 0.0, perf_counter()
        self._due_faults, self._due_checkpoint = 0.0, perf_counter() + FIRST_CHECKPOINT

    def _make_folder(self, path: Path) -> None:
        if not path.is_dir():
            path.mkdir(parents=True)
            self._created.append(path)

    def create(self, record: dict[str, Any], max_stored: int, parts: bytes | None = None) -> None:
        """Begin to create a new run.

        record: what resuming and reporting need. parts: the split of the seeds.
        """
        check_run_folder(self.path)  # again: another process may have begun a run before this one had the lock
        self._writing = self._thread.submit(self._create, record, max_stored, parts)

    def _create(self, record: dict[str, Any], max_stored: int, parts: bytes | None) -> None:
        with self._explained():
            for name in (*RUN_FOLDERS, "."):
                remove_leftovers(self.path / name)
            for name in (DATABASE, *SIDECARS, PARTS):  # left by a run that was killed before its first test
                (self.path / name).unlink(missing_ok=True)
            self._create_file("config.yaml", _config(record))
            self._create_file("environment.json", as_json(record["environment"], indent=2))
            if parts is not None:
                self._create_file(PARTS, parts)
            self._created += [self.path / name for name in (DATABASE, *SIDECARS)]
            with replacement(self.path / DATABASE) as part, closing(_database(part)) as database:
                database.execute("PRAGMA synchronous = OFF")  # it is synced once, when it is complete
                schema.create(
                    database,
                    [(theta["name"], "{low:g} to {high:g} {unit}".format(**theta)) for theta in record["theta"]],
                )
                database.execute("BEGIN")
                database.executemany(
                    "INSERT INTO run VALUES (?, ?)", [(k, as_json(v).decode()) for k, v in record.items()]
                )
                self._signs = True
                self._sign(database)
                database.execute("COMMIT")  # closing merges the log into the file, which is then renamed
            sync(self.path.parent)
            self._connect(record, max_stored)

    def _create_file(self, name: str, content: bytes) -> None:
        write_file(self.path / name, content)
        self._created.append(self.path / name)

    def reopen(self, record: dict[str, Any], max_stored: int, *, signs: bool = False) -> None:
        """Resume a run; faults and rounds after the last checkpoint stay until they are measured again.

        signs: whether the code that the folder names is known to be this user's or trusted.
        """
        self._signs = signs
        with self._explained():
            self._connect(record, max_stored)
            schema.upgrade(self._database)
            self._has_begun = True
            for name in (*RUN_FOLDERS, "."):
                remove_leftovers(self.path / name)
            write_file(self.path / "config.yaml", _config(record))
            self.note("settings", record["settings"])
            self.note("origin", record["origin"])
            self.note("failed", None)
            self.wait()
            (self.path / "summary.json").unlink(missing_ok=True)  # the campaign is running again
            kept = self._database.execute(
                "SELECT id, seed_id, answer, distance, confidence, CAST(tensors AS INTEGER) FROM faults "
                "WHERE tensors IS NOT NULL"
            ).fetchall()
            table = np.array(kept, dtype=np.float64).reshape(-1, 6).T  # NULL becomes NaN
            ids, seeds, answers, files = (table[k].astype(np.int64) for k in (0, 1, 2, 5))
            columns = {"id": ids, "seed_id": seeds, "answer": answers, "distance": table[3], "confidence": table[4]}
            self._tensor_store.restore(columns, files)
            row = self._database.execute("SELECT tests, file FROM checkpoint").fetchone()
            self._written = self._seen = row[0] if row else 0
            self._drop_states(row[1] if row else "")

    def _connect(self, record: dict[str, Any], max_stored: int) -> None:
        self._database = _database(self.path / DATABASE)
        schema.check(self._database, self.path)
        self._database.execute("PRAGMA synchronous = FULL")
        self._database.execute("PRAGMA trusted_schema = OFF")
        self._file = (self.path / DATABASE).stat()
        self._perturbation = record["perturbation"]
        self._tensor_store = TensorStore(self.path / "tensors", max_stored)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of the disk into one that says what to do, also if the folder is gone."""
        self._check_exists()
        try:
            with explained(self.path, is_run=True):
                yield
        except StoreError:
            self._check_exists()
            raise

    def _check_exists(self) -> None:
        """SQLite would go on writing to a deleted file, and nobody would know."""
        if not hasattr(self, "_file"):
            return
        with suppress(OSError):
            if os.path.samestat(self._file, (self.path / DATABASE).stat()):
                return
        raise StoreError(
            f"{self.path} was deleted or moved while its campaign was running: if it was deleted, its {self._seen:,} "
            "tests and their faults are lost; if it was moved, themis resume continues it there"
        )

    def note(self, name: str, value: Any) -> None:
        """Begin to add to the record."""
        self.wait()
        self._writing = self._thread.submit(self._note, name, as_json(value).decode())

    def _note(self, *row: str) -> None:
        with self._explained(), _transaction(self._database) as database:
            database.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", row)
            self._sign(database)
        self._has_begun = True

    def _sign(self, database: sqlite3.Connection) -> None:
        """Sign the code that the record names, so that this user may run it again without being asked."""
        if not self._signs:
            return
        rows = database.execute("SELECT name, value FROM run").fetchall()
        record = {name: json.loads(value) for name, value in rows}
        try:
            tag = sign(record)
        except KeyProblem as problem:
            tag = None
            if TAG not in record and recorded_code(record):  # once
                remedy = f"commands that rebuild its model will need --trust {self.path}"
                warn(f"the run cannot be signed because {problem}: {remedy}")
        database.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (TAG, as_json(tag).decode()))

    def worth_keeping(self, columns: dict[str, Array]) -> Bools:
        """Which of some new faults can be among those whose tensors are stored in the end."""
        return self._tensor_store.worth_keeping(columns)

    def add_faults(self, stop: int, columns: dict[str, Array] | None, tensors: NewTensors | None) -> int:
        """Add the faults of the tests up to number `stop`, if there are any, and return the number of this addition.

        tensors: of those that are worth keeping, at least.
        """
        self._seen = stop
        if columns is not None and tensors is not None:
            self._pending.columns.append(columns)
            self._pending.tensors.append(tensors)
            self._pending.nbytes += tensors.nbytes
        self._n_added += 1
        return self._n_added

    def add_round(self, round: Round) -> int:
        """Add a round, and return the number of this addition."""
        self._pending.rounds.append(round)
        self._n_added += 1
        return self._n_added

    def flush(self, checkpoint: Callable[[], Checkpoint] | None = None, *, now: bool = False) -> int:
        """Begin to write what was added, and a checkpoint, if they are due; return how many additions are on disk.

        All of it is written in one transaction: after a crash the folder is as before or as after it. The campaign
        waits for it, so that callbacks hear of it at once, but at most a hundredth of the time since the last write.

        now: write it whether or not it is due.
        """
        is_full = self._pending.nbytes >= AT_ONCE_BYTES
        if self._writing is not None and not (now or is_full or self._writing.done()):
            return self._n_stored
        self.wait()
        began = perf_counter()
        is_due = now or is_full or (began >= self._due_faults and bool(self._pending.columns or self._pending.rounds))
        is_checkpoint_due = checkpoint is not None and (now or began >= self._due_checkpoint)
        if is_due or is_checkpoint_due:
            state = checkpoint() if checkpoint is not None and is_checkpoint_due else None
            pending, self._pending = self._pending, _Pending()
            write = partial(self._write, pending, self._seen, self._n_added, state, began)
            self._writing, self._write_again = self._thread.submit(write), write
            seconds = min(LATEST_CHECKPOINT, SHARE * (began - self._last_ended))
            if self._last_seconds <= seconds:
                wait([self._writing], seconds)
            if self._writing.done():
                self.wait()
        return self._n_stored

    def wait(self) -> int:
        """Wait until nothing is being written, and return how many additions are on disk."""
        if self._writing is not None:
            try:
                self._writing.result()  # raises the error of the disk
            except Exception as error:
                if self._write_again is None or not is_out_of_memory(error):
                    raise
                self._write_again()  # with the memory of the tests, since none runs now
                self._tensor_store.sweep()  # what the first attempt left
            self._writing = self._write_again = None
        return self._n_stored

    def _write(self, pending: _Pending, stop: int, n_added: int, checkpoint: Checkpoint | None, began: float) -> None:
        """Write what was added up to test number `stop`, `n_added` additions in all, and a checkpoint after them.

        If memory runs out, the database is as before, and the same call can be repeated.
        """
        with self._explained(), _yielding():
            state = None if checkpoint is None else self._write_state(checkpoint)
            stated = perf_counter()
            self._write_rows(pending, stop, state)
        self._n_stored = n_added
        ended = perf_counter()
        self._last_seconds, self._last_ended = ended - began, ended
        self._due_faults = ended + min(LATEST_FAULTS, (ended - stated) / SHARE)
        if state is not None:
            self._due_checkpoint = ended + min(LATEST_CHECKPOINT, 2 * (stated - began) / SHARE)

    def _write_rows(self, pending: _Pending, stop: int, state: tuple[int, int, str] | None) -> None:
        database = self._database
        with self._tensor_store.unchanged_by_errors():
            has_forgotten = self._tensor_store.forget(self._written, stop)
            columns, files, dropped = self._store_tensors(pending)
            with _transaction(database):
                database.execute("DELETE FROM faults WHERE id >= ? AND id < ?", (self._written, stop))
                for first in range(0, len(files), ROWS_AT_ONCE):
                    some = slice(first, first + ROWS_AT_ONCE)
                    rows = _fault_rows(
                        {name: column[some] for name, column in columns.items()}, self._perturbation, files[some]
                    )
                    database.executemany(f"INSERT INTO faults VALUES ({_marks(rows[0])})", rows)
                database.executemany("UPDATE faults SET tensors = NULL WHERE id = ?", [(id,) for id in dropped])
                for row in map(_round_row, pending.rounds):
                    database.execute(f"INSERT OR REPLACE INTO rounds VALUES ({_marks(row)})", row)
                if state is not None:
                    database.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?)", state)
        self._written = stop
        was_merged = bool(pending.columns) and self._merge_files()
        if was_merged or dropped or has_forgotten:
            self._tensor_store.sweep()
        if state is not None:
            self._drop_states(state[2])

    def _merge_files(self) -> bool:
        """Merge files of tensors if there are many, and return whether some are of no more use."""
        try:
            moved = self._tensor_store.merge_files()
        except Exception as error:
            if is_out_of_memory(error):  # another time
                return True
            raise
        pairs = [(file_name(file), id) for file, ids in moved.items() for id in ids.tolist()]
        if pairs:
            with _transaction(self._database) as database:
                database.executemany("UPDATE faults SET tensors = ? WHERE id = ?", pairs)
        return bool(pairs)

    def _store_tensors(self, pending: _Pending) -> tuple[dict[str, Array], list[str | None], list[int]]:
        """Write the tensors of the pending faults; return the columns and the files of the faults, and the faults whose
        tensors were dropped for them."""
        if not pending.columns:
            return {}, [], []
        columns = {name: np.concatenate([some[name] for some in pending.columns]) for name in pending.columns[0]}
        files, dropped = self._tensor_store.put(columns, pending.tensors)
        return columns, [file_name(file) if file else None for file in files.tolist()], dropped.tolist()

    def _write_state(self, checkpoint: Checkpoint) -> tuple[int, int, str]:
        # Every state has its own name: the last checkpoint's file must not change until the row is written.
        content = content_of(checkpoint.arrays, {"values": as_json(checkpoint.values).decode()})
        name = f"{checkpoint.tests:09d}-{checkpoint.rounds:06d}-{checksum(*content)}.safetensors"
        write_file(self.path / "state" / name, *content)
        return checkpoint.tests, checkpoint.rounds, name

    def _drop_states(self, current: str) -> None:
        for path in (self.path / "state").iterdir():
            if path.name != current and _STATE.fullmatch(path.name) and not path.is_symlink():
                path.unlink(missing_ok=True)

    def end(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        self.wait()
        with self._explained():
            write_file(self.path / "summary.json", as_json(summary, indent=2))

    def close(self) -> None:
        """Let others write to the folder; remove what this writer created if the campaign did not begin its tests."""
        if hasattr(self, "_thread"):
            self._thread.shutdown()  # after what is being written
        if hasattr(self, "_database"):
            self._database.close()
        if not self._has_begun:
            for path in reversed(self._created):
                with suppress(OSError):  # it does not exist, or is a folder with files of others
                    path.rmdir() if path.is_dir() else path.unlink()
        if hasattr(self, "_lock"):
            if not (self._has_begun or self._lock.is_new):
                self._lock.restore()
            self._lock.release()


def _database(path: Path) -> sqlite3.Connection:
    """A connection to an existing file, for one thread at a time; a missing file is not created."""
    uri = f"{path.resolve().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30, check_same_thread=False)


def _config(record: dict[str, Any]) -> bytes:
    """The content of config.yaml."""
    return _yaml(schema.config(record))


@contextmanager
def _yielding() -> Iterator[None]:
    """In the block, a thread that needs the interpreter waits for it 50 times less long than usually.

    The thread that runs the tests gives it away several times per chunk, and would else wait while the GPU is idle.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A block whose changes are written together, or not at all if it raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _fault_rows(columns: dict[str, Array], perturbation: str, files: list[str | None]) -> list[tuple[Any, ...]]:
    """Rows in the order of the table's columns."""
    values: list[Sequence[Any]] = []
    for column in COLUMNS:
        if column.name == "perturbation":
            values.append([perturbation] * len(files))
        elif column.name == "theta":
            values += columns["theta"].T.astype(np.float64).tolist()
        elif column.name == "signature":
            values.append(_signature_texts(np.rint(columns["signature"] * schema.SHARES).astype(np.int64)))
        elif column.type == "int" and column.missing is not None:
            values.append([None if value < 0 else value for value in columns[column.name].tolist()])
        else:
            values.append(columns[column.name].tolist())  # SQLite stores NaN as NULL
    return list(zip(*values, files, strict=True))


def _signature_texts(shares: Ints) -> list[str]:
    """Signatures `[faults, layers]`, in units of 1/SHARES, as JSON; `json.dumps` takes more than twice as long."""
    numbers = _numbers()[shares]
    return ["[" + row.tobytes().replace(b"\0", b"")[:-2].decode() + "]" for row in numbers]


@cache
def _numbers() -> NDArray[np.bytes_]:
    """The numbers from 0 to SHARES, each as it is followed by another one in JSON, and then by NULs."""
    return np.array([f"{number}, ".encode() for number in range(schema.SHARES + 1)])


def _marks(row: tuple[Any, ...]) -> str:
    return ", ".join("?" * len(row))


def _round_row(round: Round) -> tuple[Any, ...]:
    coverage = round.coverage
    return (
        round.number,
        round.tests,
        round.dropped,
        round.passes,
        round.faults,
        round.distinct_faults,
        round.failing_seeds,
        round.seconds,
        coverage.sampled,
        coverage.all,
        json.dumps(coverage.by_layer),
        coverage.n_neurons,
        coverage.n_dead,
        coverage.n_unseen,
        coverage.tests,
        coverage.forecast,
        round.criterion_score,
        json.dumps({name: _plain(getattr(round, name)) for name in ESTIMATES}),
    )


def _plain(value: Estimate | float | None) -> dict[str, float] | float | None:
    return asdict(value) if isinstance(value, Estimate) else value


def _yaml(values: dict[str, Any]) -> bytes:
    """YAML if PyYAML is installed; otherwise JSON, which is valid YAML."""
    try:
        import yaml
    except ImportError:
        return as_json(values, indent=2)
    return str(yaml.safe_dump(values, sort_keys=False)).encode()
