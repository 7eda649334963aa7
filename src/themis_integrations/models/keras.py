"""Keras 3 models, which are PyTorch modules with the torch backend."""

import os
from pathlib import Path
from typing import Any

from themis.errors import DataError, UsageError, first_line
from themis.target.loaders.factory import import_package
from themis.target.loaders.weights import Trust
from themis.user_code import make_importable


def load_keras(path: Path, trust: Trust) -> Any:
    """Load a Keras 3 model with the torch backend, which makes it an nn.Module."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = import_package("keras")
    if keras.backend.backend() != "torch":
        raise UsageError(f"Keras must run on torch, but runs on {keras.backend.backend()}: set KERAS_BACKEND=torch")
    is_safe = not trust.covers(path)
    if is_safe and path.suffix.lower() != ".keras":
        trust.require(path, "an older Keras file, and reading it may run code in it", "save it as .keras")
    if not is_safe:
        make_importable()
    try:
        return keras.saving.load_model(path, safe_mode=is_safe)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise DataError(f"{path} must be a Keras model that loads without running code: {first_line(error)}") from error
