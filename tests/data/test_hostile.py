"""Files that are damaged, wrong or malicious: each gets one line, runs no code and takes little memory."""

import gzip
import pickle
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from themis import DataError
from themis.data import memory, read_seeds
from themis.data.readers import read_data

TERABYTE = 1 << 40
AVAILABLE = 256 << 20
MOST_TAKEN = 64 << 20
PIXELS = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)


class Harmful:
    def __reduce__(self):
        return exec, ("open('harm', 'w').close()",)


def write(name, content):
    """Writes a file."""
    data = content.encode() if isinstance(content, str) else content
    return lambda: (Path(name).parent.mkdir(exist_ok=True), Path(name).write_bytes(data))


def cut(name, save, share=0.5):
    """Leaves a share of a file."""

    def setup():
        Path(name).parent.mkdir(exist_ok=True)
        save(name)
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[: int(share * len(content))])

    return setup


def then(*steps):
    return lambda: [each() for each in steps]


# Arrays


def npy(shape, content=b"", dtype="|u1"):
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + content


def archive(content, declared=None, method=zipfile.ZIP_DEFLATED):
    """An archive with one array; `declared` is the size it claims for it."""

    def setup():
        with zipfile.ZipFile("a.npz", "w", method) as made:
            made.writestr("inputs.npy", content)
        if declared is not None:
            made = bytearray(Path("a.npz").read_bytes())
            for signature, at in ((b"PK\3\4", 22), (b"PK\1\2", 24)):
                begin = made.index(signature) + at
                made[begin : begin + 4] = struct.pack("<I", declared)
            Path("a.npz").write_bytes(made)

    return setup


def long_header():
    """A header that claims 4 GB, and goes on for 200 MB."""
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 9) + bytes(200 << 20)


def idx(*shape, content=b"", code=8):
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


# Pickles


def batch(**changes):
    made = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], **changes}
    return pickle.dumps({name.encode(): value for name, value in made.items() if value is not None}, 2)


# Pictures


