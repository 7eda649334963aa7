"""DataFrames of pandas and polars as data."""

import numpy as np
import pytest

from themis import DataError, UsageError
from themis.data.seeds import read_seeds

pandas = pytest.importorskip("pandas")
COLUMNS = {
    "age": [20, 40, 61, 33],
    "height": [1.0, 2.0, 3.0, 4.0],
    "smokes": [True, False, False, True],
    "flag": [0.0, 1.0, 1.0, 0.0],
    "label": ["dog", "cat", "dog", "owl"],
}


def frames():
    yield pytest.param(pandas.DataFrame, id="pandas")
    try:
        import polars
    except ImportError:
        return
    yield pytest.param(polars.DataFrame, id="polars")


@pytest.mark.parametrize("frame", [*frames()])
def test_columns_are_features_with_their_own_ranges_and_types(frame):
    seeds = read_seeds(frame(COLUMNS))
    assert seeds.inputs.tolist() == [[20, 1, 1, 0], [40, 2, 0, 1], [61, 3, 0, 1], [33, 4, 1, 0]]
    assert (seeds.labels.tolist(), seeds.classes) == ([1, 0, 1, 2], ("cat", "dog", "owl"))
    assert seeds.features.names == ("age", "height", "smokes", "flag")
    assert seeds.features.kind == ("integer", "number", "binary", "binary")
    assert (seeds.features.low.tolist(), seeds.features.high.tolist()) == ([20, 1, 0, 0], [61, 4, 1, 1])
    assert read_seeds(frame(COLUMNS), 2).features.high.tolist() == [61, 4, 1, 1]  # those of the full table


@pytest.mark.parametrize("frame", [*frames()])
def test_labels_come_from_a_column_or_apart(frame):
    whole = frame(COLUMNS)
    table, labels = frame({k: v for k, v in COLUMNS.items() if k != "label"}), whole["label"]
    for data in ((table, labels), (table, COLUMNS["label"]), (table, np.array(COLUMNS["label"])), (whole, "label")):
        assert read_seeds(data).labels.tolist() == [1, 0, 1, 2]
    assert not read_seeds(table).has_labels
    by_age = read_seeds((table, "age"))
    assert by_age.labels.tolist() == [20, 40, 61, 33]
    assert by_age.features.names == ("height", "smokes", "flag")


def test_a_series_of_labels_fits_arrays_too():
    seeds = read_seeds((np.ones((2, 3), np.float32), pandas.Series(["b", "a"])))
    assert (seeds.labels.tolist(), seeds.classes) == ([1, 0], ("a", "b"))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (lambda f: f({"a": [1, 2], "b": ["x", "y"]}), DataError, "column 'b' of the DataFrame must be numbers"),
        (
            lambda f: f({"a": [1.0, np.nan]}),
            DataError,
            "column 'a' of the DataFrame must hold finite numbers, but row 1",
        ),
        (lambda f: f({"label": [1, 2]}), DataError, "must have rows and a column of features"),
        (lambda f: f({"a": [1], "y": [1], "label": [2]}), DataError, r"one label column, got \['y', 'label'\]: pass"),
        (lambda f: (f({"a": [1]}), "lable"), UsageError, "label column 'lable' must be in the DataFrame"),
        (lambda f: (f({"a": [1], "y": [1]}), [1]), DataError, "labels must be given once"),
        (lambda f: f({"a": [1, 2], "y": ["x", 3]}), DataError, "all numbers or all names, got 3 among names"),
    ],
)
def test_what_cannot_be_read_is_explained(data, error, message):
    with pytest.raises(error, match=message):
        read_seeds(data(pandas.DataFrame))
