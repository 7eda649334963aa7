"""Every reader returns what was written to small files."""

import gzip
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from data_files import FEATURES, PIXELS, RNG, assert_reads, idx, save_pictures
from PIL import Image

import themis
from themis import DataError, UsageError
from themis.data import read_seeds, rows
from themis.data.readers import read_data
from themis.data.rows import Rows

LABELS = [0, 0, 1, 1, 1, 2]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def inputs_of(spec):
    return read_seeds(read_data(spec)).inputs


# Pictures


@pytest.mark.parametrize(("suffix", "options"), [("png", {}), ("bmp", {}), ("webp", {"lossless": True})])
def test_a_folder_of_class_folders_is_read(here, suffix, options):
    for name, part in (("cat", PIXELS[:2]), ("dog", PIXELS[2:5]), ("owl", PIXELS[5:])):
        save_pictures(here / "pets" / name, part, suffix, **options)
    (here / "pets" / "notes.txt").write_text("not a picture")
    seeds = assert_reads("images:pets", PIXELS / np.float32(255), LABELS)
    assert isinstance(seeds.inputs, Rows)


def test_a_flat_folder_has_no_labels(here):
    save_pictures(here / "flat")
    assert_reads("images:flat", PIXELS / np.float32(255))


def test_jpeg_is_read_approximately(here):
    smooth = np.linspace(0, 255, 3 * 16 * 16).reshape(1, 3, 16, 16).astype(np.uint8)
    save_pictures(here / "j", smooth, "jpg", quality=95)
    assert abs(inputs_of("images:j").numpy() * 255 - smooth).mean() < 8


def test_grey_pictures_have_one_channel_unless_asked_otherwise(here):
    save_pictures(here / "grey", PIXELS[:, :1])
    assert_reads("images:grey", PIXELS[:, :1] / np.float32(255))
    assert_reads("images:grey?mode=rgb", PIXELS[:, [0, 0, 0]] / np.float32(255))
    for name in ("grey", "gray", "L", "GRAY"):
        assert read_data(f"images:grey?mode={name}").shape[1] == 1
    Image.fromarray(PIXELS[0, 0]).convert("RGB").save(here / "grey" / "99.png")
    assert len(inputs_of("images:grey")) == 7


