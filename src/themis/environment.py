"""What a run depended on, for whoever must repeat it."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from themis.measure.native import library
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
