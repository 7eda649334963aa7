"""Features of a table: inferred from the data, read from a file or set by hand, and kept with the seeds."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import themis
from themis import DataError, Features, UsageError
from themis.data import Seeds, read_seeds
from themis.data.features import read_features
from themis.data.readers import read_data
from themis.data.rows import Rows
from themis.runs.source import Origin
from themis_lab.zoo import datasets

TABLE = torch.tensor([[0.0, 3.0, 0.5, 7.0], [1.0, -2.0, 0.25, 7.0], [0.0, 10.0, 1.5, 7.0]])
NAMES = ("perm_sms", "n_files", "share", "version")


def plain(described):
    return described.kind, described.low.tolist(), described.high.tolist(), described.change


def write(tmp_path, text):
    path = tmp_path / "features.csv"
    path.write_text(text)
    return path


def test_kinds_and_ranges_are_found_in_the_rows():
    found = Features.of(TABLE)
    assert found.names == ("0", "1", "2", "3")
    assert plain(found) == (
        ("binary", "integer", "number", "integer"),
        [0, -2, 0.25, 7],
        [1, 10, 1.5, 7],
        ("any", "any", "any", "fixed"),
    )
    assert plain(Features.of(TABLE.double().numpy(), NAMES)) == plain(found)


def test_lazy_rows_are_read_one_block_at_a_time(monkeypatch):
    monkeypatch.setattr("themis.data.rows.BLOCK_BYTES", 2 * 4 * 4)
    held = Features.of(TABLE)
    read = Features.of(Rows(lambda k: TABLE[k], torch.arange(3), (4,)))
    assert plain(read) == plain(held)


def test_a_column_of_zeros_is_binary_and_may_be_allowed_to_rise():
    found = Features.of(torch.zeros(5, 2))
    assert plain(found) == (("binary",) * 2, [0, 0], [1, 1], ("fixed",) * 2)
    assert found.set("1", change="raise").change == ("fixed", "raise")


@pytest.mark.parametrize("inputs", [torch.rand(3, 1, 2), torch.rand(3), torch.empty(0, 2), torch.empty(2, 0)])
def test_only_a_table_has_features(inputs):
    with pytest.raises(DataError, match=r"must be those of a table \[rows, features\], got inputs"):
        Features.of(inputs)


def test_infinite_values_are_refused():
    with pytest.raises(DataError, match="must hold finite numbers"):
        Features.of(np.array([[1e300]]))


def test_features_are_set_by_name_or_glob():
    base = Features.of(TABLE, NAMES)
    changed = (
        base.set("perm_*", change="raise").set("n_files", low=-5, high=20.7, change="lower").set("*", kind="number")
    )
    assert plain(changed) == (
        ("number",) * 4,
        pytest.approx([0, -5, 0.25, 7]),
        [1, 20, 1.5, 7],  # the last whole number, when it was one
        ("raise", "lower", "any", "fixed"),
    )
    assert plain(base) == plain(Features.of(TABLE)), "the first is left as it is"
    assert base.set("share", kind="binary").high[2] == 1, "binary values are 0 and 1"
    assert Features.of(TABLE, ("a[0]", "a0", "b", "c")).set("a[0]", change="fixed").change[:2] == ("fixed", "any")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "n_file", "low": 1}, "'n_file' must match a feature of the table: did you mean 'n_files'"),
        ({"name": "share", "kind": "whole"}, "'share' needs a known kind, got 'whole'"),
        ({"name": "share", "change": "rise"}, "known change, got 'rise': did you mean 'raise'"),
        ({"name": "share", "low": 2}, "'share' must have finite low <= high, got 2 and 1.5"),
        ({"name": "n_files", "low": 3.2, "high": 3.8}, "'n_files' must have finite low <= high, got 4 and 3"),
        ({"name": "n_files", "high": float("inf")}, "finite low <= high, got -2 and inf"),
        ({"name": "perm_sms", "high": 2}, "'perm_sms' must have a range within 0..1, got 0 and 2 for binary"),
    ],
)
def test_invalid_features_are_refused(changed, message):
    with pytest.raises(UsageError, match=message):
        Features.of(TABLE, NAMES).set(**changed)


def test_every_feature_needs_all_its_values():
    with pytest.raises(UsageError, match=r"got \[1, 2\] of them"):
        Features(("a",), ("number",), torch.zeros(1), torch.ones(2), ("any",))


def test_equal_features_have_equal_hashes():
    base = Features.of(TABLE, NAMES)
    assert base.sha256 == Features.of(TABLE, NAMES).sha256
    others = [Features.of(TABLE), base.set("share", high=2), base.set("share", change="raise")]
    assert len({base.sha256, *(each.sha256 for each in others)}) == 4


# A file


def test_a_file_overrides_what_the_data_shows(tmp_path):
    path = write(tmp_path, "name,change,high\n*,raise,\n\nperm_*,fixed,\nn_files, ,100\n")
    changed = read_features(path, Features.of(TABLE, NAMES))
    assert plain(changed) == (
        ("binary", "integer", "number", "integer"),
        [0, -2, 0.25, 7],
        [1, 100, 1.5, 7],
        ("fixed", "raise", "raise", "raise"),
    )


def test_ranges_are_checked_after_all_lines_are_read(tmp_path):
    path = write(tmp_path, "name,low,high\nn_*,50,\nn_files,,60\n")
    assert read_features(path, Features.of(TABLE, NAMES)).low[1] == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have a column 'name'"),
        ("kind\ninteger\n", "must have a column 'name'"),
        ("name,name\na,a\n", "each once, got"),
        ("name,chnge\na,any\n", "no others than kind, low, high, change, each once, got .*chnge"),
        ("name,low\nn_files\n", "line 2: a row must have 2 cells and name a feature, got"),
        ("name,low\n,1\n", "line 2: a row must have 2 cells and name a feature, got"),
        (
            "name,low\nn_fils,1\n",
            "features.csv: 'n_fils' must match a feature of the table: did you",
        ),
        ("name,kind\n\nn_files,int\n", "features.csv: 'n_files' needs a known kind, got 'int'"),
        ("name,change\nn_files,add\n", "features.csv: 'n_files' needs a known change, got 'add'"),
        ("name,low\nn_files,few\n", "line 2: the ends of a range must be numbers, but .*'few'"),
        ("name,high\nn_files,inf\n", "features.csv: feature 'n_files' must have finite low <= high, got -2 and inf"),
        ("name,low\nn_files,11\n", "features.csv: feature 'n_files' must have finite low <= high, got 11 and 10"),
        ('name\n"n_files\n', "must be a CSV table in UTF-8"),
    ],
)
def test_errors_in_a_file_name_their_place(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        read_features(write(tmp_path, text), Features.of(TABLE, NAMES))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="must exist"):
        read_features(tmp_path / "none.csv", Features.of(TABLE, NAMES))


# With the seeds


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"high": 5}, r"'n_files' must be a whole number in -2..5, but seed 2 has 10"),
        ({"kind": "binary"}, r"'n_files' must be a whole number in 0..1, but seed 0 has 3"),
    ],
)
def test_seeds_outside_their_range_are_named(changed, message):
    seeds = read_seeds(TABLE).with_feature_names(NAMES)
    with pytest.raises(DataError, match=message):
        seeds.with_features(seeds.features.set("n_files", **changed))
    with pytest.raises(DataError, match=r"'2' must be a whole number in 1..1, but seed 0 has 0.5"):
        seeds.with_features(Features.of(TABLE).set("2", kind="integer"))


def test_features_must_describe_every_column():
    with pytest.raises(DataError, match=r"every column of the table, which has the shape \[4\], got 3 features"):
        read_seeds(TABLE).with_features(Features.of(TABLE[:, :3]))


def test_a_sample_has_the_features_of_all_the_data():
    table = torch.arange(400.0).view(100, 4)
    for data in (table, (table, torch.zeros(100).long()), _Items(table)):
        sample = read_seeds(data, 5)
        assert len(sample) == 5
        assert plain(sample.features) == plain(Features.of(table))
        assert sample[torch.tensor([1, 3])].features is sample.features, "found once"
        changed = sample.with_features(sample.features.set("0", change="fixed"))
        assert changed[:2].in_memory().features.change[0] == read_seeds(changed, 3).features.change[0] == "fixed"


class _Items(Dataset):
    def __init__(self, table):
        self.table, self.n_read = table, 0

    def __len__(self):
        return len(self.table)

    def __getitem__(self, k):
        self.n_read += 1
        return self.table[k]


def test_features_are_inferred_on_first_use_only():
    items = _Items(torch.rand(100, 4))
    sample = read_seeds(items, 5)
    assert items.n_read == 13, (
        "the first twice more for its shape and its inputs, three twice to see whether they repeat"
    )
    assert len(sample.features) == 4
    assert items.n_read == 108
    whole = _Items(torch.rand(100, 4))
    assert len(read_seeds(whole).features) == 4
    assert whole.n_read == 108


def test_pictures_have_no_features():
    with pytest.raises(DataError, match="must be those of a table"):
        _ = read_seeds(torch.rand(3, 1, 4, 4)).features


def test_tables_in_files_give_their_columns_names(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,label\n0,1.5,0\n1,2,1\n")
    assert read_data(f"csv:{tmp_path}/t.csv").features.names == ("a", "b")
    assert read_data(f"csv:{tmp_path}/t.csv?label=a").features.names == ("b", "label")
    np.savez(tmp_path / "t.npz", inputs=np.eye(3))
    assert read_data(f"npz:{tmp_path}/t.npz").features.names == ("0", "1", "2")


def test_an_origin_reads_its_features_too(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,label\n0,1.5,0\n1,2,1\n")
    (tmp_path / "f.csv").write_text("name,change\na,raise\n")
    origin = Origin(data="csv:t.csv", features="f.csv", folder=str(tmp_path))
    assert origin.read().features.change == ("raise", "any")
    assert Origin.of(origin.as_dict()).read().features.sha256 == origin.read().features.sha256


class _Tenths:
    def place(self, raw):
        return raw / 10

    def value(self, places):
        return places * 10


def test_features_on_axes_are_checked_by_their_raw_values():
    raw = Features.of(TABLE, NAMES)
    on_axes = Features(raw.names, raw.kind, raw.low, raw.high, raw.change, _Tenths())
    seeds = read_seeds(TABLE / 10).with_features(on_axes)
    assert seeds.features.set("share", change="fixed").axes is on_axes.axes
    on_axes.check_inside((-0.2, 1.0))
    with pytest.raises(DataError, match=r"'n_files' must be a whole number in -2..10, but seed 9 has 3.04"):
        on_axes.check(TABLE / 10 + torch.tensor([0, 0.004, 0, 0]), torch.tensor([9, 10, 11]))
    with pytest.raises(
        DataError, match=r"'n_files' must stay in the input's bounds \(0, 1\), but it ranges from -0.2 to 1"
    ):
        on_axes.check_inside((0.0, 1.0))


def test_a_campaign_needs_a_feature_that_may_change():
    described = Features.of(TABLE, NAMES).set("*", change="fixed")
    with pytest.raises(DataError, match="a feature of the table must be free to change, but none is"):
        described.check_inside((-2, 10))


def test_it_is_public():
    assert themis.Features is Features
    assert isinstance(read_seeds(TABLE), Seeds)


# The zoo's tables


def test_independent_counts_of_a_pdf_file_may_be_raised(tmp_path):
    names = ["count_font", "count_obj", "size", "ratio_size_obj", "count_js"]
    table = np.array([[0, 3, 900, 300, 1], [7, 5, 42_799_888, 8e6 + 0.5, 0], [2, 1, 24, 24, 1], [2, 4, 80, 20, 0]])
    source = np.array(["contagio-ben", "contagio-mal", "google-ben", "virustotal-mal"])
    np.savez(tmp_path / "pdf_features.npz", X=table, y=[0, 1, 0, 1], source=source, feature_names=np.array(names))
    for split in ("train", "test"):
        found = datasets.split_pdf(tmp_path, split=split).features
        assert found.names == tuple(names)
        assert found.kind == ("integer", "integer", "integer", "number", "binary")
        assert found.change == ("raise", "fixed", "fixed", "fixed", "raise")
        assert found.high[:3].tolist() == [7, 5, 42_799_888], "of both splits"
        raw = torch.tensor(table[1])
        torch.testing.assert_close(found.value(found.place(raw)), raw)
        found.check_inside((0.0, 1.0))


def test_features_of_an_app_may_only_be_raised(tmp_path):
    bits = np.eye(4, 9, dtype=np.uint8)
    names = np.array([f"permission_{k}" for k in range(9)])
    np.savez(tmp_path / "drebin215.npz", X=np.packbits(bits, axis=1), y=[0, 1, 0, 1], feature_names=names)
    (tmp_path / "weights").mkdir()
    np.save(tmp_path / "weights" / "test_rows.npy", np.array([1, 3]))
    found = datasets.split_drebin(tmp_path, split="test").features
    assert found.names == tuple(names)
    assert plain(found) == (("binary",) * 9, [0] * 9, [1] * 9, ("raise",) * 9)


def test_a_later_line_restores_the_range_of_a_column(tmp_path):
    lines = (
        "name,kind,low,high,change",
        "*,binary,,,raise",
        "n_files,integer,,,any",
        "share,number,,,",
        "version,number,,,",
    )
    path = write(tmp_path, "\n".join(lines))
    changed = read_features(path, Features.of(TABLE, NAMES))
    assert plain(changed)[0] == ("binary", "integer", "number", "number")
    assert changed.low.tolist() == [0.0, -2.0, 0.25, 7.0]
    assert changed.high.tolist() == [1.0, 10.0, 1.5, 7.0]
    assert changed.change == ("raise", "any", "raise", "raise")
