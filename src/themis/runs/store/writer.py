"""Writing a run folder in a thread beside the campaign; every fault is on disk before callbacks see it."""

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from themis.errors import StoreError, warn
from themis.measure.tests import Bools
from themis.runs.fault import COLUMNS
from themis.runs.faults import Array
from themis.runs.run import Round
from themis.runs.store import files, schema
from themis.runs.store.schema import DATABASE, PARTS_FILE, ROUND_COLUMNS, ROUND_ESTIMATE_FORMS, STATE_FILE
from themis.runs.store.tensors import NEW_FILE_BYTES, Tensors, TensorStore, checksum, content_of, file_name
from themis.runs.trust import TAG, KeyProblem, recorded_code, sign

WRITING_SHARE = 1 / 100
"""Largest share of a campaign's time for writing faults; checkpoints may take half as much."""
MAX_FAULT_DELAY, MAX_CHECKPOINT_DELAY = 1.0, 60.0
"""Seconds after which faults and checkpoints are written whatever the cost. Faults are also written once their tensors
take NEW_FILE_BYTES of memory."""
ROWS_PER_BATCH = 500
"""Rows that are built at a time, because building them holds the GIL, which the thread that runs the tests needs."""
FIRST_CHECKPOINT_SECONDS = 1.0
"""Age of a campaign at its first checkpoint; a shorter campaign is quickly run again."""


@dataclass(frozen=True)
class Checkpoint:
    """A campaign's state between two chunks: copies of arrays, and values for JSON."""

    tests: int
    rounds: int
    arrays: dict[str, Tensor]
    values: dict[str, Any]


@dataclass
class _Pending:
    """What has been added but is not being written yet."""

    stop: int = 0
    """The number of the first test that has not been added yet."""
    columns: list[dict[str, Array]] = field(default_factory=list)
    tensors: list[Tensors] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    nbytes: int = 0
    """The size of the tensors."""


