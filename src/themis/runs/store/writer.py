"""Writing a run folder: one writer, and every fault is on disk before callbacks see it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from themis.errors import UsageError
from themis.judge.estimate import Estimate
from themis.runs.faults import Column
from themis.runs.run import ESTIMATES, Round
from themis.runs.store import schema
from themis.runs.store.files import Lock, as_json, explained, sync, write_file
from themis.runs.store.schema import DATABASE, PARTS
from themis.runs.store.tensors import Tensors, TensorStore, file_name, serialize

SHARE = 1 / 100
"""Share of a campaign's time that writing faults may take; checkpoints may take half as much."""
LATEST_FAULTS, LATEST_CHECKPOINT = 1.0, 60.0
"""Seconds after which they are written regardless of the cost."""
FIRST_CHECKPOINT = 1.0
"""Seconds before the first checkpoint: so little is quickly run again."""


@dataclass(frozen=True)
class Checkpoint:
    """A campaign's state between two chunks: arrays, and values for JSON."""

    tests: int
    rounds: int
    arrays: dict[str, Tensor]
    values: dict[str, Any]


class Writer:
    """The only writer of a run folder, which it locks."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"out must be a folder, {self.path} is a file")
        with explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path / "run.lock")
            for name in ("tensors", "state"):
                (self.path / name).mkdir(exist_ok=True)
        self._is_empty = False
        self._columns: list[dict[str, Column]] = []
        self._tensors: list[Tensors] = []
        self._rounds: list[Round] = []
        self._written = 0  # tests up to here are on disk
        self._seen = 0
        self._due_faults, self._due_checkpoint = 0.0, perf_counter() + FIRST_CHECKPOINT

    def create(self, record: dict[str, Any], max_stored: int, parts: bytes | None = None) -> None:
        """Create a new run; `record` is what resuming and reporting need, `parts` is the split of the seeds."""
        if self._has_run():
            raise UsageError(
                f"out must be a new folder, {self.path} already holds a run: choose another, or resume it with "
                f"`themis resume {self.path}`"
            )
        with explained(self.path):
            self._write_config(record)
            write_file(self.path / "environment.json", as_json(record["environment"], indent=2))
            if parts is not None:
                write_file(self.path / PARTS, parts)
            elif (self.path / PARTS).exists():  # left by a run that was killed before its first test
                (self.path / PARTS).unlink()
            part = self.path / f"{DATABASE}.part"
            for leftover in self.path.glob(f"{DATABASE}*"):
                leftover.unlink()
            database = sqlite3.connect(part, isolation_level=None)
            database.execute("PRAGMA synchronous = OFF")  # it is synced once, when it is complete
            schema.create(
                database, [(theta["name"], "{low:g} to {high:g} {unit}".format(**theta)) for theta in record["theta"]]
            )
            database.execute("BEGIN")
            database.executemany("INSERT INTO run VALUES (?, ?)", [(k, as_json(v).decode()) for k, v in record.items()])
            database.execute("COMMIT")
            database.close()  # merges the log into the file, which can now be renamed
            sync(part)
            part.replace(self.path / DATABASE)
            sync(self.path)
            sync(self.path.parent)
            self._is_empty = True
            self._connect(record, max_stored)

    def _has_run(self) -> bool:
        """Whether the folder holds a run; one that was killed before its first test does not count."""
        if not (self.path / DATABASE).exists():
            return False
        with closing(sqlite3.connect(self.path / DATABASE)) as database:
            try:
                return database.execute("SELECT 1 FROM run WHERE name = 'start'").fetchone() is not None
            except sqlite3.Error:
                return True  # not ours to remove

    def reopen(self, record: dict[str, Any], max_stored: int) -> None:
        """Resume a run; faults and rounds after the last checkpoint stay until they are measured again."""
        with explained(self.path):
            self._connect(record, max_stored)
            schema.upgrade(self._database)
            self._write_config(record)
            self.note("settings", record["settings"])
            self.note("failed", None)
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

    def _write_config(self, record: dict[str, Any]) -> None:
        config = {**(record["origin"] or {}), "perturb": record["perturbation"], **record["settings"]}
        write_file(self.path / "config.yaml", _yaml(config))

    def _connect(self, record: dict[str, Any], max_stored: int) -> None:
        self._database = sqlite3.connect(self.path / DATABASE, isolation_level=None, timeout=30)
        schema.check(self._database, self.path)
        self._database.execute("PRAGMA synchronous = FULL")
        self._perturbation = record["perturbation"]
        self._tensor_store = TensorStore(self.path / "tensors", max_stored)

    def note(self, name: str, value: Any) -> None:
        """Add to the record."""
        self._is_empty = False
        with explained(self.path):
            self._database.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (name, as_json(value).decode()))

    def add_faults(self, stop: int, columns: dict[str, Column] | None, tensors: Tensors | None) -> None:
        """Add the faults of the tests up to number `stop`; the next `flush` writes them."""
        self._seen = stop
        if columns is not None and tensors is not None:
            self._columns.append(columns)
            self._tensors.append(tensors)

    def add_round(self, round: Round) -> None:
        """Add a round; the next `flush` writes it."""
        self._rounds.append(round)

    def flush(self, checkpoint: Callable[[], Checkpoint] | None = None, *, now: bool = False) -> bool:
        """Write what is pending, and a checkpoint, if they are due; return whether anything was written.

        Everything is written in one transaction: after a crash the folder is as before or as after this flush.
        """
        began = perf_counter()
        is_due = now or (began >= self._due_faults and bool(self._columns or self._rounds))
        is_checkpoint_due = checkpoint is not None and (now or began >= self._due_checkpoint)
        if not (is_due or is_checkpoint_due):
            return False
        with explained(self.path):
            state = self._write_state(checkpoint()) if checkpoint is not None and is_checkpoint_due else None
            stated = perf_counter()
            self._write_rows(state)
        ended = perf_counter()
        self._due_faults = ended + min(LATEST_FAULTS, (ended - stated) / SHARE)
        if state is not None:
            self._due_checkpoint = ended + min(LATEST_CHECKPOINT, 2 * (stated - began) / SHARE)
        return True

    def _write_rows(self, state: tuple[int, int, str] | None) -> None:
        database = self._database
        has_forgotten = self._tensor_store.forget(self._written, self._seen)
        rows, dropped = self._prepare_faults()
        database.execute("BEGIN IMMEDIATE")
        try:
            database.execute("DELETE FROM faults WHERE id >= ? AND id < ?", (self._written, self._seen))
            if rows:
                database.executemany(f"INSERT INTO faults VALUES ({_marks(rows[0])})", rows)
            database.executemany("UPDATE faults SET tensors = NULL WHERE id = ?", [(id,) for id in dropped])
            for row in map(_round_row, self._rounds):
                database.execute(f"INSERT OR REPLACE INTO rounds VALUES ({_marks(row)})", row)
            if state is not None:
                database.execute("INSERT OR REPLACE INTO checkpoint VALUES (1, ?, ?, ?)", state)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        self._written = self._seen
        self._columns, self._tensors, self._rounds = [], [], []
        moved = self._tensor_store.merge_files() if rows else {}
        if moved:
            pairs = [(file_name(file), id) for file, ids in moved.items() for id in ids.tolist()]
            database.execute("BEGIN IMMEDIATE")
            database.executemany("UPDATE faults SET tensors = ? WHERE id = ?", pairs)
            database.execute("COMMIT")
        if moved or dropped or has_forgotten:
            self._tensor_store.sweep()
        if state is not None:
            self._drop_states(state[2])

    def _prepare_faults(self) -> tuple[list[tuple[Any, ...]], list[int]]:
        """Write the tensors of the pending faults; return their rows, and the faults whose tensors were dropped."""
        if not self._columns:
            return [], []
        columns = {name: np.concatenate([batch[name] for batch in self._columns]) for name in self._columns[0]}
        files, dropped = self._tensor_store.put(columns, self._tensors)
        names = [file_name(file) if file else None for file in files.tolist()]
        return _fault_rows(columns, self._perturbation, names), dropped.tolist()

    def _write_state(self, checkpoint: Checkpoint) -> tuple[int, int, str]:
        # Every state has its own name: the last checkpoint's file must not change until the row is written.
        name = f"{checkpoint.tests:09d}-{checkpoint.rounds:06d}.safetensors"
        content = serialize(checkpoint.arrays, {"values": as_json(checkpoint.values).decode()})
        write_file(self.path / "state" / name, content)
        return checkpoint.tests, checkpoint.rounds, name

    def _drop_states(self, current: str) -> None:
        for path in (self.path / "state").iterdir():
            if path.name != current:
                path.unlink(missing_ok=True)

    def end(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        with explained(self.path):
            write_file(self.path / "summary.json", as_json(summary, indent=2))

    def close(self) -> None:
        """Let others write to the folder; remove it if the campaign did not begin its tests."""
        if hasattr(self, "_database"):
            self._database.close()
        if self._is_empty:
            databases = [path.name for path in self.path.glob(f"{DATABASE}*")]
            for name in ("config.yaml", "environment.json", PARTS, *databases):
                (self.path / name).unlink(missing_ok=True)
        if not (self.path / DATABASE).exists():
            for folder in (self.path / "tensors", self.path / "state"):
                with suppress(OSError):
                    folder.rmdir()
            (self.path / "run.lock").unlink(missing_ok=True)
            with suppress(OSError):  # it has files of others
                self.path.rmdir()
        self._lock.release()


def _fault_rows(columns: dict[str, Column], perturbation: str, files: list[str | None]) -> list[tuple[Any, ...]]:
    """Rows in the order of the table's columns."""
    plain = {name: column.tolist() for name, column in columns.items() if name not in ("theta", "signature")}
    signature = map(
        str, np.rint(columns["signature"] * schema.SHARES).astype(np.int64).tolist()
    )  # lists of numbers are JSON
    return list(
        zip(
            plain["id"],
            plain["seed_id"],
            [perturbation] * len(files),
            *columns["theta"].T.astype(np.float64).tolist(),
            plain["noise_seed"],
            plain["round"],
            plain["stream"],
            plain["kind"],
            [None if label < 0 else label for label in plain["label"]],
            [None if answer < 0 else answer for answer in plain["clean_answer"]],
            plain["answer"],
            plain["clean_value"],  # SQLite stores NaN as NULL
            plain["value"],
            plain["confidence"],
            plain["margin"],
            plain["distance"],
            plain["linf"],
            plain["ssim"],
            plain["position"],
            plain["chunk"],
            plain["raised"],
            signature,
            files,
            strict=True,
        )
    )


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


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else asdict(estimate)


def _yaml(values: dict[str, Any]) -> bytes:
    """YAML if PyYAML is installed; otherwise JSON, which is valid YAML."""
    try:
        import yaml
    except ImportError:
        return as_json(values, indent=2)
    return str(yaml.safe_dump(values, sort_keys=False)).encode()
