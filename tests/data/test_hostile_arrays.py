"""Damaged, wrong or malicious arrays and pickles are refused in one line, run no code and take little memory."""

import gzip
import os
import pickle
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hostile import TERABYTE, Harmful, cut, png_header, refused, then, write

from themis.data import files
from themis.data.readers import read_data


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


def batch(**changes):
    made = {"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1], **changes}
    return pickle.dumps({name.encode(): value for name, value in made.items() if value is not None}, 2)


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
    "archive that declares terabytes": ("npz:a.npz", "bytes, but it has 9", archive(npy((TERABYTE, 4), bytes(9)))),
    "archive that lies twice": (
        "npz:a.npz",
        "must fit in half of the available memory",
        archive(npy((2**31, 1)), declared=2**31 + 128),
    ),
    "archive that unpacks to too much": (
        "npz:a.npz",
        "must fit in half of the available memory, 128 MiB, but it declares 200 MiB",
        lambda: archive(npy((200 << 20, 1), bytes(200 << 20)))(),
    ),
    "archive with a header without end": ("npz:a.npz", "must be a NumPy archive", lambda: archive(long_header())()),
    "archive of negative size": ("npz:a.npz", "must be a NumPy", archive(npy((-1, 4), bytes(9)))),
    "archive packed in another way": ("npz:a.npz", "stored or deflated", archive(npy((2, 2), bytes(4)), None, 14)),
    "archive of one number": ("npz:a.npz", "at least one seed and", lambda: np.savez("a.npz", inputs=np.float32(5))),
    "archive with a checksum that is wrong": (
        "npz:a.npz",
        "must be a NumPy archive",
        then(
            archive(npy((2, 2), bytes(4))),
            lambda: Path("a.npz").write_bytes(Path("a.npz").read_bytes().replace(b"\x04", b"\x05", 1)),
        ),
    ),
    "archive with a side of zero": (
        "npz:a.npz",
        "at least one seed and have the shape [seeds, ...], got shape [5, 0]",
        lambda: np.savez("a.npz", inputs=np.ones((5, 0))),
    ),
    "archive with labels of no size": (
        "npz:a.npz",
        "labels must be one per seed",
        lambda: np.savez("a.npz", inputs=np.ones((5, 2)), labels=np.ones((5, 0))),
    ),
    "archive with too few labels": (
        "npz:a.npz",
        "labels must be one per seed: 3 inputs, got shape [2]",
        lambda: np.savez("a.npz", inputs=np.ones((3, 2)), labels=np.ones(2)),
    ),
    "archive with one number for labels": (
        "npz:a.npz",
        "labels must be one per seed: 3 inputs, got shape []",
        lambda: np.savez("a.npz", inputs=np.ones((3, 2)), labels=np.array(1)),
    ),
    "archive with a NaN": (
        "npz:a.npz",
        "seed 1 has a NaN",
        lambda: np.savez("a.npz", inputs=np.array([[1.0], [np.nan]])),
    ),
    "array with a side of zero": (
        "npy:a.npy",
        "got shape [5, 1, 0, 4]",
        lambda: np.save("a.npy", np.ones((5, 1, 0, 4))),
    ),
    "array cut": (
        "npy:a.npy",
        "a.npy must be a NumPy array",
        cut("a.npy", lambda name: np.save(name, np.ones((99, 9)))),
    ),
    "array of pickles": ("npy:a.npy", "it holds object", lambda: np.save("a.npy", np.array([Harmful(), 1]))),
    "array that declares terabytes": ("npy:a.npy", "bytes, but it has 3", write("a.npy", npy((TERABYTE, 4), bytes(3)))),
    "array of more seeds than can be listed": (
        "npy:a.npy",
        "the list of 3,145,728 seeds must fit in half of the available memory, 128 MiB, but it declares 192 MiB",
        then(write("a.npy", npy((3 << 20, 4))), lambda: os.truncate("a.npy", 1 << 30)),
    ),
    "array with code for a header": ("npy:a.npy", "a.npy must be", write("a.npy", npy("exec('1')", bytes(3)))),
    "array that is not there": ("npy:a.npy", "the data file must exist", lambda: None),
    "array too large for float32": (
        "npy:a.npy",
        "seed 1 has a NaN or an inf",
        lambda: np.save("a.npy", [[1.0], [1e300]]),
    ),
    # idx
    "idx cut": ("idx:a-images", "it has 4: download it again", write("a-images", idx(2, 2, 2, content=bytes(4)))),
    "idx cut in its header": ("idx:a-images", "must hold 12 bytes", write("a-images", bytes([0, 0, 8, 3, 0]))),
    "idx of nothing": ("idx:a-images", "begins with nothing", write("a-images", b"")),
    "idx of something else": ("idx:a-images", "begins with 89504e47", write("a-images", png_header(2, 2))),
    "idx that goes on": ("idx:a-images", "it has 5", write("a-images", idx(2, 2, content=bytes(5)))),
    "idx that declares terabytes": (
        "idx:a-images",
        "must fit in half of the available memory",
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
        "must end after an array of shape [2, 2], but it continues",
        lambda: Path("a-images").write_bytes(gzip.compress(idx(2, 2, content=bytes(300 << 20)), 1)),
    ),
    "idx with too few labels": (
        "idx:a-images",
        "labels must be one per seed",
        then(write("a-images", idx(2, 2, content=bytes(4))), write("a-labels", idx(3, content=bytes(3)))),
    ),
    "idx with pictures for labels": (
        "idx:a-images",
        "must hold one label per seed",
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
    "batch with too few labels": ("cifar:b", "labels must be one per seed", write("b", batch(labels=[1]))),
    "binary batch cut": ("cifar:b.bin", "records of 3,073 or 3,074 bytes", write("b.bin", bytes(3073 + 9))),
    "binary batch of nothing": ("cifar:b.bin", "records of 3,073", write("b.bin", b"")),
    "a folder without batches": ("cifar:.", "must hold CIFAR batches", lambda: None),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_array_is_refused_in_one_line(name, tmp_path, monkeypatch):
    spec, message, setup = HOSTILE[name]
    assert message in refused(spec, setup, tmp_path, monkeypatch)


def test_the_pickle_that_is_refused_would_have_run_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Harmful()))
    assert Path("harm").exists()


@pytest.mark.parametrize("spec", ["npz:a.npz", "idx:a-images"])
def test_what_is_unpacked_is_held_once(spec, tmp_path, monkeypatch):
    size = 24 << 20
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_machine", lambda: 3 * size)  # too little for all of it as float32
    np.savez_compressed("a.npz", inputs=np.zeros((size // 256, 256), np.uint8))
    Path("a-images").write_bytes(gzip.compress(idx(size // 256, 256, content=bytes(size)), 1))
    tracemalloc.start()
    try:
        seeds = read_data(spec)
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seeds.shape == (size // 256, 256)
    assert taken < 1.25 * size