class Writer:
    """The only writer of a run folder, which it locks.

    A thread writes what the campaign adds while the campaign continues; methods that need the files wait for it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files.refuse_links(self.path, *files.RUN_FILES, "track")
        if not files.is_database(self.path / DATABASE):
            files.check_run_folder(self.path)
        self._claim = files.Claim(self.path, files.RUN_FOLDERS)
        self._store = _Store(self.path)
        self._pending, self._last_seconds, self._last_ended = _Pending(), 0.0, perf_counter()
        self._faults_due, self._checkpoint_due = 0.0, self._last_ended + FIRST_CHECKPOINT_SECONDS
        self._n_added = self._n_stored = 0  # batches of faults, and rounds
        self._thread = ThreadPoolExecutor(1, "themis-store")
        self._writing: Future[None] | None = None

    def create(self, record: dict[str, Any], max_stored: int, parts: bytes | None = None) -> None:
        """Begin to create a run from its record; `parts`: the content of the file with the split of the seeds."""
        files.check_run_folder(
            self.path
        )  # again, because another process may have begun a run before the lock was held
        self._store.tensors.n, self._store.signs = max_stored, True
        self._writing = self._thread.submit(self._store.create, self._claim, record, parts)

    def reopen(self, record: dict[str, Any], max_stored: int, *, signs: bool = False) -> None:
        """Resume a run; `signs`: sign the record, because the code that it names is this user's or trusted."""
        self._store.tensors.n, self._store.signs = max_stored, signs
        self._store.reopen(self._claim, record)
        self._pending.stop = self._store.seen

    def note(self, **values: Any) -> None:
        """Add to the record once what is being written is done; the campaign then counts as begun."""
        self._writing = self._thread.submit(self._note, _record_rows(values), self._writing)

    def _note(self, rows: list[tuple[str, str]], before: Future[None] | None) -> None:
        if before is not None:
            before.result()  # raises its error
        self._store.note(rows)
        self._claim.is_begun = True

    def worth_keeping(self, columns: dict[str, Array]) -> Bools:
        """Which new faults may be among those whose tensors are stored in the end."""
        return self._store.tensors.worth_keeping(columns)

    def add_faults(self, stop: int, columns: dict[str, Array] | None, tensors: Tensors | None) -> int:
        """Add the faults of the tests before `stop`, with the tensors worth keeping; return the addition's number."""
        self._pending.stop = self._store.seen = stop
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

        Everything is written in one transaction. The campaign waits for it so that callbacks are called promptly, but
        at most for a hundredth of the time since the last write.

        now: write it even if it is not due.
        """
        must_write = now or self._pending.nbytes >= NEW_FILE_BYTES
        if self._writing is not None and not (must_write or self._writing.done()):
            return self._n_stored
        self.wait()
        began = perf_counter()
        is_due = must_write or (began >= self._faults_due and bool(self._pending.columns or self._pending.rounds))
        state = checkpoint() if checkpoint is not None and (now or began >= self._checkpoint_due) else None
        if is_due or state is not None:
            pending, self._pending = self._pending, _Pending(self._pending.stop)
            self._writing = self._thread.submit(self._write, pending, self._n_added, state, began)
            seconds = min(MAX_CHECKPOINT_DELAY, WRITING_SHARE * (began - self._last_ended))
            if self._last_seconds <= seconds:
                wait([self._writing], seconds)
            if self._writing.done():
                self.wait()
        return self._n_stored

    def wait(self) -> int:
        """Wait until nothing is being written, and return how many additions are on disk."""
        if self._writing is not None:
            self._writing.result()  # raises the error of the disk
            self._writing = None
        return self._n_stored

    def _write(self, pending: _Pending, n_added: int, checkpoint: Checkpoint | None, began: float) -> None:
        """Write what was pending and a checkpoint."""
        with self._store.explained(), _yielding():
            state = None if checkpoint is None else self._store.write_state(checkpoint)
            stated = perf_counter()
            self._store.write_rows(pending, state)
        self._n_stored, ended = n_added, perf_counter()
        self._last_seconds, self._last_ended = ended - began, ended
        self._faults_due = ended + min(MAX_FAULT_DELAY, (ended - stated) / WRITING_SHARE)
        if state is not None:
            self._checkpoint_due = ended + min(MAX_CHECKPOINT_DELAY, 2 * (stated - began) / WRITING_SHARE)

    def end(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        self.wait()
        with self._store.explained():
            files.write_file(self.path / "summary.json", files.as_json(summary, indent=2))

    def close(self) -> None:
        """Release the folder; remove what this writer created if the campaign did not begin its tests."""
        self._thread.shutdown()  # after what is being written
        self._store.close()
        self._claim.release()


class _Store:
    """The database, the tensors and the state files of a run folder, for one thread at a time."""

    database: sqlite3.Connection
    perturbation: str

    def __init__(self, path: Path) -> None:
        self.path, self.signs = path, False
        self.tensors = TensorStore(path / "tensors", 0)
        self.seen = self.written = 0  # numbers of tests that have been run, and that are on disk
        self.file: os.stat_result | None = None  # of the database, once it is open

    def create(self, claim: files.Claim, record: dict[str, Any], parts: bytes | None) -> None:
        """Create the files of a new run."""
        with self.explained():
            self._remove_leftovers()
            for name in (DATABASE, *files.SIDECARS, PARTS_FILE):  # left by a run that was killed before its first test
                (self.path / name).unlink(missing_ok=True)
            claim.write("config.yaml", _config(record))
            claim.write("environment.json", files.as_json(record["environment"], indent=2))
            if parts is not None:
                claim.write(PARTS_FILE, parts)
            claim.created += [self.path / name for name in (DATABASE, *files.SIDECARS)]
            with files.replacement(self.path / DATABASE) as part, closing(_database(part)) as database:
                database.execute("PRAGMA synchronous = OFF")  # it is synced once, when it is complete
                theta = [(theta["name"], "{low:g} to {high:g} {unit}".format(**theta)) for theta in record["theta"]]
                schema.create(database, theta)
                with _transaction(database):  # closing merges the log into the file, which is then renamed
                    self._add(database, _record_rows(record))
            files.sync(self.path.parent)
            self._connect(record)

    def reopen(self, claim: files.Claim, record: dict[str, Any]) -> None:
        """Open a run to continue it."""
        with self.explained():
            self._connect(record)
            claim.is_begun = True
            self._remove_leftovers()
            files.write_file(self.path / "config.yaml", _config(record))
            self.note(_record_rows({**{name: record[name] for name in ("settings", "origin")}, "failed": None}))
            (self.path / "summary.json").unlink(missing_ok=True)  # the campaign is running again
            kept = self.database.execute(
                "SELECT id, seed_id, answer, distance, confidence, CAST(tensors AS INTEGER) FROM faults "
                "WHERE tensors IS NOT NULL"
            ).fetchall()
            table = np.array(kept, dtype=np.float64).reshape(-1, 6).T  # NULL becomes NaN
            ids, seeds, answers, numbers = (table[k].astype(np.int64) for k in (0, 1, 2, 5))
            columns = {"id": ids, "seed_id": seeds, "answer": answers, "distance": table[3], "confidence": table[4]}
            self.tensors.restore(columns, numbers)
            self.written, state = self.database.execute("SELECT tests, file FROM checkpoint").fetchone() or (0, "")
            self.seen = self.written
            self._drop_states(state)

    def _connect(self, record: dict[str, Any]) -> None:
        self.database = _database(self.path / DATABASE)
        schema.check(self.database, self.path)
        self.database.execute("PRAGMA synchronous = FULL")
        self.database.execute("PRAGMA trusted_schema = OFF")
        self.file, self.perturbation = (self.path / DATABASE).stat(), record["perturbation"]

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn disk errors into a `StoreError` with a remedy, also if the folder is gone."""
        self._check_exists()
        try:
            with files.explained(self.path, is_run=True):
                yield
        except StoreError:
            self._check_exists()
            raise

    def _check_exists(self) -> None:
        """Refuse to write to a deleted or moved folder, where SQLite would continue without an error."""
        if self.file is None:
            return
        with suppress(OSError):
            if os.path.samestat(self.file, (self.path / DATABASE).stat()):
                return
        raise StoreError(
            f"{self.path} was deleted or moved while its campaign was running: if it was deleted, its {self.seen:,} "
            "tests and their faults are lost; if it was moved, themis resume continues it there"
        )

    def note(self, rows: list[tuple[str, str]]) -> None:
        """Add to the record."""
        with self.explained(), _transaction(self.database) as database:
            self._add(database, rows)

    def _add(self, database: sqlite3.Connection, rows: list[tuple[str, str]]) -> None:
        """Add to the record, and sign the code that it names, so that this user may run it again without --trust."""
        insert = "INSERT OR REPLACE INTO run VALUES (?, ?)"
        database.executemany(insert, rows)
        if not self.signs:
            return
        record = {name: json.loads(value) for name, value in database.execute("SELECT name, value FROM run")}
        try:
            tag = sign(record)
        except KeyProblem as problem:
            tag = None
            if TAG not in record and recorded_code(record):  # once
                remedy = f"commands that rebuild its model will need --trust {self.path}"
                warn(f"the run cannot be signed because {problem}: {remedy}")
        database.execute(insert, (TAG, files.as_json(tag).decode()))

    def write_rows(self, pending: _Pending, state: tuple[int, int, str] | None) -> None:
        """Write faults, rounds and the row of a checkpoint in one transaction."""
        has_forgotten = self.tensors.forget(self.written, pending.stop)
        columns, names, dropped = self._store_tensors(pending)
        with _transaction(self.database) as database:
            database.execute("DELETE FROM faults WHERE id >= ? AND id < ?", (self.written, pending.stop))
            for first in range(0, len(names), ROWS_PER_BATCH):
                some = slice(first, first + ROWS_PER_BATCH)
                part = {name: column[some] for name, column in columns.items()}
                _insert(database, "INSERT INTO faults", _fault_rows(part, self.perturbation, names[some]))
            database.executemany("UPDATE faults SET tensors = NULL WHERE id = ?", [(id,) for id in dropped])
            _insert(database, "INSERT OR REPLACE INTO rounds", [_round_row(round) for round in pending.rounds])
            if state is not None:
                database.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?)", state)
        self.written = pending.stop
        was_merged = bool(pending.columns) and self._merge_files()
        if was_merged or dropped or has_forgotten:
            self.tensors.sweep()
        if state is not None:
            self._drop_states(state[2])

    def _store_tensors(self, pending: _Pending) -> tuple[dict[str, Array], list[str | None], list[int]]:
        # Every state file has its own name: the last checkpoint's file must exist until the new row is written.
        if not pending.columns:
            return {}, [], []
        columns = {name: np.concatenate([some[name] for some in pending.columns]) for name in pending.columns[0]}
        numbers, dropped = self.tensors.put(columns, pending.tensors)
        return columns, [file_name(number) if number else None for number in numbers.tolist()], dropped.tolist()

    def _merge_files(self) -> bool:
        """Merge files of tensors if there are many; return whether files are now unused."""
        moved = self.tensors.merge_files()
        pairs = [(file_name(number), id) for number, ids in moved.items() for id in ids.tolist()]
        if pairs:
            with _transaction(self.database) as database:
                database.executemany("UPDATE faults SET tensors = ? WHERE id = ?", pairs)
        return bool(pairs)

    def write_state(self, checkpoint: Checkpoint) -> tuple[int, int, str]:
        """Write the arrays of a checkpoint, and return its row."""
        # Every state file has its own name: the last checkpoint's file must exist until the new row is written.
        content = content_of(checkpoint.arrays, {"values": files.as_json(checkpoint.values).decode()})
        name = f"{checkpoint.tests:09d}-{checkpoint.rounds:06d}-{checksum(*content)}.safetensors"
        files.write_file(self.path / "state" / name, *content)
        return checkpoint.tests, checkpoint.rounds, name

    def _drop_states(self, current: str) -> None:
        for path in (self.path / "state").iterdir():
            if path.name != current and re.fullmatch(STATE_FILE, path.name) and not path.is_symlink():
                path.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        for name in (*files.RUN_FOLDERS, "."):
            files.remove_leftovers(self.path / name)

    def close(self) -> None:
        if self.file is not None:
            self.database.close()