def test_pictures_are_scaled_and_cropped(here):
    save_pictures(here / "a")
    save_pictures(here / "a" / ".." / "b", RNG.integers(0, 256, (2, 3, 40, 30), dtype=np.uint8))
    Image.fromarray(PIXELS[0].transpose(1, 2, 0)).save(here / "b" / "wide.png")
    assert inputs_of("images:b?size=8").shape == (3, 3, 8, 8)
    assert inputs_of("images:b?size=9&crop=7").shape == (3, 3, 7, 7)
    assert_reads("images:a?crop=8", PIXELS[:, :, 1:9, 2:10] / np.float32(255))
    expected = Image.fromarray(PIXELS[0].transpose(1, 2, 0)).resize((6, 5), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(
        inputs_of("images:a?size=5")[0], np.array(expected)[:, :5].transpose(2, 0, 1) / np.float32(255)
    )


# Arrays


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_read(save):
    values = RNG.random((9, 2, 3))
    save("a.npz", inputs=values, labels=np.arange(9))
    assert_reads("npz:a.npz", values, range(9))
    save("b.npz", X=np.asfortranarray(values.astype("f4")), y=np.arange(9) / 2)
    assert_reads("npz:b.npz?inputs=X&labels=y", values.astype("f4"), np.arange(9) / 2)
    save("c.npz", inputs=values)
    assert_reads("npz:c.npz", values)


def test_labels_of_an_archive_are_not_lost_silently():
    np.savez("a.npz", inputs=np.eye(3), y=[0, 1, 2])
    with pytest.warns(RuntimeWarning, match="read without labels, because .* 'labels', but y: .*labels=NAME"):
        assert read_data("npz:a.npz").labels is None
    with pytest.raises(DataError, match=r"must hold an array named 'Y', got \['inputs', 'y'\]"):
        read_data("npz:a.npz?labels=Y")


def test_an_array_is_memory_mapped():
    values = RNG.random((9, 2, 3)).astype(">f4")
    np.save("a.npy", values)
    assert isinstance(assert_reads("npy:a.npy", values).inputs, Rows)
    np.save("a_labels.npy", np.arange(9))
    assert_reads("npy:a.npy", values, range(9))
    np.save("other.npy", np.arange(9) / 4)
    assert_reads("npy:a.npy?labels=other.npy", values, np.arange(9) / 4)
    np.save("b.npy", np.asfortranarray(values))
    assert_reads("npy:b.npy", values)


@pytest.mark.parametrize("is_gz", [False, True])
def test_idx_files_are_read(here, is_gz):
    def write(name, values):
        (here / f"{name}{'.gz' if is_gz else ''}").write_bytes(gzip.compress(idx(values)) if is_gz else idx(values))

    write("train-images-idx3-ubyte", PIXELS[:, 0])
    write("train-labels-idx1-ubyte", np.array(LABELS, "u1"))
    write("t10k-images-idx3-ubyte", PIXELS[:2, 1])
    end = ".gz" if is_gz else ""
    assert_reads(f"idx:train-images-idx3-ubyte{end}", PIXELS[:, :1] / np.float32(255), LABELS)
    assert_reads("idx:.?split=train", PIXELS[:, :1] / np.float32(255), LABELS)
    assert_reads("mnist:.", PIXELS[:2, 1:2] / np.float32(255))
    write("numbers-idx2", RNG.random((5, 4)).astype("f4"))
    assert inputs_of(f"idx:numbers-idx2{end}").shape == (5, 4)


# CIFAR

FLAT = RNG.integers(0, 256, (4, 3072), dtype=np.uint8)
TINY = FLAT.reshape(4, 3, 32, 32) / np.float32(255)


def python2_pickle(data, labels):
    """A batch as Python 2 wrote it: strings of bytes, NumPy's old name."""

    def string(value):
        return b"T" + struct.pack("<i", len(value)) + value

    raw, n = data.tobytes(), len(data)
    dtype = b"cnumpy\ndtype\n(" + string(b"u1") + b"K\x00K\x01tR(K\x03" + string(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + string(b"b") + b"tR(K\x01(K" + bytes([n])
    )
    array += b"M\x00\x0ct" + dtype + b"\x89" + string(raw) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([each]) for each in labels) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + string(b"labels") + numbers + b"u."


def test_pickled_batches_are_read(here):
    (here / "test_batch").write_bytes(python2_pickle(FLAT, [3, 1, 2, 0]))
    assert_reads("cifar:test_batch", TINY, [3, 1, 2, 0])
    assert_reads("cifar:.", TINY, [3, 1, 2, 0])
    for protocol in (2, 5):
        batch = {b"data": FLAT, b"fine_labels": [9, 8, 7, 6], b"coarse_labels": [1, 1, 0, 0], b"filenames": [b"x"]}
        (here / "train").write_bytes(pickle.dumps(batch, protocol))
        assert_reads("cifar:train", TINY, [9, 8, 7, 6])
        assert_reads("cifar:.?split=train&labels=coarse", TINY, [1, 1, 0, 0])
    (here / "unlabelled").write_bytes(pickle.dumps({"data": FLAT}))
    assert_reads("cifar:unlabelled", TINY)


def test_binary_batches_are_read(here):
    labels = np.array([[3], [1], [2], [0]], "u1")
    (here / "data_batch_1.bin").write_bytes(np.hstack([labels, FLAT]).tobytes())
    (here / "data_batch_2.bin").write_bytes(np.hstack([labels, FLAT]).tobytes())
    assert_reads("cifar:.?split=train", np.concatenate([TINY, TINY]), [3, 1, 2, 0] * 2)
    (here / "test.bin").write_bytes(np.hstack([labels, labels + 5, FLAT]).tobytes())
    assert_reads("cifar:test.bin", TINY, [8, 6, 7, 5])
    assert_reads("cifar:test.bin?labels=coarse", TINY, [3, 1, 2, 0])


# Tables


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("label", ["label", "y", "class", "Target"])
def test_a_csv_table_is_read(here, separator, label):
    lines = [f"a,{label},b", "0.5,0,-1", '2,"1", 1e-3', "", "3,1,4"]
    (here / "t.csv").write_text("\n".join(lines).replace(",", separator), encoding="utf-8-sig")
    assert_reads("csv:t.csv", FEATURES, [0, 1, 1])


