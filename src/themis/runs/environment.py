"""What a run depended on, for whoever must repeat it."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
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


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and thread count; kernels, and so last bits, change with each of them."""
    return {
        "themis": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "compiled_fold": library() is not None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def describe_tested(target: AnyTarget, seeds: Seeds, origin: Origin | None) -> dict[str, Any]:
    """Hashes of the model and the data; and of the weights file, where there is one."""
    weights = None if origin is None else origin.weights_path()
    return {
        "model_sha256": target.fingerprint(),
        "data_sha256": hash_seeds(seeds),
        "weights_sha256": None if weights is None else hash_file(weights),
    }


def describe_run(
    settings: Settings, origin: Origin | None, perturbation: Perturbation, environment: dict[str, Any]
) -> dict[str, Any]:
    """What a run folder records before the first test."""
    return {
        "settings": {name: named(value) for name, value in asdict(settings).items()},
        "origin": None if origin is None else origin.as_dict(),
        "perturbation": perturbation.name,
        "perturbation_code": perturbation.code,
        "theta": [asdict(each) for each in perturbation.theta],
        "environment": environment,
    }


def list_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two environments, in words."""
    return [
        f"{name} {_short(then[name])} then, {_short(now.get(name))} now" for name in then if then[name] != now.get(name)
    ]


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run with so many threads: their number changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def named(value: Any) -> Any:
    """Plain data as it is; of an object what tells it from others, which no name in words looks like."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [named(each) for each in value]
    return f"<{value!r}>" if isinstance(value, Criterion) else type(value).__name__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) != 64 else f"{text[:12]}..."
