"""The tables of `run.sqlite`. SQLite stores the comments inside the statements: `.schema` shows them."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from themis.errors import StoreError
from themis.runs.fault import COLUMNS, Column

DATABASE = "run.sqlite"
PARTS = "parts.safetensors"
"""File with the part of each seed, if the seeds were split."""
SCHEMA = 4
"""Version of the tables, stored as SQLite's user_version. Increase it with every change."""
OLDEST = 3
"""The oldest version that is still read; `upgrade` makes it the current one."""
SHARES = 10_000
"""A signature stores the share of a layer in units of 1/SHARES: integers are written three times as fast."""
APPLICATION = 0x7E315
"""SQLite's application_id: distinguishes a run from any other database."""

TENSORS = Column("tensors", "str", True, "file in tensors/ with its input and output; none if they were not kept")
"""The last column of a fault in the database."""

_ROUNDS = """
CREATE TABLE rounds (        -- one row per round; counts are totals since the start
  number INTEGER PRIMARY KEY,
  tests INTEGER NOT NULL,
  dropped INTEGER NOT NULL,  -- of these tests, those not run: too dissimilar from the seed
  passes INTEGER NOT NULL,   -- a forward pass counts 1, a backward pass 2
  faults INTEGER NOT NULL,
  distinct_faults INTEGER NOT NULL,  -- distinct pairs of seed and wrong outcome
  failing_seeds INTEGER NOT NULL,
  seconds REAL NOT NULL,
  coverage REAL NOT NULL,    -- share of the sampled neurons that have converged
  coverage_all REAL NOT NULL,        -- the same for all judged neurons
  coverage_by_layer TEXT NOT NULL,   -- JSON, layer to share
  neurons INTEGER NOT NULL,
  neurons_dead INTEGER NOT NULL,
  neurons_unseen INTEGER NOT NULL,
  judged_tests INTEGER NOT NULL,     -- tests that the coverage is based on
  forecast_tests INTEGER,    -- tests still needed for the coverage goal; NULL while unknown
  criterion_score REAL       -- of the campaign's criterion; NULL if it has none{estimates}
);
"""
_ESTIMATES = """
  , estimates TEXT             -- JSON, name to value, low and high; NULL in rounds of version 3"""
_TABLES = """
CREATE TABLE run (           -- the record of the campaign; written once
  name TEXT PRIMARY KEY,     -- settings, origin, start, samples, environment, parts, tag (signs what names code)
  value TEXT NOT NULL        -- JSON
) WITHOUT ROWID;

CREATE TABLE faults (        -- one row per fault: a test that the model failed
{faults}
);

CREATE INDEX faults_by_outcome ON faults (seed_id, answer);

CREATE TABLE checkpoint (    -- one row: where a resumed campaign continues
  one INTEGER PRIMARY KEY CHECK (one = 1),
  tests INTEGER NOT NULL,    -- tests done; faults with larger numbers will be found again
  rounds INTEGER NOT NULL,   -- completed rounds
  file TEXT NOT NULL         -- its arrays, in state/
);

CREATE VIEW distinct_faults AS  -- per seed and wrong outcome, the fault with the smallest change
  SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY seed_id, answer ORDER BY distance, id) AS place FROM faults)
  WHERE place = 1;
"""


def create(database: sqlite3.Connection, theta: Sequence[tuple[str, str]], version: int = SCHEMA) -> None:
    """Create the tables; `theta` has the name of each dimension and a comment."""
    columns = "\n".join(f"  {definition:<26}  -- {comment}" for definition, comment in _fault_columns(theta))
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(
        f"BEGIN; {_ROUNDS.format(estimates='' if version == 3 else _ESTIMATES)} {_TABLES.format(faults=columns)} "
        f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {version}; COMMIT;"
    )


