"""Triton, which compiles most GPU kernels, and whether a kernel works on a device.

Without a GPU the tests run these kernels on the CPU, in Triton's interpreter (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

triton: Any = None
tl: Any = None
if torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1":  # importing it takes a while
    with suppress(Exception):  # not installed, or not usable on this machine
        triton, tl = import_module("triton"), import_module("triton.language")


def works_on(device: torch.device, check: Callable[[], bool]) -> bool:
    """Whether a kernel compiles on `device` and `check`, which compares its results with those of torch, passes."""
    if triton is None or device.type != "cuda":
        return False
    try:
        return check()
    except Exception:  # for whatever reason it cannot be compiled: torch gives the same results, more slowly
        return False


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Within it, kernels are launched on the GPU of `tensor`, if it is on one."""
    return torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]
