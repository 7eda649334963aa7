"""The environment that a run depends on, recorded so that the run can be repeated."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from themis.compute.native import library
from themis.criteria.criterion import Criterion
from themis.data.seeds import Seeds
from themis.perturb.perturbation import Perturbation
from themis.runs.source import Origin
from themis.settings import Settings
from themis.target.fingerprint import hash_file, hash_seeds
from themis.target.target import AnyTarget
from themis.version import __version__

MKL_BRANCHES = ("OFF", "OFF", "AUTO", "COMPATIBLE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2")
"""The first of the settings that `mkl_cbwr_get` returns; the others are branches for AVX-512."""
MKL_STRICT = 0x10000


def mkl_cbwr() -> str | None:
    """The reproducibility mode that MKL is in, in the words of the variable MKL_CBWR; None if torch has no MKL.

    "OFF": its results depend on where arrays lie in memory. MKL reads the variable when it is first used.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    mkl = ctypes.CDLL(str(library))  # it is loaded; this only looks it up
    if not hasattr(mkl, "mkl_serv_cbwr_get"):
        return None
    setting = mkl.mkl_serv_cbwr_get(-1)
    branch = setting & ~MKL_STRICT
    if not 0 <= branch < 64:
        return None
    name = MKL_BRANCHES[branch] if branch < len(MKL_BRANCHES) else "AVX512"
    return f"{name},STRICT" if setting & MKL_STRICT else name


def describe_environment(device: torch.device | None) -> dict[str, Any]:
    """Return versions, device and thread count; each of them changes the kernels, and so the last bits.

    device: None leaves it out, if there are several that are recorded elsewhere.
    """
    where = {}
    if device is not None:
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu"
        where = {"device": str(device), "device_name": name}
    return {
        "themis": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        **where,
        "threads": torch.get_num_threads(),
        "compiled_fold": library() is not None,
        "mkl_cbwr": mkl_cbwr(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def describe_tested(target: AnyTarget, seeds: Seeds, origin: Origin | None) -> dict[str, Any]:
    """Return hashes of the model, of the data, and of the weights file if there is one."""
    weights = None if origin is None else origin.weights_path()
    return {
        "model_sha256": target.fingerprint(),
        "data_sha256": hash_seeds(seeds),
        "weights_sha256": None if weights is None else hash_file(weights),
    }


def describe_run(
    settings: Settings, origin: Origin | None, perturbation: Perturbation, environment: dict[str, Any]
) -> dict[str, Any]:
    """Return what a run folder records before the first test."""
    return {
        "settings": {name: as_plain_data(value) for name, value in asdict(settings).items()},
        "origin": None if origin is None else origin.as_dict(),
        "perturbation": perturbation.name,
        "perturbation_code": perturbation.code,
        "theta": [theta.as_dict() for theta in perturbation.theta],
        "environment": environment,
    }


def list_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a sentence fragment for each difference between two environments."""
    return [
        f"{name} {_short(then[name])} then, {_short(now.get(name))} now" for name in then if then[name] != now.get(name)
    ]


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run with `n` threads, since their number changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_plain_data(value: Any) -> Any:
    """Return plain data as it is, and for an object a text that identifies it and cannot be mistaken for a name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_plain_data(item) for item in value]
    return f"<{value!r}>" if isinstance(value, Criterion) else type(value).__name__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) != 64 else f"{text[:12]}..."
