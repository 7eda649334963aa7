"""How much memory can still be taken, and refusing what would not fit before it is read."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from themis.errors import DataError

UNKNOWN = 8 << 30
"""Taken for available where the system does not say."""


def available_bytes() -> int:
    """Memory that can still be taken: the machine's, the container's limit and the process's own."""
    return max(0, min(_machine(), _container(), _process()))


def check_room(n_bytes: int, what: str) -> None:
    """Refuse `what`, which declares to take so much memory, where that is over half of what there is."""
    _check(n_bytes, available_bytes() // 2, what, "half the memory there is")


def check_disk_room(n_bytes: int, what: str) -> None:
    """The same of the folder for temporary files."""
    _check(n_bytes, shutil.disk_usage(tempfile.gettempdir()).free // 2, what, "half the disk there is")


def _check(n_bytes: int, room: int, what: str, of: str) -> None:
    if n_bytes > room:
        raise DataError(
            f"{what} must fit in {of}, {_size(room)}, it declares {_size(n_bytes)}: check the file, or split it"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def _machine() -> int:
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        pass  # another system than Linux
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, AttributeError, ValueError):
        return UNKNOWN


def _container() -> int:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(name).read_text())
        except (OSError, ValueError):
            continue  # no container, or "max"
    return sys.maxsize


def _process() -> int:
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return sys.maxsize
        return limit - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError, ValueError):
        return sys.maxsize
