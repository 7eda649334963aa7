"""Damaged, wrong or malicious files, and the message when they are read."""

import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest

from themis import DataError
from themis.data import files, read_seeds
from themis.data.readers import read_data

TERABYTE = 1 << 40
AVAILABLE = 256 << 20
MOST_TAKEN = 64 << 20


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


def png_header(width, height):
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    chunks = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in (body, data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def refused(spec, setup, tmp_path, monkeypatch):
    """The message when the data is read; checks that no code ran and little memory was taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "_machine", lambda: AVAILABLE)
    setup()
    tracemalloc.start()
    try:
        with pytest.raises(DataError) as raised:
            read_seeds(read_data(spec))
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(raised.value).splitlines()) == 1
    assert not Path("harm").exists()
    assert taken < MOST_TAKEN
    return str(raised.value)
