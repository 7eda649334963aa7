"""Reading a run folder and selecting its faults, even while a campaign writes to it. Rows are read without torch."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import TYPE_CHECKING, Any
from weakref import finalize

from themis.errors import StoreError, UsageError, nearest
from themis.reading import check_form, optional, parse_json, read_json, values_of
from themis.runs.fault import PLAIN_COLUMNS
from themis.runs.store import schema
from themis.runs.store.files import is_locked
from themis.runs.store.schema import (
    DATABASE,
    MAX_JSON,
    RESTORE_REMEDY,
    ROUND_COLUMNS,
    SHARE_FORM,
    damage_explained,
    quoted,
)

if TYPE_CHECKING:
    from themis.runs.faults import Array, Faults
    from themis.runs.replay import RunHandle
    from themis.runs.run import Round
    from themis.runs.store.tensors import Tensors
    from themis.runs.store.writer import Checkpoint

ROWS_PER_FETCH = 5000
"""Rows that are fetched at a time."""
STATES = {"user": "interrupted", "error": "failed"}
"""The state of a campaign by its stop reason; with any other reason it is "ended"."""
HAS_TESTS_QUERY = "SELECT EXISTS (SELECT 1 FROM rounds) OR EXISTS (SELECT 1 FROM faults)"
MAX_NAMED_FOLDERS = 8
"""Folders that an error message names."""
MAX_QUERY_SECONDS = 120.0
SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_JSON,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 500,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
"""Limits for SQLite, because others may have written the database."""


def not_a_run(path: Path) -> UsageError:
    """The error for a folder that is not a run, which says what it is instead and names the runs in it."""
    rule, runs = f"a run must be a folder with {DATABASE}, but {path}", runs_in(path)
    named = name_folders(runs)
    if (path / "suite.json").is_file():
        which = named or f"such as {path}/NAME"
        return UsageError(f"{rule} is a suite: name the folder of one of its perturbations ({which})")
    if (path / "plan.json").is_file():
        return UsageError(f"{rule} holds the results of an experiment: its tables are the .md files there")
    if runs:
        return UsageError(f"{rule} is a folder of runs: name one of them ({named})")
    return UsageError(f"{rule} is not one: check the path")


def runs_in(path: Path) -> list[Path]:
    """The runs and suites in a folder, newest first."""
    return folders_with(path, DATABASE, "suite.json")


def folders_with(path: Path, *names: str) -> list[Path]:
    """The subfolders that contain a file with one of these names, newest file first."""
    try:
        found = [file for name in names for file in path.glob(f"*/{name}") if file.is_file()]
        return [file.parent for file in sorted(found, key=lambda file: (-file.stat().st_mtime, file))]
    except OSError:  # it cannot be listed
        return []


def name_folders(folders: list[Path]) -> str:
    """The first few folders, quoted for a shell, and the number of the others."""
    more = f" and {len(folders) - MAX_NAMED_FOLDERS} more" if len(folders) > MAX_NAMED_FOLDERS else ""
    return ", ".join(quote(str(folder)) for folder in folders[:MAX_NAMED_FOLDERS]) + more


class Reader:
    """A run folder, opened read-only. Any number of readers may read it while one campaign writes."""

    def __init__(self, path: str | Path, *, is_brief: bool = False) -> None:
        """`is_brief`: unless a campaign is writing, read without creating any file, not even SQLite's log."""
        self.path = Path(path)
        if not (self.path / DATABASE).is_file():
            raise not_a_run(self.path)
        self._is_closed = self._has_valid_faults = False
        with self._explained():
            self._database = _open(self.path / DATABASE, is_brief=is_brief)
            finalize(self, _close, self._database)  # the owner of the reader may leave it open
            try:
                schema.check(self._database, self.path)
                self.theta = schema.check_tables(self._database, self.path)
                # Queried before the record, to which a campaign adds.
                has_tests = self._execute(HAS_TESTS_QUERY).fetchone()[0]
                rows = self._execute("SELECT name, value FROM run").fetchall()
                self.record = schema.parse_record(rows, self.path / DATABASE)
                if has_tests and "start" not in self.record:
                    raise StoreError(f"{self.path / DATABASE} is damaged: it has tests, but no start; {RESTORE_REMEDY}")
                if self.theta != tuple(theta["name"] for theta in self.record["theta"]):
                    raise StoreError(
                        f"{self.path / DATABASE} is damaged: its faults have another theta; {RESTORE_REMEDY}"
                    )
            except BaseException:
                self._database.close()
                raise

    @property
    def ranges(self) -> list[tuple[str, float, float]]:
        """The name and the range of each theta."""
        return [(theta["name"], theta["low"], theta["high"]) for theta in self.record["theta"]]

    @property
    def start(self) -> dict[str, Any]:
        """The recorded start of the campaign; empty until its clean sweep is done."""
        start: dict[str, Any] = self.record.get("start", {})
        return start

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers."""
        return tuple(layer["name"] for layer in self.start.get("layers", ()))

    @property
    def task(self) -> str:
        """The name of the oracle without its parameter: wrong, changed, regression, ..."""
        return str(self.start.get("oracle", "")).partition(":")[0]

    @property
    def classes(self) -> list[str] | None:
        """Class names in the order of the class numbers, if the data had them."""
        return self.start.get("classes")

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a fault's row."""
        with self._explained():
            return tuple(row[1] for row in self._execute("PRAGMA table_info(faults)"))

    def summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None while the campaign is running, or if it was killed."""
        problem = f"is damaged: {{}}; {RESTORE_REMEDY}"
        summary: dict[str, Any] | None = read_json(self.path / "summary.json", schema.SUMMARY_FORM, problem)
        return summary

    def is_running(self) -> bool:
        """Whether a campaign is writing to the folder; if locks do not work, whether there is no summary."""
        held = is_locked(self.path / "run.lock")
        return self.summary() is None if held is None else held

    def state(self, summary: dict[str, Any] | None) -> str:
        """The state of the run: running, ended, interrupted, failed or killed."""
        if summary is not None:
            return STATES.get(summary["stop_reason"], "ended")
        if self.is_running():
            return "running"
        return "failed" if self.record.get("failed") else "killed"

    def stop_sentence(self, summary: dict[str, Any] | None, state: str) -> str:
        """Why the campaign stopped, given the summary and the state of this run."""
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
            rows = self._execute("SELECT * FROM rounds WHERE number <= ? ORDER BY number", (last,))
            return [_round(row, self.path / DATABASE) for row in rows]

    def count(self, where: str = "1", values: Sequence[Any] = ()) -> int:
        """The number of faults."""
        return int(self.select("count(*)", where, values)[0][0])

    def select(
        self,
        columns: str = "*",
        where: str = "1",
        values: Sequence[Any] = (),
        order: str = "id",
        limit: int = -1,
        table: str = "faults",
    ) -> list[tuple[Any, ...]]:
        """Select rows of faults; `columns`, `where` and `order` are SQL."""
        query = f"{columns} FROM {table} WHERE {where} ORDER BY {order} LIMIT ?"
        return list(chain.from_iterable(self.batches(query, (*values, limit))))

    def batches(self, query: str, values: Sequence[Any] = ()) -> Iterator[list[tuple[Any, ...]]]:
        """Rows of faults, a few thousand at a time; `query` follows SELECT. The first call validates all faults."""
        with self._explained():
            if not self._has_valid_faults:
                if invalid := schema.find_invalid_fault(self._execute, self.record, len(self.layers)):
                    id, column = invalid
                    raise StoreError(
                        f"{self.path / DATABASE} is damaged: fault {id!s:.40} has an invalid {column}; {RESTORE_REMEDY}"
                    )
                self._has_valid_faults = True
            rows = self._execute(f"SELECT {query}", values)
            while batch := rows.fetchmany(ROWS_PER_FETCH):
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
        """Faults as a campaign returns them; `handle` gives access to the model for replays."""
        from themis.runs.faults import Faults

        theta = [schema.theta_column(name) for name in self.theta]
        columns = ", ".join([*(column.name for column in PLAIN_COLUMNS), *theta, "signature"])
        rows = self.select(columns, where, values, order, limit, table)
        faults = Faults(self.record["perturbation"], self.theta, self.layers, handle, self.task, self.classes)
        if rows:
            faults.add(**_columns(rows, len(theta)))
        return faults

    def tensors(self, ids: Sequence[int]) -> dict[int, Tensors]:
        """Inputs and outputs of these faults, if they were stored."""
        from themis.runs.store.tensors import read_tensors

        tensors: dict[int, Tensors] = {}
        before, requested = None, json.dumps(list(ids))
        while True:  # a campaign may move a file's rows to another file and remove it before it is opened here
            where = "id IN (SELECT value FROM json_each(?)) AND tensors IS NOT NULL"
            places = self.select("id, tensors", where, (requested,))
            if places == before:
                return tensors
            before = places
            for file in dict.fromkeys(file for id, file in places if id not in tensors):
                try:
                    rows = read_tensors(self.path / "tensors" / file)
                except StoreError as error:
                    if isinstance(error.__cause__, FileNotFoundError):
                        continue
                    raise
                for id in [id for id, place in places if place == file]:
                    at = (rows.id == id).nonzero()
                    if len(at):
                        tensors[id] = rows[at[0]]

    def checkpoint(self) -> Checkpoint | None:
        """The state from which a resumed campaign continues; None if it must start from the beginning."""
        from themis.runs.store.tensors import checksum, deserialize, read_header, read_tensor_file
        from themis.runs.store.writer import Checkpoint

        with self._explained():
            row = self._execute("SELECT tests, rounds, file FROM checkpoint").fetchone()
        if row is None:
            return None
        schema.check_row(row, schema.CHECKPOINT_FORMS, "checkpoint", self.path / DATABASE)
        tests, rounds, file = row
        path = self.path / "state" / file
        content = read_tensor_file(path)
        arrays = deserialize(content, path)
        if checksum(content) != path.stem.rpartition("-")[2]:
            raise StoreError(f"{path} is damaged: it is not what the campaign wrote; {RESTORE_REMEDY}")
        with damage_explained(path):
            values = parse_json(read_header(content).get("values", ""))
            if not isinstance(values, dict):
                raise ValueError("its values must be an object")
        return Checkpoint(tests, rounds, arrays, values)

    def close(self) -> None:
        self._is_closed = True
        self._database.close()

    @contextmanager
    def reopened(self) -> Iterator[Reader]:
        """This reader or, if it was closed, another one for the duration of the block."""
        if not self._is_closed:
            yield self
            return
        with closing(Reader(self.path)) as run:
            yield run

    def _execute(self, query: str, values: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Cursor:
        """Run a query, which is interrupted if it takes too long."""
        latest = monotonic() + MAX_QUERY_SECONDS
        self._database.set_progress_handler(lambda: monotonic() > latest, 100_000)
        return self._database.execute(query, values)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            is_late = "interrupted" in str(error)
            reason = f"a query took more than {MAX_QUERY_SECONDS:g} seconds" if is_late else str(error)
            raise StoreError(f"{self.path / DATABASE} cannot be read: {reason}; {RESTORE_REMEDY}") from error


def _open(path: Path, *, is_brief: bool = False) -> sqlite3.Connection:
    """A read-only connection; an immutable one if SQLite may not even write the index of its log."""
    uri = path.resolve().as_uri()
    log = path.with_name(f"{path.name}-wal")
    for suffix in ("-wal", "-shm", "-journal"):
        beside = path.with_name(path.name + suffix)
        if os.path.lexists(beside) and not stat.S_ISREG(os.lstat(beside).st_mode):  # a pipe, a link or a folder
            raise StoreError(f"{beside} must be a regular file, but it is not: remove it, or {RESTORE_REMEDY}")
    if is_brief and not (log.exists() and log.stat().st_size):
        return _connect(f"{uri}?mode=ro&immutable=1")
    database = _connect(f"{uri}?mode=ro", timeout=30)
    try:
        database.execute("SELECT 1 FROM sqlite_schema").fetchall()
    except sqlite3.OperationalError as error:
        database.close()
        if log.exists() and log.stat().st_size:
            raise StoreError(
                f"{path.parent} must be writable once, but its log has rows that are not in {path.name} yet: copy the "
                "folder to a place where you may write, and read the copy"
            ) from error
        database = _connect(f"{uri}?mode=ro&immutable=1")
    except BaseException:
        database.close()
        raise
    return database


def _connect(uri: str, timeout: float = 5) -> sqlite3.Connection:
    """A connection with the limits for databases that others may have written, which runs no code from them."""
    database = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout)
    for limit, value in SQLITE_LIMITS.items():
        database.setlimit(limit, value)
    database.execute("PRAGMA trusted_schema = OFF")  # views of a forged database cannot call functions
    database.execute("PRAGMA cell_size_check = ON")
    return database


def _close(database: sqlite3.Connection) -> None:
    with suppress(sqlite3.ProgrammingError):  # it belongs to another thread
        database.close()


def _columns(rows: list[tuple[Any, ...]], n_theta: int) -> dict[str, Array]:
    """Rows as the columns that `Faults.add` takes."""
    import numpy as np

    by_name = list(zip(*rows, strict=True))
    columns: dict[str, Array] = {}
    for column, values in zip(PLAIN_COLUMNS, by_name, strict=False):
        plain = [column.missing if value is None else value for value in values] if None in values else list(values)
        columns[column.name] = np.array(plain, dtype=column.dtype)
    theta = by_name[len(PLAIN_COLUMNS) : len(PLAIN_COLUMNS) + n_theta]
    columns["theta"] = np.array(theta, dtype=np.float32).T
    shares = np.array([json.loads(signature) for signature in by_name[-1]], dtype=np.float32)
    columns["signature"] = shares / np.float32(schema.SIGNATURE_UNITS)
    return columns


def _round(row: tuple[Any, ...], path: Path) -> Round:
    from themis.judge.coverage import Coverage
    from themis.judge.estimate import Estimate
    from themis.runs.run import Round

    schema.check_row(row, {column.name: column.form for column in ROUND_COLUMNS}, "rounds", path)
    plain, coverage = dict[str, Any](), dict[str, Any]()
    for column, value in zip(ROUND_COLUMNS, row, strict=True):
        (coverage if column.of_coverage else plain)[column.of_coverage or column.name] = value
    with damage_explained(path):
        by_layer = parse_json(coverage["by_layer"])
        coverage["by_layer"] = check_form(by_layer, values_of(optional(SHARE_FORM)), "rounds.coverage_by_layer")
        estimates = check_form(parse_json(plain.pop("estimates") or "{}"), schema.ESTIMATES_FORM, "rounds.estimates")
    for name, value in estimates.items():
        plain[name] = Estimate(**value) if isinstance(value, dict) else value
    return Round(**plain, coverage=Coverage(**coverage))


TELLING = "telling"
TELLING_SCORE = "distance / max(coalesce(confidence, 1), 1e-6)"
TELLING_PLACE = f"row_number() OVER (PARTITION BY seed_id, answer ORDER BY {TELLING_SCORE}, id)"
"""In the order of place and score, the tensors of the first `max_stored` faults are stored."""


@dataclass(frozen=True)
class Selection:
    """Faults that meet all conditions, sorted by a column or the most telling first.

    values: the values of the question marks in the conditions. is_distinct: keep only the fault with the smallest
    change per seed and wrong answer. limit: None for all.
    """

    conditions: Sequence[str] = ()
    values: Sequence[Any] = ()
    is_distinct: bool = False
    sort: str = TELLING
    is_reversed: bool = False
    limit: int | None = None

    def check(self, run: Reader) -> None:
        """Refuse a column that the run does not have."""
        if self.sort != TELLING and self.sort not in run.columns:
            remedy = nearest(self.sort, [TELLING, *run.columns])
            raise UsageError(f"faults must be sorted by a column or by {TELLING!r}, got {self.sort!r}: {remedy}")

    def count(self, run: Reader) -> int:
        """The number of faults that match, regardless of the limit."""
        return int(run.select("count(*)", "1", self.values, "1", table=self._table())[0][0])

    def rows(self, run: Reader) -> Iterator[list[tuple[Any, ...]]]:
        """The faults in batches, each with the columns of the run in order."""
        query = f"{', '.join(map(quoted, run.columns))} FROM {self._table()} ORDER BY {self._order()} LIMIT ?"
        return run.batches(query, (*self.values, self._limit()))

    def faults(self, run: Reader) -> Faults:
        """The faults as a campaign returns them."""
        return run.faults("1", self.values, order=self._order(), limit=self._limit(), table=self._table())

    def _table(self) -> str:
        # On lines of their own, because a condition may end with a comment.
        where = " AND ".join(f"(\n{condition}\n)" for condition in self.conditions) or "1"
        if not self.is_distinct:
            return f"(SELECT * FROM faults WHERE {where})"
        place = "row_number() OVER (PARTITION BY seed_id, answer ORDER BY distance, id) AS place"
        return f"(SELECT * FROM (SELECT *, {place} FROM faults WHERE {where}) WHERE place = 1)"

    def _order(self) -> str:
        direction = "DESC" if self.is_reversed else "ASC"
        if self.sort == TELLING:
            return f"{TELLING_PLACE} {direction}, {TELLING_SCORE} {direction}, id {direction}"
        return f"{quoted(self.sort)} IS NULL, {quoted(self.sort)} {direction}, id {direction}"

    def _limit(self) -> int:
        return -1 if self.limit is None else self.limit


def check_condition(run: Reader, condition: str) -> None:
    """Refuse a condition that SQLite does not understand, or cannot evaluate for some fault."""
    try:
        Selection([condition]).count(run)
    except (StoreError, sqlite3.Warning) as error:
        cause = error.__cause__ or error
        if isinstance(cause, sqlite3.DatabaseError) and not isinstance(
            cause, sqlite3.OperationalError | sqlite3.ProgrammingError
        ):
            raise  # the run itself cannot be read
        unknown = re.match("no such column: (.+)", str(cause))
        remedy = (
            nearest(unknown[1], run.columns)
            if unknown
            else "write a condition such as theta_sigma < 0.1 and answer = 3"
        )
        raise UsageError(
            f"faults must be selected by an SQL condition on their columns, got {condition!r}, {cause}: {remedy}"
        ) from error