def picture(name, pixels=PIXELS, **options):
    def setup():
        Path(name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(name, **options)

    return setup


def png_header(width, height):
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (body, data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


# Tables


def table(**columns):
    def setup():
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.table(columns), "t.parquet")

    return setup


HOSTILE = {
    # NumPy archives
    "archive cut": (
        "npz:a.npz",
        "a.npz must be a NumPy archive",
        cut("a.npz", lambda name: np.savez(name, inputs=np.ones((9, 9)))),
    ),
    "archive of nothing": ("npz:a.npz", "must be a NumPy archive", write("a.npz", b"")),
    "archive of pickles": ("npz:a.npz", "it holds object", lambda: np.savez("a.npz", inputs=np.array([Harmful()]))),
    "archive of text": ("npz:a.npz", "inputs must be numbers", lambda: np.savez("a.npz", inputs=np.array([["a"]]))),
    "archive of complex numbers": (
        "npz:a.npz",
        "must be numbers",
        lambda: np.savez("a.npz", inputs=np.ones((2, 2)) * 1j),
    ),
    "archive of records": ("npz:a.npz", "plain numbers", lambda: np.savez("a.npz", inputs=np.zeros(2, "i4,f4"))),
    "archive that declares terabytes": ("npz:a.npz", "bytes, it has 9", archive(npy((TERABYTE, 4), bytes(9)))),
    "archive that lies twice": (
        "npz:a.npz",
        "must fit in half the memory there is",
        archive(npy((2**31, 1)), declared=2**31 + 128),
    ),
    "archive that unpacks to too much": (
        "npz:a.npz",
        "must fit in half the memory there is, 128 MiB, it declares 200 MiB",
        lambda: archive(npy((200 << 20, 1), bytes(200 << 20)))(),
    ),
    "archive with a header without end": ("npz:a.npz", "must be a NumPy archive", lambda: archive(long_header())()),
    "archive of negative size": ("npz:a.npz", "must be a NumPy", archive(npy((-1, 4), bytes(9)))),
    "archive packed in another way": ("npz:a.npz", "plain or deflated", archive(npy((2, 2), bytes(4)), None, 14)),
    "archive of one number": ("npz:a.npz", "at least one seed, as", lambda: np.savez("a.npz", inputs=np.float32(5))),
    "archive with a checksum that is wrong": (
        "npz:a.npz",
        "must be a NumPy archive",
        then(
            archive(npy((2, 2), bytes(4))),
            lambda: Path("a.npz").write_bytes(Path("a.npz").read_bytes().replace(b"\x04", b"\x05", 1)),
        ),
    ),
    "archive with too few labels": (
        "npz:a.npz",
        "labels must be one a seed: 3 inputs, got labels of shape [2]",
        lambda: np.savez("a.npz", inputs=np.ones((3, 2)), labels=np.ones(2)),
    ),
    "archive with a NaN": (
        "npz:a.npz",
        "seed 1 has a NaN",
        lambda: np.savez("a.npz", inputs=np.array([[1.0], [np.nan]])),
    ),
    "array cut": (
        "npy:a.npy",
        "a.npy must be a NumPy array",
        cut("a.npy", lambda name: np.save(name, np.ones((99, 9)))),
    ),
    "array of pickles": ("npy:a.npy", "it holds object", lambda: np.save("a.npy", np.array([Harmful(), 1]))),
    "array that declares terabytes": ("npy:a.npy", "bytes, it has 3", write("a.npy", npy((TERABYTE, 4), bytes(3)))),
    "array with code for a header": ("npy:a.npy", "a.npy must be", write("a.npy", npy("exec('1')", bytes(3)))),
    "array that is not there": ("npy:a.npy", "the data file must exist", lambda: None),
    "array too large for float32": (
        "npy:a.npy",
        "seed 1 has a NaN or an inf",
        lambda: np.save("a.npy", [[1.0], [1e300]]),
    ),
    # idx
    "idx cut": ("idx:a-images", "it has 4: get the file again", write("a-images", idx(2, 2, 2, content=bytes(4)))),
    "idx cut in its header": ("idx:a-images", "must hold 12 bytes", write("a-images", bytes([0, 0, 8, 3, 0]))),
    "idx of nothing": ("idx:a-images", "begins with nothing", write("a-images", b"")),
    "idx of something else": ("idx:a-images", "begins with 89504e47", write("a-images", png_header(2, 2))),
    "idx that goes on": ("idx:a-images", "it has 5", write("a-images", idx(2, 2, content=bytes(5)))),
    "idx that declares terabytes": (
        "idx:a-images",
        "must fit in half the memory",
        write("a-images", gzip.compress(idx(2**31, 2**31, 2**31))),
    ),
    "idx.gz cut": (
        "idx:a-images",
        "a-images must be an idx file",
        cut(
            "a-images",
            lambda name: Path(name).write_bytes(
                gzip.compress(idx(99, 99, content=np.random.default_rng(0).bytes(99 * 99)))
            ),
        ),
    ),
    "idx.gz that ends early": (
        "idx:a-images",
        "5 are missing",
        write("a-images", gzip.compress(idx(3, 3, content=bytes(4)))),
    ),
    "idx.gz without end": (
        "idx:a-images",
        "must end after [2, 2], it goes on",
        lambda: Path("a-images").write_bytes(gzip.compress(idx(2, 2, content=bytes(300 << 20)), 1)),
    ),
    "idx with too few labels": (
        "idx:a-images",
        "labels must be one a seed",
        then(write("a-images", idx(2, 2, content=bytes(4))), write("a-labels", idx(3, content=bytes(3)))),
    ),
    "idx with pictures for labels": (
        "idx:a-images",
        "must hold one label a seed",
        then(write("a-images", idx(2, 2, content=bytes(4))), write("a-labels", idx(2, 2, content=bytes(4)))),
    ),
    "a folder without idx files": ("idx:.", "must hold idx images of the split 'test'", lambda: None),
    # CIFAR
    "batch that runs code": ("cifar:b", "which is not allowed", write("b", pickle.dumps(Harmful()))),
    "batch that hides code": ("cifar:b", "which is not allowed", write("b", batch(extra=Harmful()))),
    "batch of an older pickle that runs code": (
        "cifar:b",
        "not allowed",
        write("b", b"cos\nsystem\n(S'touch harm'\ntR."),
    ),
    "batch that takes a place far off": (
        "cifar:b",
        "b must be a pickled batch",
        write("b", b"\x80\x02}r\xff\xff\xff\x7f."),
    ),
    "batch of a string of terabytes": (
        "cifar:b",
        "b must be a pickled batch",
        write("b", b"\x80\x04\x8e" + struct.pack("<Q", TERABYTE) + b"x."),
    ),
    "batch of an array of terabytes": (
        "cifar:b",
        "b must be a pickled batch",
        write("b", b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(L%dL\ntS'b'\ntR." % TERABYTE),
    ),
    "batch cut": ("cifar:b", "b must be a pickled batch", write("b", batch()[:3000])),
    "batch of a list": ("cifar:b", "a dict, got list", write("b", pickle.dumps([1]))),
    "batch without data": ("cifar:b", "'data' [pictures, 3072] of bytes, got none", write("b", batch(data=None))),
    "batch of another shape": (
        "cifar:b",
        "got [2, 9] uint8",
        write("b", batch(data=np.zeros((2, 9), np.uint8))),
    ),
    "batch of objects": ("cifar:b", "arrays must be of bytes", write("b", batch(data=np.array([[{}]], object)))),
    "batch of floats": ("cifar:b", "arrays must be of bytes", write("b", batch(data=np.zeros((2, 3072))))),
    "batch with names for labels": ("cifar:b", "labels are whole numbers", write("b", batch(labels=["cat", "dog"]))),
    "batch with a number for labels": ("cifar:b", "must be a pickled batch", write("b", batch(labels=5))),
    "batch with too few labels": ("cifar:b", "labels must be one a seed", write("b", batch(labels=[1]))),
    "binary batch cut": ("cifar:b.bin", "records of 3,073 or 3,074 bytes", write("b.bin", bytes(3073 + 9))),
    "binary batch of nothing": ("cifar:b.bin", "records of 3,073", write("b.bin", b"")),
    "a folder without batches": ("cifar:.", "must hold CIFAR batches", lambda: None),
    "a mosaic of another size": (
        "cifar10:.",
        "must be a 3200x3200 mosaic",
        picture("test_batch.webp"),
    ),
    # pictures
    "picture cut": (
        "images:p",
        "1.png must be a picture",
        cut("p/1.png", lambda name: Image.fromarray(PIXELS).save(name), 0.8),
    ),
    "jpeg cut": (
        "images:p",
        "1.jpg must be a picture",
        cut("p/1.jpg", lambda name: Image.fromarray(PIXELS).save(name), 0.9),
    ),
    "picture of text": ("images:p", "1.png must be a picture", write("p/1.png", "hello")),
    "picture of nothing": ("images:p", "1.png must be a picture", write("p/1.png", b"")),
    "picture of ten gigapixels": (
        "images:p",
        "at most 67,108,864 pixels",
        write("p/1.png", png_header(100_000, 100_000)),
    ),
    "picture of a hundred megapixels": (
        "images:p",
        "it is 10,000x10,000",
        write("p/1.png", png_header(10_000, 10_000)),
    ),
    "later picture of ten gigapixels": (
        "images:p",
        "9.png must have at most",
        then(picture("p/1.png"), write("p/9.png", png_header(100_000, 100_000))),
    ),
    "picture of another format": ("images:p", "1.png must be a picture", picture("p/1.png", format="TIFF")),
    "picture of 16 bits": (
        "images:p",
        "must have 8 bits a channel",
        picture("p/1.png", np.zeros((4, 4), np.uint16)),
    ),
    "pictures of two sizes": (
        "images:p",
        "all inputs must have one shape",
        then(picture("p/1.png"), picture("p/2.png", PIXELS[:5])),
    ),
    "picture smaller than the crop": ("images:p?crop=50", "at least crop=50 wide and high", picture("p/1.png")),
    "picture as thin as a thread": (
        "images:p?size=8000",
        "is too large",
        picture("p/1.png", np.zeros((1, 9000, 3), np.uint8)),
    ),
    "pictures beside class folders": (
        "images:p",
        "it has both",
        then(picture("p/1.png"), lambda: Path("p/a").mkdir(), picture("p/a/1.png")),
    ),
    "a folder without pictures": ("images:.", "must hold pictures", lambda: None),
    "a name that no system has": ("csv:" + "x" * 5000, "the data file must exist", lambda: None),
    "a folder for a file": ("csv:.", "the data file must exist, . is a folder", lambda: None),
    "no folder": ("images:nowhere", "the folder of pictures must exist", lambda: None),
    # CSV
    "table of nothing": ("csv:t.csv", "it is empty", write("t.csv", "")),
    "table of an empty line": ("csv:t.csv", "it is empty", write("t.csv", "\n\n")),
    "table of names alone": ("csv:t.csv", "at least one row", write("t.csv", "a,b\n")),
    "table with NaN": (
        "csv:t.csv",
        "line 3: column 'b' must be a finite number, got 'nan'",
        write("t.csv", "a,b\n1,2\n1,nan\n"),
    ),
    "table with infinity": ("csv:t.csv", "column 'a' must be a finite number", write("t.csv", "a,b\n-inf,2\n")),
    "table with a number too large": (
        "csv:t.csv",
        "must be a finite number, got '1e+39'",
        write("t.csv", "a,b\n1e39,2\n"),
    ),
    "table with an empty cell": (
        "csv:t.csv",
        "column 'a' must be a finite number, got 'nothing'",
        write("t.csv", "a,b\n,2\n"),
    ),
    "table with text": (
        "csv:t.csv",
        "line 2: column 'b' must be a finite number, got 'red'",
        write("t.csv", "a,b\n1,red\n"),
    ),
    "table with underscores": ("csv:t.csv", "got '1_0'", write("t.csv", "a,b\n1_0,2\n")),
    "table with a label missing": ("csv:t.csv", "line 2: a row must have a label", write("t.csv", "a,label\n1,\n")),
    "table with a label of NaN": ("csv:t.csv", "the label must be finite", write("t.csv", "a,label\n1,nan\n")),
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
    "table with a name twice": ("csv:t.csv", "name each column once, got 'a' 2 times", write("t.csv", "a,a\n3,4\n")),
    "table with two labels": (
        "csv:t.csv",
        "one column of labels, got ['y', 'label']",
        write("t.csv", "y,label,a\n3,4,5\n"),
    ),
    "table with labels alone": ("csv:t.csv", "must have a column of features", write("t.csv", "label\n3\n")),
    "table of one line without end": (
        "csv:t.csv",
        "lines under 16,777,216",
        lambda: Path("t.csv").write_text("1," * (10 << 20)),
    ),
    # Parquet
    "parquet cut": (
        "parquet:t.parquet",
        "must be a Parquet table",
        then(table(a=[1.0] * 99), lambda: Path("t.parquet").write_bytes(Path("t.parquet").read_bytes()[:200])),
    ),
    "parquet of text": ("parquet:t.parquet", "must be a Parquet table", write("t.parquet", "hello")),
    "parquet with a null": ("parquet:t.parquet", "row 2: column 'a' must have a value", table(a=[1.0, None])),
    "parquet with NaN": ("parquet:t.parquet", "row 2: column 'a' must be a finite", table(a=[1.0, float("nan")])),
    "parquet with a column of text": (
        "parquet:t.parquet",
        "column 'b' must be numbers, it is string",
        table(a=[1], b=["x"]),
    ),
    "parquet with lists": ("parquet:t.parquet", "column 'b' must be numbers", table(a=[1], b=[[1, 2]])),
    "parquet with a label missing": ("parquet:t.parquet", "'y' must have a value", table(a=[1, 2], y=[0, None])),
    "parquet with lists for labels": ("parquet:t.parquet", "labels must be numbers or names", table(a=[1], y=[[1, 2]])),
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
def test_a_hostile_file_gets_one_line(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "_machine", lambda: AVAILABLE)
    spec, message, setup = HOSTILE[name]
    setup()
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as raised:
            read_seeds(read_data(spec))
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1
    assert not Path("harm").exists()
    assert taken < MOST_TAKEN


def test_the_pickle_that_is_refused_would_have_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Harmful()))
    assert Path("harm").exists()


def test_a_table_that_would_fill_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 20))
    table(a=np.zeros(2_000_000))()
    assert Path("t.parquet").stat().st_size < 100_000
    with pytest.raises(DataError, match="must fit in half the disk there is, 5 MiB, it declares 8 MiB"):
        read_data("parquet:t.parquet")
