"""Reading a run folder, even while a campaign writes to it. Reading rows does not import torch."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from themis.errors import StoreError, UsageError
from themis.runs.store import schema
from themis.runs.store.schema import DATABASE

if TYPE_CHECKING:
    from themis.runs.faults import Column, Faults, RunHandle
    from themis.runs.run import Round
    from themis.runs.store.tensors import Tensors
    from themis.runs.store.writer import Checkpoint

BATCH = 5000
"""Rows that are fetched at a time."""
STATES = {"user": "interrupted", "error": "failed"}
"""States of a campaign by stop reason; any other reason is "ended"."""


class Reader:
    """A run folder, opened read-only. Any number of readers may read it while one campaign writes."""

    def __init__(self, path: str | Path, *, is_brief: bool = False) -> None:
        """`is_brief`: for a short look that leaves not even a log behind if no campaign is writing."""
        self.path = Path(path)
        if not (self.path / DATABASE).is_file():
            raise UsageError(f"a run must be a folder with {DATABASE}, {self.path} is not one: check the path")
        with self._explained():
            self._database = _open(self.path / DATABASE, is_brief=is_brief)
            schema.check(self._database, self.path)
            rows = self._database.execute("SELECT name, value FROM run").fetchall()
        self.record: dict[str, Any] = {name: json.loads(value) for name, value in rows}
        self.theta: tuple[str, ...] = tuple(theta["name"] for theta in self.record["theta"])

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers; empty until the clean sweep is done."""
        return tuple(layer["name"] for layer in self.record.get("start", {"layers": ()})["layers"])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a fault's row."""
        with self._explained():
            return tuple(row[1] for row in self._database.execute("PRAGMA table_info(faults)"))

    def summary(self) -> dict[str, Any] | None:
        """The result; None while the campaign is running, or if it was killed."""
        path = self.path / "summary.json"
        try:
            summary: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StoreError(f"{path} must be JSON, it is damaged: {error}; restore it from a copy") from error
        return summary

    def is_running(self) -> bool:
        """Whether a campaign is writing to the folder; if the system cannot tell, whether it has no summary."""
        try:
            import fcntl

            with (self.path / "run.lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        except (ImportError, OSError):
            return self.summary() is None
        return False

    def state(self, summary: dict[str, Any] | None) -> str:
        """running, ended, interrupted, failed or killed; `summary` is the run's."""
        if summary is not None:
            return STATES.get(summary["stop_reason"], "ended")
        if self.is_running():
            return "running"
        return "failed" if self.record.get("failed") else "killed"

    def stop_sentence(self, summary: dict[str, Any] | None, state: str) -> str:
        """Why the campaign stopped; `summary` and `state` are the run's."""
        if summary is not None:
            return str(summary["stop"])
        if state == "running":
            return "The campaign is still running."
        if state == "failed":
            return str(self.record["failed"])
        return f"The campaign was killed before it could say why; resume it with themis resume {quote(str(self.path))}."

    def rounds(self, last: int = 1 << 62) -> list[Round]:
        """All rounds, or those up to number `last`."""
        with self._explained():
            rows = self._database.execute("SELECT * FROM rounds WHERE number <= ? ORDER BY number", (last,))
            return [_round(row) for row in rows]

    def count(self, where: str = "1", values: Sequence[Any] = ()) -> int:
        """The number of faults."""
        (n,) = self.select("count(*)", where, values)[0]
        return int(n)

    def select(
        self,
        columns: str = "*",
        where: str = "1",
        values: Sequence[Any] = (),
        order: str = "id",
        limit: int = -1,
        table: str = "faults",
    ) -> list[tuple[Any, ...]]:
        """Rows of faults; `columns`, `where` and `order` are SQL."""
        return list(chain.from_iterable(self.batches(columns, where, values, order, limit, table)))

    def batches(
        self,
        columns: str = "*",
        where: str = "1",
        values: Sequence[Any] = (),
        order: str = "id",
        limit: int = -1,
        table: str = "faults",
    ) -> Iterator[list[tuple[Any, ...]]]:
        """The same rows, a few thousand at a time."""
        with self._explained():
            rows = self._database.execute(
                f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {order} LIMIT ?", (*values, limit)
            )
            while batch := rows.fetchmany(BATCH):
                yield batch

    def faults(
        self,
        where: str = "1",
        values: Sequence[Any] = (),
        *,
        order: str = "id",
        limit: int = -1,
        table: str = "faults",
        handle: RunHandle | None = None,
    ) -> Faults:
        """Faults as a campaign returns them; `handle` gives access to the model that replays them."""
        from themis.runs.faults import COLUMN_TYPES, Faults

        theta = [schema.theta_column(name) for name in self.theta]
        columns = ", ".join([*COLUMN_TYPES, *theta, "signature"])
        rows = self.select(columns, where, values, order, limit, table)
        faults = Faults(self.record["perturbation"], self.theta, self.layers, handle)
        if rows:
            faults.add(**_columns(rows, len(theta)))
        return faults

    def tensors(self, ids: Sequence[int]) -> dict[int, Tensors]:
        """Inputs and outputs of these faults, if they were stored."""
        from themis.runs.store.tensors import read_tensors

        tensors: dict[int, Tensors] = {}
        before, requested = None, json.dumps(list(ids))
        while True:  # a campaign may move a file's rows to another file and remove it before we open it
            where = "id IN (SELECT value FROM json_each(?)) AND tensors IS NOT NULL"
            places = self.select("id, tensors", where, (requested,))
            if places == before:
                return tensors
            before = places
            files: dict[str, list[int]] = {}
            for id, file in places:
                if id not in tensors:
                    files.setdefault(file, []).append(id)
            for file, ids_in_file in files.items():
                try:
                    rows = read_tensors(self.path / "tensors" / file)
                except FileNotFoundError:
                    continue
                for id in ids_in_file:
                    at = (rows.id == id).nonzero()
                    if len(at):
                        tensors[id] = rows[at[0]]

    def checkpoint(self) -> Checkpoint | None:
        """Where a resumed campaign continues; None if it has to start from the beginning."""
        from themis.runs.store.tensors import deserialize
        from themis.runs.store.writer import Checkpoint

        with self._explained():
            row = self._database.execute("SELECT tests, rounds, file FROM checkpoint").fetchone()
        if row is None:
            return None
        tests, rounds, file = row
        path = self.path / "state" / file
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path} must hold the run's state, it cannot be read: {error.strerror}") from error
        arrays = deserialize(content, path)
        size = int.from_bytes(content[:8], "little")
        values = json.loads(json.loads(content[8 : 8 + size])["__metadata__"]["values"])
        return Checkpoint(tests, rounds, arrays, values)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.path / DATABASE} cannot be read: {error}") from error


