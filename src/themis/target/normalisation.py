"""The mean and the standard deviation that a model's own configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Statistics = tuple[list[float], list[float]]
"""The mean and the standard deviation of each channel, for inputs in 0..1."""


def own_statistics(model: Any, *, is_local: bool = False) -> Statistics | None:
    """Return the normalisation that the configuration of a model of timm or transformers names; None if it has none.

    transformers stores it with the image processor, which is read from where the model was loaded; `is_local`: only if
    that is on this machine.
    """
    for name in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, name, None)
        values = config if isinstance(config, Mapping) else vars(config) if hasattr(config, "__dict__") else {}
        if values.get("mean") and values.get("std"):
            return [float(value) for value in values["mean"]], [float(value) for value in values["std"]]
    folder = getattr(getattr(model, "config", None), "_name_or_path", None)
    if not folder or type(model).__module__.partition(".")[0] != "transformers":
        return None
    return _of_processor(folder, is_local=is_local)


def _of_processor(folder: str, *, is_local: bool) -> Statistics | None:
    from transformers import AutoImageProcessor  # type: ignore[import-not-found, unused-ignore]

    try:
        processor = AutoImageProcessor.from_pretrained(folder, local_files_only=is_local)
    except (OSError, ValueError):  # the folder has no image processor
        return None
    mean, std = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if not getattr(processor, "do_normalize", True) or mean is None or std is None:
        return None
    return [float(value) for value in mean], [float(value) for value in std]
