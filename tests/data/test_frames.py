"""DataFrames of pandas and polars as data."""

import importlib
import json

import numpy as np
import pytest

from themis import DataError, Features, UsageError
from themis.data.features import Coding
from themis.data.readers import read_data
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
        (
            lambda f: f({"a": pandas.to_datetime(["2026-01-01"])}),
            DataError,
            "must be numbers, booleans or names, got date",
        ),
        (lambda f: f({"a": [{}]}), DataError, "column 'a' .* must be numbers, booleans or names, got dict: encode it"),
        (
            lambda f: f({"a": [1.0, np.inf]}),
            DataError,
            "row 1 has a NaN or an infinity in column 'a'",
        ),
        (lambda f: f({"a": [f"name {k}" for k in range(1001)]}), DataError, "at most 1,000 distinct names, got 1,001"),
        (lambda f: f({"label": [1, 2]}), DataError, "must have rows and a column of features"),
        (
            lambda f: f({"a": [1], "y": [1], "label": [2]}),
            DataError,
            r"one column of labels, got \['y', 'label'\]",
        ),
        (lambda f: (f({"a": [1]}), "lable"), UsageError, "label column 'lable' must be in a DataFrame"),
        (lambda f: (f({"a": [1], "y": [1]}), [1]), DataError, "labels must be given once"),
        (lambda f: f({"a": [1, 2], "y": ["x", 3]}), DataError, "all numbers or all names, got 3 among names"),
    ],
)
def test_what_cannot_be_read_is_explained(data, error, message):
    with pytest.raises(error, match=message):
        read_seeds(data(pandas.DataFrame))


MIXED = {
    "color": ["red", None, "blue", "red"],
    "age": [20.0, None, 61.0, 33.0],
    "smokes": [True, False, False, True],
    "share": [0.25, 0.5, 0.5, 1.0],
}


@pytest.mark.parametrize("frame", [*frames()])
def test_names_are_categories_and_missing_values_are_values(frame):
    seeds = read_seeds(frame(MIXED))
    assert seeds.inputs.tolist() == [[1, 20, 1, 0.25, 0], [2, 33, 0, 0.5, 1], [0, 61, 0, 0.5, 0], [1, 33, 1, 1, 0]]
    assert seeds.features.names == ("color", "age", "smokes", "share", "age is missing")
    assert seeds.features.kind == ("category", "number", "binary", "number", "binary")
    assert seeds.features.high.tolist() == [2, 61, 1, 1, 1]
    assert seeds.coding.columns[0].values == ("blue", "red", None)
    assert seeds.coding == Coding.recorded(json.loads(json.dumps(seeds.coding.as_dict())))


def exotic():
    rare = pandas.Categorical(["S", "L", None], categories=["S", "M", "L"], ordered=True)
    yield "pandas", pandas.DataFrame({"size": rare, "n": pandas.array([1, None, 3], dtype="Int64")})
    flags = {
        "flag": pandas.array([True, None, False], dtype="boolean"),
        "odd": pandas.Series([True, None, 2], dtype=object),
    }
    yield "nullable", pandas.DataFrame(flags)
    yield (
        "gaps",
        pandas.DataFrame({"a": pandas.Series(["x", np.nan, "y"], dtype=object), "b": np.float32([1, np.nan, 2])}),
    )
    yield "plain", pandas.DataFrame({"a": ["x", "y", "x"], "b": [True, False, True], "c": [1, 2, 3]})
    yield "category of numbers", pandas.DataFrame({"a": pandas.Series([3, 1, 3], dtype="category"), "b": [0.5, 1, 2]})
    try:
        import polars
    except ImportError:
        return
    kinds = {"size": polars.Enum(["S", "M", "L"]), "color": polars.Categorical, "n": polars.Int8, "w": polars.Float32}
    columns = {"size": ["S", "L", None], "color": ["x", "y", "x"], "n": [1, None, 3], "w": [0.5, float("nan"), 2.0]}
    yield "polars", polars.DataFrame(columns, schema=kinds)


@pytest.mark.parametrize("frame", [pytest.param(frame, id=name) for name, frame in exotic()])
def test_rows_become_those_of_the_frame_again(frame):
    seeds = read_seeds(frame)
    rows = seeds.coding.frame(seeds.inputs.numpy())
    if isinstance(frame, pandas.DataFrame):
        pandas.testing.assert_frame_equal(rows, frame)
    else:
        importlib.import_module("polars.testing").assert_frame_equal(rows, frame)


def test_features_of_a_frame_can_be_changed():
    features = Features.of(pandas.DataFrame(MIXED)).set("color", change="fixed")
    seeds = read_seeds(pandas.DataFrame(MIXED)).with_features(features)
    assert (seeds.features.change[0], seeds.coding.library) == ("fixed", "pandas")
    with pytest.raises(UsageError, match="'color' is a category without an order, got change=raise"):
        features.set("color", change="raise")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_file_of_names_is_read_as_its_frame_is(suffix, tmp_path):
    frame = pandas.DataFrame({**MIXED, "label": ["no", "yes", "no", "no"]})
    path = tmp_path / f"t.{suffix}"
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    seeds, expected = read_data(f"{suffix}:{path}?drop=share"), read_seeds(frame.drop(columns="share"))
    assert np.array_equal(seeds.inputs, expected.inputs)
    assert (seeds.features.sha256, seeds.classes) == (expected.features.sha256, expected.classes)
    assert read_data(f"{suffix}:{path}?label=").features.names[4] == "label"
