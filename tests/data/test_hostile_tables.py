"""Damaged, wrong or malicious tables are refused in one line and take little memory."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hostile import refused, then, write

from themis import DataError
from themis.data import files
from themis.data.readers import read_data


def table(**columns):
    def setup():
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table(columns), "t.parquet")

    return setup


HOSTILE = {
    # CSV
    "table of nothing": ("csv:t.csv", "it is empty", write("t.csv", "")),
    "table of an empty line": ("csv:t.csv", "it is empty", write("t.csv", "\n\n")),
    "table of names alone": ("csv:t.csv", "at least one row", write("t.csv", "a,b\n")),
    "table with infinity": ("csv:t.csv", "column 'a' must be a finite number", write("t.csv", "a,b\n-inf,2\n")),
    "table with a number too large": (
        "csv:t.csv",
        "must be a finite number, got '1e+39'",
        write("t.csv", "a,b\n1e39,2\n"),
    ),
    "table with underscores": ("csv:t.csv", "got '1_0'", write("t.csv", "a,b\n1_0,2\n")),
    "table with a name among many numbers": (
        "csv:t.csv",
        "row 12: column 'b' must be a finite number, as in most rows, got '1O': fix or drop the row",
        write("t.csv", "a,b\n" + "".join(f"1,{k}\n" for k in range(11)) + "1,1O\n"),
    ),
    "table with names in ragged rows": (
        "csv:t.csv",
        "line 3: a row must have 2 cells, got 1",
        write("t.csv", "a,b\n1,red\n1\n"),
    ),
    "table with names and a label missing": (
        "csv:t.csv",
        "row 2: a row must have a label",
        write("t.csv", "a,label\nred,1\nred,\n"),
    ),
    "table with a label missing": ("csv:t.csv", "line 2: a row must have a label", write("t.csv", "a,label\n1,\n")),
    "table with a label of NaN": ("csv:t.csv", "labels must be finite", write("t.csv", "a,label\n1,nan\n")),
    "table with a name among numbers": (
        "csv:t.csv",
        "row 2: labels must be all numbers or all names, got 'cat'",
        write("t.csv", "a,label\n1,0\n2,cat\n"),
    ),
    "table with ragged rows": (
        "csv:t.csv",
        "line 3: a row must have 2 cells, got 3",
        write("t.csv", "a,b\n1,2\n1,2,3\n"),
    ),
    "table of another encoding": (
        "csv:t.csv",
        "must be a CSV table in UTF-8",
        write("t.csv", "a,b\n1,é\n".encode("latin1")),
    ),
    "table of UTF-16": ("csv:t.csv", "must be a CSV table in UTF-8", write("t.csv", "a,b\n1,2\n".encode("utf-16"))),
    "table with a zero byte": ("csv:t.csv", "t.csv", write("t.csv", "a,b\n1,\0\n")),
    "table with an open quote": ("csv:t.csv", "t.csv", write("t.csv", 'a,b\n1,"2\n')),
    "table without names": ("csv:t.csv", "must begin with a line of column names", write("t.csv", "1,2\n3,4\n")),
    "table with a name twice": ("csv:t.csv", "distinct column names, got 'a' 2 times", write("t.csv", "a,a\n3,4\n")),
    "table with two labels": (
        "csv:t.csv",
        "one column of labels, got ['y', 'label']",
        write("t.csv", "y,label,a\n3,4,5\n"),
    ),
    "table with labels alone": ("csv:t.csv", "must have a column of features", write("t.csv", "label\n3\n")),
    "table of one line without end": (
        "csv:t.csv",
        "lines of under 16,777,216",
        lambda: Path("t.csv").write_text("1," * (10 << 20)),
    ),
    "a name that no system has": ("csv:" + "x" * 5000, "the data file must exist", lambda: None),
    "a folder for a file": ("csv:.", "the data file must exist, but . is not a regular file", lambda: None),
    # Parquet
    "parquet cut": (
        "parquet:t.parquet",
        "must be a Parquet table",
        then(table(a=[1.0] * 99), lambda: Path("t.parquet").write_bytes(Path("t.parquet").read_bytes()[:200])),
    ),
    "parquet of text": ("parquet:t.parquet", "must be a Parquet table", write("t.parquet", "hello")),
    "parquet with lists": ("parquet:t.parquet", "column 'b' must be numbers", table(a=[1], b=[[1, 2]])),
    "parquet with a label missing": (
        "parquet:t.parquet",
        "a row must have a label, but 'y' is empty",
        table(a=[1, 2], y=[0, None]),
    ),
    "parquet without rows": ("parquet:t.parquet", "at least one row", table(a=np.zeros(0))),
    # data sets known by name
    "features without labels": (
        "pdf:.",
        "must hold the arrays X, y, source",
        lambda: np.savez("pdf_features.npz", X=np.ones(3)),
    ),
    "a drive cut": (
        "udacity:.",
        "must be a zip archive of frames",
        then(write("CH2_final_evaluation.csv", "frame_id,steering_angle\n1,0.5\n"), write("frames_100x100.zip", "PK")),
    ),
    "a drive without angles": (
        "udacity:.",
        "must be a CSV table with the columns frame_id, steering_angle",
        then(write("CH2_final_evaluation.csv", "a,b\n1,0.5\n"), write("frames_100x100.zip", "PK")),
    ),
    "labels of pictures in other words": (
        "imagenet:.",
        "must be a CSV table with the columns file, class_index",
        write("labels.csv", "name,number\n1,2\n"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_table_is_refused_in_one_line(name, tmp_path, monkeypatch):
    spec, message, setup = HOSTILE[name]
    assert message in refused(spec, setup, tmp_path, monkeypatch)


WITHOUT_PANDAS = {
    "NaN": ("csv:t.csv", "line 3: column 'b' must be a finite number, got 'nan'", write("t.csv", "a,b\n1,2\n1,nan\n")),
    "an empty cell": (
        "csv:t.csv",
        "column 'a' must be a finite number, but the cell is empty: fix the row, encode the column as numbers, ",
        write("t.csv", "a,b\n,2\n"),
    ),
    "a name": (
        "csv:t.csv",
        "line 2: column 'b' must be a finite number, got 'red': fix the row, encode the column as numbers",
        write("t.csv", "a,b\n1,red\n"),
    ),
    "a null in Parquet": (
        "parquet:t.parquet",
        "row 2: column 'a' must be a finite number, but it is not, or is empty",
        table(a=[1.0, None]),
    ),
    "NaN in Parquet": ("parquet:t.parquet", "row 2: column 'a' must be a finite", table(a=[1.0, float("nan")])),
    "names in Parquet": ("parquet:t.parquet", "column 'b' must be numbers, but it is string", table(a=[1], b=["x"])),
}


@pytest.mark.parametrize("name", WITHOUT_PANDAS)
def test_names_and_missing_values_need_pandas(name, tmp_path, monkeypatch):
    spec, message, setup = WITHOUT_PANDAS[name]
    monkeypatch.setitem(sys.modules, "pandas", None)
    text = refused(spec, setup, tmp_path, monkeypatch)
    assert message in text
    assert text.endswith("; or install pandas to read it as a category or a missing value")


def test_a_table_that_would_fill_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 20))
    table(a=np.zeros(2_000_000))()
    assert Path("t.parquet").stat().st_size < 100_000
    with pytest.raises(DataError, match="must fit in half of the free disk space, 5 MiB, but it declares 8 MiB"):
        read_data("parquet:t.parquet")