def _fault_columns(theta: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """The definition of each column of the table `faults`, and a comment."""
    for column in COLUMNS:
        if column.name == "theta":
            yield from ((f"{theta_column(name)} REAL NOT NULL,", comment) for name, comment in theta)
        else:
            null = "" if column.missing is not None else " PRIMARY KEY" if column.name == "id" else " NOT NULL"
            yield f"{column.name} {column.sql_type}{null},", column.text
    yield f"{TENSORS.name} TEXT", TENSORS.text


def check(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not a run, or has another schema."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise StoreError(f"{path} must be a run of Themis, but it is a different database: check the path")
    if not OLDEST <= version <= SCHEMA:
        age, remedy = ("a newer", "upgrade Themis") if version > SCHEMA else ("an older", "run the campaign again")
        raise StoreError(
            f"{path} must have schema {SCHEMA}, but it has {version}: {age} version of Themis wrote it; {remedy}"
        )


def check_is_table(database: sqlite3.Connection, name: str, path: Path) -> None:
    """Refuse a view in place of a table, before anything is read from it."""
    query = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ? AND sql LIKE 'CREATE TABLE %'"
    if database.execute(query, (name,)).fetchone() is None:
        raise StoreError(
            f"{path / DATABASE} must have a table {name}, but it has none: restore the run folder from a copy"
        )


def check_tables(database: sqlite3.Connection, theta: Iterable[str], path: Path) -> None:
    """Refuse a database whose tables, indices, views and triggers are not exactly those of a run; comments may differ.

    A view in place of a table could run an endless query, and a trigger could change what a resumed campaign writes.
    """
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as ours:
        (version,) = database.execute("PRAGMA user_version").fetchone()
        create(ours, [(name, "") for name in theta], version)
        expected = _statements(ours)
    actual = _statements(database)
    for key in sorted(expected.keys() | actual.keys()):
        kind, name = key
        if expected.get(key) != actual.get(key):
            problem = "is missing" if key not in actual else "was added" if key not in expected else "was changed"
            raise StoreError(
                f"{path / DATABASE} must have the tables of a run of Themis, but its {kind} {name[:60]!r} {problem}: "
                "restore the run folder from a copy"
            )


def _statements(database: sqlite3.Connection) -> dict[tuple[str, str], str]:
    """The statement that made each table, index, view and trigger, without comments, with single spaces."""
    rows = database.execute("SELECT type, name, sql FROM sqlite_schema WHERE name NOT LIKE 'sqlite@_%' ESCAPE '@'")
    return {(str(kind), str(name)): _without_comments(str(sql)) for kind, name, sql in rows}


def _without_comments(statement: str) -> str:
    tokens = re.finditer(r'("(?:[^"]|"")*"|\'(?:[^\']|\'\')*\')|--[^\n]*|\s+|([^-\s"\']+|.)', statement)
    return " ".join(token[1] or token[2] for token in tokens if token[1] or token[2])


def upgrade(database: sqlite3.Connection) -> None:
    """Give a database of an older version the tables of this one."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version < SCHEMA:
        database.executescript(
            "BEGIN; CREATE TEMP TABLE earlier AS SELECT *, NULL FROM rounds; DROP TABLE rounds; "
            f"{_ROUNDS.format(estimates=_ESTIMATES)} INSERT INTO rounds SELECT * FROM earlier; "
            f"DROP TABLE earlier; PRAGMA user_version = {SCHEMA}; COMMIT;"
        )


def config(record: dict[str, Any]) -> dict[str, Any]:
    """The content of `config.yaml`: the options of a run as `themis run --config` reads them."""
    return {**(record["origin"] or {}), "perturb": record["perturbation"], **record["settings"]}


def read_signature(text: str) -> list[float]:
    """The shares of the layers from a stored signature."""
    return [share / SHARES for share in json.loads(text)]


def theta_column(name: str) -> str:
    """The quoted column name of a dimension of theta."""
    return '"theta_' + name.replace('"', '""') + '"'