def _database(path: Path) -> sqlite3.Connection:
    """A connection to an existing database, for one thread at a time."""
    uri = f"{path.resolve().as_uri()}?mode=rw"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30, check_same_thread=False)


@contextmanager
def _yielding() -> Iterator[None]:
    """Let other threads get the GIL 50 times sooner than usual during the block.

    The thread that runs the tests releases the GIL several times per chunk; the GPU would be idle while it waits.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(usual / 50)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A block whose changes are committed together, or rolled back if it raises."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _record_rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, files.as_json(value).decode()) for name, value in values.items()]


def _insert(database: sqlite3.Connection, statement: str, rows: Sequence[Sequence[Any]]) -> None:
    """Insert rows that have a value for every column."""
    if rows:
        database.executemany(f"{statement} VALUES ({', '.join('?' * len(rows[0]))})", rows)


def _fault_rows(columns: dict[str, Array], perturbation: str, files: list[str | None]) -> list[tuple[Any, ...]]:
    values: list[Sequence[Any]] = []
    for column in COLUMNS:
        if column.name == "perturbation":
            values.append([perturbation] * len(files))
        elif column.name == "theta":
            values += columns["theta"].T.astype(np.float64).tolist()
        elif column.name == "signature":
            numbers = np.rint(columns["signature"] * schema.SIGNATURE_UNITS).astype(np.int64)
            values.append(list(map(str, numbers.tolist())))  # whole numbers: JSON, in a third of the time
        elif column.type == "int" and column.missing is not None:
            values.append([None if value < 0 else value for value in columns[column.name].tolist()])
        else:
            values.append(columns[column.name].tolist())  # SQLite stores NaN as NULL
    return list(zip(*values, files, strict=True))


def _round_row(round: Round) -> list[Any]:
    plain, coverage = asdict(round), asdict(round.coverage)
    plain["estimates"] = json.dumps({name: plain[name] for name in ROUND_ESTIMATE_FORMS})
    coverage["by_layer"] = json.dumps(coverage["by_layer"])
    return [coverage[each.of_coverage] if each.of_coverage else plain[each.name] for each in ROUND_COLUMNS]


def _config(record: dict[str, Any]) -> bytes:
    import yaml

    return str(yaml.safe_dump(schema.config(record), sort_keys=False)).encode()