def test_columns_of_a_table_are_named(here):
    (here / "t.csv").write_text("id,a,kind,b\nx1,0.5,cat,-1\nx2,2,owl,0.001\nx3,3,cat,4\n")
    assert_reads("csv:t.csv?label=kind&drop=id", FEATURES, [0, 1, 0])
    assert_reads("csv:t.csv?drop=id,kind", FEATURES)
    (here / "u.csv").write_text("y,a,angle\n1,0.5,0.25\n1,2,-3.5\n")
    assert_reads("csv:u.csv?label=angle", np.array([[1, 0.5], [1, 2]]), [0.25, -3.5])
    assert_reads("csv:u.csv?label=", np.array([[1, 0.5, 0.25], [1, 2, -3.5]]))


def test_a_parquet_table_is_read(here):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table({"a": FEATURES[:, 0], "label": pa.array([2, 0, 1], pa.int8()), "b": FEATURES[:, 1].astype("f4")})
    parquet.write_table(table, "t.parquet", row_group_size=2)
    assert_reads("parquet:t.parquet", FEATURES.astype("f4"), [2, 0, 1])
    parquet.write_table(table.set_column(1, "name", pa.array(["owl", "cat", "owl"])), "u.parquet")
    assert_reads("parquet:u.parquet?label=name", FEATURES.astype("f4"), [1, 0, 1])
    assert_reads("parquet:u.parquet?drop=name", FEATURES.astype("f4"))


def test_a_large_table_is_spilled_to_disk(here, monkeypatch):
    monkeypatch.setattr(rows, "MAX_HELD_BYTES", 1000)
    values = RNG.random((500, 7)).astype("f4")
    lines = [",".join("abcdefg"), *(",".join(map(repr, row.tolist())) for row in values)]
    (here / "t.csv").write_text("\n".join(lines))
    seeds = read_data("csv:t.csv")
    assert isinstance(seeds.inputs, Rows)
    np.testing.assert_array_equal(seeds.take(torch.tensor([499, 0])), values[[499, 0]])


# Names and options


def test_names_and_options_are_checked(here):
    (here / "t.csv").write_text("a,b\n1,2\n")
    cases = {
        "cvs:t.csv": "did you mean 'csv'",
        "csv:t.csv?lable=a": "no option 'lable': did you mean 'label'",
        "csv:t.csv?label=c": "the label column 'c' must be in",
        "digits?size=3": "has no option 'size'",
        "images:.?size=big": "size must be a whole number from 1 to 8,192",
        "images:.?size=3&mode=blue": "mode must be 'rgb' or 'grey'",
        "cifar:.?split=all": "split must be 'test' or 'train'",
    }
    save_pictures(here)
    for spec, message in cases.items():
        with pytest.raises(UsageError, match=message):
            read_data(spec)
    for name in ("images", "npz", "npy", "csv", "parquet", "idx", "cifar", "wav", "hf"):
        with pytest.raises(UsageError, match=f"write {name}:"):
            read_data(name)


def test_a_campaign_runs_from_files_when_the_working_directory_changes(here, monkeypatch):
    for name, part in (("a", PIXELS[:3]), ("b", PIXELS[3:])):
        save_pictures(here / "pets" / name, part)
    monkeypatch.setattr(rows, "MAX_HELD_BYTES", 0)
    seeds = read_data("images:pets?size=8")
    monkeypatch.chdir("/")
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2))
    assert themis.run(themis.Target(net, oracle="changed"), seeds, "gaussian", max_tests=100).rounds[-1].tests == 100


def test_whole_labels_of_a_parquet_table_are_not_held_as_objects(tmp_path):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    n = 500_000
    labels = np.arange(n) + 1000
    parquet.write_table(pa.table({"a": np.zeros(n, np.float32), "label": labels}), tmp_path / "a.parquet")
    tracemalloc.start()
    try:
        seeds = read_data(f"parquet:{tmp_path / 'a.parquet'}")
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seeds.labels.dtype == torch.int64
    assert seeds.labels[-1] == n + 999
    assert taken < 5 * labels.nbytes  # a list of Python's numbers alone has as much
