"""Weights from a file into a model, without running code."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from themis.errors import DataError, ModelError
from themis.target.ledger import read_ledger, remember
from themis.target.loaders.factory import first_line
from themis.target.loaders.trust import Trust

CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "model", "net")
"""Where training scripts put the state dict into a checkpoint."""
PREFIXES = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before each name."""
BROKEN = (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, ImportError)


def load_weights(module: nn.Module, path: Path, trust: Trust | None = None) -> None:
    """Load a state dict or a checkpoint; every key must find its place. Code in it runs only if it is trusted."""
    state = _unwrap(_read(path, trust or Trust()), path)
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights in {path} must fit the model: {' '.join(str(error).split())}") from error
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]  # older files have none
    if missing or unexpected:
        raise ModelError(
            f"the weights in {path} must fit the model, missing {missing[:3] or 'none'}, "
            f"unexpected {list(unexpected)[:3] or 'none'}: check that they are of this architecture"
        )
    ledger = read_ledger(path)
    if len(ledger):
        remember(module, ledger)


def _read(path: Path, trust: Trust) -> Any:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if is_script(path):
        raise DataError(f"{path} must be a state dict, it is a TorchScript program: give --model {path} alone")
    is_trusted = trust.covers(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=not is_trusted)
    except FileNotFoundError:
        raise DataError(f"the weights file must exist, {path} does not: check the path") from None
    except BROKEN as error:
        is_pickle = isinstance(error, pickle.UnpicklingError)  # torch's own text advises to load it unsafely
        why = "it is damaged, or holds more than tensors" if is_pickle else first_line(error)
        trusting = "" if is_trusted or not is_pickle else f", or give --trust {path} to run the code in it"
        raise DataError(
            f"{path} must be a state dict that torch.load(weights_only=True) reads: {why}; save model.state_dict()"
            f"{trusting}"
        ) from error


def is_script(path: Path) -> bool:
    """Whether a file is a TorchScript program."""
    return any(name.endswith("/constants.pkl") for name in names_in_archive(path))


def names_in_archive(path: Path) -> list[str]:
    """The members of a zip archive; none of what is no such archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError):
        return []


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise DataError(f"the weights file must exist, {path} does not: check the path") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} must be a safetensors file of tensors: {first_line(error)}") from error


def _unwrap(state: Any, path: Path) -> dict[str, Any]:
    """The state dict in what a file holds: itself, a model, or a training checkpoint with it under a known key."""
    if isinstance(state, nn.Module):
        state = state.state_dict()
    if not isinstance(state, dict):
        raise DataError(f"{path} must hold a state dict, got {type(state).__name__}: save model.state_dict()")
    said = []
    for key in CHECKPOINT_KEYS:
        inner = state.get(key)
        if isinstance(inner, nn.Module):
            inner = inner.state_dict()
        if isinstance(inner, dict):
            said.append(f"the weights under {key!r} of a checkpoint were taken")
            state = inner
            break
    for prefix in PREFIXES:
        if state and all(str(key).startswith(prefix) for key in state):
            said.append(f"{prefix!r} was taken off the names")
            state = {str(key).removeprefix(prefix): value for key, value in state.items()}
    if said:
        warnings.warn(f"{path}: {', and '.join(said)}", RuntimeWarning, stacklevel=4)
    return dict(state)
