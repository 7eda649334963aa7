"""Triton, which compiles most GPU kernels, whether a kernel works on a device, and the kernels that draw noise.

Without a GPU the tests run kernels of Triton on the CPU, in its interpreter (`TRITON_INTERPRET=1`).
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any

import torch

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


UNIFORM_CODE = """
template <typename T> T themis_uniform(T counter, T low, T high) {
    unsigned int x = (unsigned int)counter * 0x9E3779B9u + (unsigned int)low;
    x = (x ^ (x >> 16)) * 0x21F0AAADu + (unsigned int)high;
    x = (x ^ (x >> 15)) * 0xD35A2997u;
    x ^= x >> 15;
    float u = ((float)(int)(x >> 8) + 0.5f) * 5.9604644775390625e-8f;
    return __float_as_int(u < 1.0f ? u : 0.999999940395355224609375f);
}
"""
PAIRS_CODE = """
template <typename T> void themis_pairs(T first, T second, T& even, T& odd) {
    T radius = sqrtf(-2.0f * logf(first)), angle = second * 6.283185307179586f;
    even = radius * cosf(angle);
    odd = radius * sinf(angle);
}
"""
Kernel = Callable[..., Any]
"""One pass over memory instead of a dozen. Torch's jiterator compiles it on first use, with the compiler of the driver;
if it is not available, torch computes the same numbers step by step."""


@cache
def uniform_kernel(device: torch.device) -> Kernel | None:
    """Kernel from a counter and the halves of a noise seed, int32, to uniform float32 in (0, 1), as int32 bits."""
    return _compile(device, UNIFORM_CODE, 1)


@cache
def pairs_kernel(device: torch.device) -> Kernel | None:
    """Kernel from pairs of uniform numbers, float32, to pairs of normal ones."""
    return _compile(device, PAIRS_CODE, 2)


def _compile(device: torch.device, code: str, n_outputs: int) -> Kernel | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        from torch.cuda import jiterator

        kernel: Kernel
        if n_outputs == 1:
            kernel = jiterator._create_jit_fn(code)
        else:
            kernel = jiterator._create_multi_output_jit_fn(code, n_outputs)
        example = torch.ones(1, dtype=torch.int32 if n_outputs == 1 else torch.float32, device=device)
        kernel(*(example,) * (3 if n_outputs == 1 else 2))
    except Exception:  # whatever prevents it: without the kernel the results are the same, only slower
        return None
    return kernel