def _open(path: Path, *, is_brief: bool = False) -> sqlite3.Connection:
    """A read-only connection; an immutable one if not even the index of the log may be written."""
    uri = path.resolve().as_uri()
    log = path.with_name(f"{path.name}-wal")
    if is_brief and not (log.exists() and log.stat().st_size):
        return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    database = sqlite3.connect(f"{uri}?mode=ro", uri=True, isolation_level=None, timeout=30)
    try:
        database.execute("SELECT 1 FROM sqlite_schema").fetchall()
    except sqlite3.OperationalError as error:
        database.close()
        if log.exists() and log.stat().st_size:
            raise StoreError(
                f"{path.parent} must be writable once, its log has rows that are not in {path.name} yet: copy the "
                "folder to a place where you may write, and read the copy"
            ) from error
        database = sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
    return database


def _columns(rows: list[tuple[Any, ...]], n_theta: int) -> dict[str, Column]:
    """Columns as `Faults.add` takes them."""
    import numpy as np

    from themis.oracle import KEPT
    from themis.runs.faults import COLUMN_TYPES

    by_name = list(zip(*rows, strict=True))
    columns: dict[str, Column] = {}
    for name, values in zip(COLUMN_TYPES, by_name, strict=False):
        missing = {"label": -1, "clean_answer": KEPT}.get(name, np.nan)
        plain = [missing if value is None else value for value in values] if None in values else list(values)
        columns[name] = np.array(plain, dtype=COLUMN_TYPES[name].lower())
    theta = by_name[len(COLUMN_TYPES) : len(COLUMN_TYPES) + n_theta]
    columns["theta"] = np.array(theta, dtype=np.float32).T
    shares = np.array([json.loads(signature) for signature in by_name[-1]], dtype=np.float32)
    columns["signature"] = shares / np.float32(schema.SHARES)
    return columns


def _round(row: tuple[Any, ...]) -> Round:
    from themis.judge.coverage import Coverage
    from themis.runs.run import Round

    number, tests, dropped, passes, faults, distinct, failing, seconds = row[:8]
    sampled, of_all, by_layer, *neurons_and_tests, score = row[8:]
    coverage = Coverage(sampled, of_all, json.loads(by_layer), *neurons_and_tests)
    return Round(number, tests, dropped, passes, faults, distinct, failing, coverage, seconds, score)
