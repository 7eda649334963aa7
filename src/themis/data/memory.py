"""How much memory is available, and refusing data that would not fit before it is read."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from themis.errors import DataError

FALLBACK_BYTES = 8 << 30
"""Assumed to be available if the system does not tell."""


def available_bytes() -> int:
    """Available memory: the least of the machine's, the container's limit and the process's limit."""
    return max(0, min(_machine(), _container(), _process()))


def check_memory(n_bytes: int, subject: str) -> None:
    """Raise an error if `subject` declares to need more than half of the available memory."""
    _check(n_bytes, available_bytes() // 2, subject, "half of the available memory")


def check_disk(n_bytes: int, subject: str) -> None:
    """Raise an error if `subject` declares to need more than half of the free disk space for temporary files."""
    _check(n_bytes, shutil.disk_usage(tempfile.gettempdir()).free // 2, subject, "half of the free disk space")


def _check(n_bytes: int, limit: int, subject: str, limit_name: str) -> None:
    if n_bytes > limit:
        raise DataError(
            f"{subject} must fit in {limit_name}, {_size(limit)}, but it declares {_size(n_bytes)}: check the file, or "
            "split it"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def _machine() -> int:
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) << 10
    except (OSError, IndexError, ValueError):
        pass  # not Linux
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, AttributeError, ValueError):
        return FALLBACK_BYTES


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
