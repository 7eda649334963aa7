"""The tables of `run.sqlite`. Comments inside the statements are kept by SQLite: `.schema` shows them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from themis.errors import StoreError

DATABASE = "run.sqlite"
PARTS = "parts.safetensors"
"""Which part each seed is in, where they were split."""
SCHEMA = 3
"""Version of the tables, kept as SQLite's user_version. Raise it with every change."""
SHARES = 10_000
"""Parts that the share of a layer in a signature is counted in: whole numbers are written three times as fast."""
APPLICATION = 0x7E315
"""SQLite's application_id: tells a run from any other database."""

_TABLES = """
CREATE TABLE run (           -- what the campaign is; written once
  name TEXT PRIMARY KEY,     -- settings, origin, start, environment, parts
  value TEXT NOT NULL        -- JSON
) WITHOUT ROWID;

CREATE TABLE rounds (        -- one row a round; counts are totals since the start
  number INTEGER PRIMARY KEY,
  tests INTEGER NOT NULL,
  dropped INTEGER NOT NULL,  -- tests among them that were not run: no longer the same picture
  passes INTEGER NOT NULL,   -- a forward is 1, a backward 2
  faults INTEGER NOT NULL,
  distinct_faults INTEGER NOT NULL,  -- seeds with a wrong outcome, each pair once
  failing_seeds INTEGER NOT NULL,
  seconds REAL NOT NULL,
  coverage REAL NOT NULL,    -- share of the sampled neurons that has converged
  coverage_all REAL NOT NULL,        -- the same of all judged neurons
  coverage_by_layer TEXT NOT NULL,   -- JSON, layer to share
  neurons INTEGER NOT NULL,
  neurons_dead INTEGER NOT NULL,
  neurons_unseen INTEGER NOT NULL,
  judged_tests INTEGER NOT NULL,     -- tests that the coverage rests on
  forecast_tests INTEGER,    -- tests still needed for the coverage goal; NULL while unknown
  criterion_score REAL       -- of the campaign's criterion; NULL where it has none
);

CREATE TABLE faults (        -- one row a fault: a test whose answer broke
  id INTEGER PRIMARY KEY,    -- number of the test in its campaign
  seed_id INTEGER NOT NULL,  -- index of the clean input in the data
  perturbation TEXT NOT NULL,
{theta}  noise_seed INTEGER NOT NULL,       -- with seed_id and theta it makes the input again
  round INTEGER NOT NULL,
  stream TEXT NOT NULL,      -- uniform (drawn at random) or search (chosen by the policy)
  kind TEXT NOT NULL,        -- kind of proposal
  label INTEGER,             -- NULL where the data has none, or one that is no class number
  clean_answer INTEGER,      -- NULL in tasks whose outcomes say what changed
  answer INTEGER NOT NULL,   -- the wrong outcome; -1 where the output was not finite
  clean_value REAL,          -- the clean answer as a number; NULL in tasks that have none
  value REAL,                -- the same of the wrong answer; NULL where the output was not finite too
  confidence REAL,           -- of the wrong answer; NULL in tasks that have none, and where the output was not finite
  margin REAL NOT NULL,      -- how far the answer was from right, in the output's unit; negative, or -Inf
  distance REAL NOT NULL,    -- L2 distance of the input from the clean one
  linf REAL NOT NULL,        -- largest change of any value of the input
  ssim REAL,                 -- structural similarity to the clean picture; NULL for other data
  position INTEGER NOT NULL, -- row of the test in its forward pass
  chunk INTEGER NOT NULL,    -- rows of that forward pass
  raised INTEGER NOT NULL,   -- 1 where the test raised the campaign's criterion
  signature TEXT NOT NULL,   -- JSON: share of the test's sensitivity by layer, in 1/10000, as run.start.layers
  tensors TEXT               -- file in tensors/ with its input and output; NULL if they were not kept
);

CREATE INDEX faults_by_outcome ON faults (seed_id, answer);

CREATE TABLE checkpoint (    -- one row: where a resumed campaign goes on
  one INTEGER PRIMARY KEY CHECK (one = 1),
  tests INTEGER NOT NULL,    -- tests done; faults from this number on will be found again
  rounds INTEGER NOT NULL,   -- whole rounds done
  file TEXT NOT NULL         -- its arrays, in state/
);

CREATE VIEW distinct_faults AS  -- of each seed and wrong outcome the fault with the smallest change
  SELECT * FROM (SELECT *, row_number() OVER (PARTITION BY seed_id, answer ORDER BY distance, id) AS place FROM faults)
  WHERE place = 1;
"""


def create(database: sqlite3.Connection, theta: Sequence[tuple[str, str]]) -> None:
    """Make the tables; `theta` has the name of each dimension and a comment."""
    columns = "".join(f"  {theta_column(name)} REAL NOT NULL,  -- {comment}\n" for name, comment in theta)
    database.execute("PRAGMA journal_mode = WAL")
    database.executescript(
        f"BEGIN; {_TABLES.format(theta=columns)} PRAGMA application_id = {APPLICATION}; "
        f"PRAGMA user_version = {SCHEMA}; COMMIT;"
    )


def check(database: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is no run, or one of a newer schema."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION:
        raise StoreError(f"{path} must be a run of Themis, it is another database: check the path")
    if version != SCHEMA:
        whose, remedy = ("a newer", "upgrade Themis") if version > SCHEMA else ("an older", "run the campaign again")
        raise StoreError(f"{path} must have schema {SCHEMA}, it has {version}: {whose} Themis wrote it; {remedy}")


def read_signature(text: str) -> list[float]:
    """Shares of the layers, from a signature as it is stored."""
    return [each / SHARES for each in json.loads(text)]


def theta_column(name: str) -> str:
    """The quoted column of a dimension of theta."""
    return '"theta_' + name.replace('"', '""') + '"'
