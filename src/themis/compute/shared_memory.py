"""Memory that processes of one machine share. It has no file, and is freed with the last of them, however they end."""

from __future__ import annotations

import errno
import mmap
import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from weakref import finalize

import torch
from torch import Tensor

ALIGNMENT = 64
MADV_POPULATE_READ = 22
"""From Linux's mman.h; the module `mmap` does not have it."""


def can_share() -> bool:
    """Whether processes can share memory: on Linux, and on a processor that shows them stores in their order."""
    return hasattr(os, "memfd_create") and platform.machine() == "x86_64"


class SharedMemory:
    """The memory of this name, zeros at first; every process must take the same tensors from it, in the same order."""

    def __init__(self, name: str, n_bytes: int) -> None:
        with _locked(name):
            file = find_memory(name)
            if file is None:
                file = os.memfd_create(name)
                os.truncate(file, n_bytes)  # pages that nobody writes to take no memory
        finalize(self, os.close, file)  # it stays open, so that others find it
        self._map = mmap.mmap(file, n_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._n_taken = 0

    @staticmethod
    def size_of(*n_bytes: int) -> int:
        """The bytes that tensors of these sizes take."""
        return sum(-(-n // ALIGNMENT) * ALIGNMENT for n in n_bytes)

    def populate(self) -> None:
        """Map what others have written at once: page by page, when it is first read, takes several times as long."""
        with suppress(OSError):  # Linux can since 5.14
            self._map.madvise(MADV_POPULATE_READ)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor."""
        first, n_bytes = self._n_taken, prod(shape) * dtype.itemsize
        self._n_taken += self.size_of(n_bytes)
        return self._bytes[first : first + n_bytes].view(dtype).view(shape)


def find_memory(name: str) -> int | None:
    """Open the memory of this name if another process has it."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):  # the process has ended, or is not ours
            for link in folder.iterdir():
                if os.readlink(link) == f"/memfd:{name} (deleted)":
                    return os.open(link, os.O_RDWR)
    return None


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Let one process at a time into this block: the one that has a socket of this name, which needs no file either."""
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0{name}")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.01)
        yield
