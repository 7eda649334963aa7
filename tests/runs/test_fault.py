"""The table of what a fault is, from which everything that knows a column follows."""

import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

import themis
from themis.oracle import KEPT_ANSWER
from themis.runs.fault import COLUMNS, PLAIN_COLUMNS
from themis.runs.faults import Faults
from themis.runs.store import schema
from themis.runs.store.schema import find_invalid_fault
from themis.runs.store.writer import _fault_rows

THETA = [{"name": "sigma", "low": 0.0, "high": 1.0}]


@pytest.fixture
def columns():
    """Two faults without anything that may be missing."""
    numbers = {"str": np.array(["uniform", "search"]), "bool": np.array([True, False])}
    plain = {each.name: numbers.get(each.type, np.arange(1, 3)).astype(each.dtype) for each in PLAIN_COLUMNS}
    arrays = {"theta": np.full((2, 1), 0.5, np.float32), "signature": np.array([[0.25, 0.75]] * 2, np.float32)}
    return {**plain, "chunk": np.array([8, 8]), **arrays}


@pytest.fixture
def database(columns):
    database = sqlite3.connect(":memory:")
    schema.create(database, [("sigma", "0 to 1")])
    rows = _fault_rows(columns, "gaussian", [None, None])
    database.executemany(f"INSERT INTO faults VALUES ({', '.join('?' * len(rows[0]))})", rows)
    yield database
    database.close()


def find_invalid(database):
    return find_invalid_fault(database.execute, {"theta": THETA, "perturbation": "gaussian"}, 2)


@pytest.mark.quick
def test_a_column_is_known_to_the_table_and_to_what_computes_it_alone():
    source = Path(themis.__file__).parent
    files = [path for path in source.rglob("*.*") if path.suffix in (".py", ".js", ".html", ".c")]
    knowing = {path.name for path in files if re.search("(?<!pgd_)linf", path.read_text())}
    assert knowing <= {"distance.py", "fault.py", "shrink.py"}


def test_every_column_says_what_it_is():
    assert [each.name for each in COLUMNS if not each.help] == []
    [unknown] = [each.missing for each in COLUMNS if each.name == "clean_answer"]
    assert unknown == KEPT_ANSWER


def test_every_column_is_stored_under_its_name(database, columns):
    stored = [name for _, name, *_ in database.execute("PRAGMA table_info(faults)")]
    names = [each.name.replace("theta", "theta_sigma") for each in COLUMNS]
    assert stored == [*names, "tensors"]
    row = dict(zip(stored, database.execute("SELECT * FROM faults WHERE id = 1").fetchone(), strict=True))
    assert all(row[each.name] == columns[each.name][0] for each in PLAIN_COLUMNS)
    assert find_invalid(database) is None


@pytest.mark.parametrize("column", PLAIN_COLUMNS, ids=lambda column: column.name)
def test_a_value_outside_the_range_of_its_column_is_found(database, column):
    ends = [column.low - 1] * (column.low > -1e30) + [column.high + 1] * (column.high < 1e30)
    wrong = {"str": ["x" * 101], "bool": [2, -1, "x"], "int": ends or ["x"], "float": ["x", b"1", *ends]}[column.type]
    for value in wrong:
        database.execute("SAVEPOINT before")
        database.execute(f"UPDATE faults SET {column.name} = ? WHERE id = 2", (value,))
        found = find_invalid(database)
        assert found is not None, value
        assert found[1] == column.name, value
        database.execute("ROLLBACK TO before")


def test_what_is_missing_is_null_in_the_database_and_none_in_a_fault(columns):
    for column in PLAIN_COLUMNS:
        if column.missing is not None:
            columns[column.name] = np.full(2, column.missing, column.dtype)
    [row, _] = _fault_rows(columns, "gaussian", [None, None])
    stored = dict(zip([each.name for each in COLUMNS], row, strict=False))
    faults = Faults("gaussian", ("sigma",), ("a", "b"), None)
    faults.add(**columns)
    for column in PLAIN_COLUMNS:
        if column.missing is not None and column.type == "int":
            assert stored[column.name] is None, column.name
        if column.missing is not None and column.is_optional:
            assert getattr(faults[0], column.name) is None, column.name
    assert np.isnan(faults[0].confidence)
