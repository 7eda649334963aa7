"""Fuzzing: mutations of files and values, and commands that must either work or be refused in one line."""

import faulthandler
import json
import math
import os
import signal
import struct
import sys
from contextlib import contextmanager
from copy import deepcopy
from random import Random

from themis.cli import main

MAX_SECONDS = 60
"""Time that a command may take."""
VALUES = [
    None,
    True,
    -1,
    0,
    1,
    3,
    7.5,
    -0.25,
    2**31,
    2**62,
    -(2**63),
    10**30,
    10**400,
    1e308,
    -1e308,
    1e-320,
    "",
    "x",
    "uniform",
    "1e5",
    "../../etc/passwd",
    "=1+1",
    "\x1b[2J\x07\u202e",
    "line\nline",
    "\ud800",
    "a" * 5000,
    [],
    {},
    [[]],
    [1, "a", None],
    {"name": 1},
    [0.5, 0.5],
]
"""Values that replace a value in plain data."""
CELLS = [
    None,
    -1,
    0,
    1,
    2**31 + 1,
    2**62,
    -(2**63),
    0.5,
    1e308,
    -1e308,
    math.inf,
    -math.inf,
    "",
    "x",
    "1",
    "[]",
    "{}",
    "null",
    "[1, 2]",
    "[NaN]",
    "\x1b]0;title\x07",
    "=cmd|' /C calc'!A0",
    "../../secret.safetensors",
    "a" * 3000,
    b"",
    b"\xff\xfe\x00",
]
"""Values that replace a cell of a database."""


class Hang(BaseException):
    """A command took too long."""


@contextmanager
def time_limit(seconds=MAX_SECONDS):
    """Raise `Hang` after some seconds of work, or ten times as many of waiting; end the process if that does not help.

    Work is the time on the processor, so that a loaded machine hangs no sooner than an idle one.
    """

    def stop(number, frame):
        raise Hang(f"longer than {seconds} seconds")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    faulthandler.dump_traceback_later(20 * seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def check_command(words, capsys, mutation):
    """Run a command; it must work, or be refused in one line with exit code 2 or 3. Returns the exit code."""
    capsys.readouterr()
    try:
        with time_limit():
            code = main([str(word) for word in words])
    except Hang as hang:
        raise AssertionError(f"{mutation}: themis {' '.join(map(str, words))} took {hang}") from hang
    out, err = capsys.readouterr()
    story = f"{mutation}: themis {' '.join(map(str, words))} exited with {code}\n{err[-2000:]}"
    assert code in (0, 1, 2, 3), story
    assert "please report it" not in err, story
    assert "Traceback" not in err, story
    assert "\x1b" not in out + err, story
    if code > 1:
        assert err.strip(), story
        assert all(line.startswith("themis ") for line in err.splitlines()), story
    return code


def mutate_plain(value, rng: Random):
    """A copy of plain data with one change; returns it and the change in words."""
    value = deepcopy(value)
    paths = list(_paths(value))
    if not paths:
        return VALUES[rng.randrange(len(VALUES))], "replaced all"
    path = paths[rng.randrange(len(paths))]
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    key, kind = path[-1], rng.choice(["replace", "replace", "replace", "remove", "wrap", "nest", "copy"])
    if kind == "remove":
        del parent[key]
    elif kind == "wrap":
        parent[key] = [parent[key]]
    elif kind == "nest":
        for _ in range(rng.choice([2, 60, 400])):
            parent[key] = [parent[key]]
    elif kind == "copy":
        if isinstance(parent, list):
            parent.append(deepcopy(parent[key]))
        else:
            parent[f"{key}2"] = deepcopy(parent[key])
    else:
        old = parent[key]
        if isinstance(old, int | float) and not isinstance(old, bool) and rng.random() < 0.5:
            parent[key] = rng.choice([-old, old * 10, old + 1, old / 3, old * 1e9, 0])
        else:
            parent[key] = rng.choice(VALUES)
        kind = f"replaced {old!r:.40} by {parent[key]!r:.40}"
    return value, f"{kind} at {'/'.join(map(str, path))}"


def _paths(value, prefix=()):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*prefix, key)
        yield from _paths(item, (*prefix, key))


def mutate_bytes(content: bytes, rng: Random):
    """Content with one change; returns it and the change in words."""
    kind, n = rng.choice(["cut", "flip", "flip", "zero", "empty", "append", "repeat", "insert", "swap"]), len(content)
    at = rng.randrange(n) if n else 0
    if kind == "cut":
        return content[:at], f"cut at {at}"
    if kind == "flip":
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 4, 64])):
            if changed:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed), "flipped bits"
    if kind == "zero":
        stop = min(n, at + rng.choice([1, 8, 512]))
        return content[:at] + bytes(stop - at) + content[stop:], f"zeros from {at} to {stop}"
    if kind == "empty":
        return b"", "empty"
    if kind == "append":
        return content + rng.randbytes(rng.choice([1, 100])), "appended bytes"
    if kind == "repeat":
        return content + content, "repeated"
    if kind == "insert":
        extra = rng.choice([b"\xff" * 8, b"[" * 3000, b"9" * 5000, b"\x1b[31m", b"\0", struct.pack("<Q", 2**63 - 1)])
        return content[:at] + extra + content[at:], f"inserted {extra[:8]!r} at {at}"
    half = n // 2
    return content[half:] + content[:half], "swapped halves"


def mutate_place(path, rng: Random):
    """Put something else in the place of a file; returns the change in words."""
    kind = rng.choice(["pipe", "folder", "device", "dangling link", "loop", "missing", "link", "socket"])
    content = path.read_bytes()
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "link":
        other = path.with_name(f"{path.name}.other")
        other.write_bytes(content)
        path.symlink_to(other.name)
    elif kind == "socket":
        import socket

        where = os.getcwd()
        os.chdir(path.parent)  # the path of a socket must be short
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
        finally:
            os.chdir(where)
    return kind


def dump_json(value) -> str:
    """JSON of mutated data, which may have texts that are not valid Unicode."""
    return json.dumps(value)
