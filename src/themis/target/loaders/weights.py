"""Loading weights from a file without running code, and the files whose code the user allows to run.

Weights, ONNX and TorchScript files are read without running Python code. Reading a pickled model or a torch.export
program runs the code in it, so these are refused unless the user trusts exactly that file. A run records the file with
its hash, so that a different file in its place is refused again.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from themis.errors import DataError, ModelError, first_line, warn
from themis.target.fingerprint import hash_file
from themis.target.ledger import read_ledger, remember
from themis.user_code import make_importable

HASH_MARK = "@sha256:"


@dataclass(frozen=True)
class Trust:
    """Trusted files, each as `FILE` or `FILE@sha256:HASH`; relative paths start at the working directory."""

    files: tuple[str, ...] = ()

    @staticmethod
    def of(files: Sequence[str] | None) -> Trust:
        return Trust(tuple(files or ()))

    def covers(self, path: Path) -> bool:
        """Return whether the user trusts this file; raise if it has changed since."""
        for file in self.files:
            name, _, expected = file.partition(HASH_MARK)
            if os.path.realpath(name) == os.path.realpath(path):
                if expected and os.path.isfile(path) and hash_file(path) != expected:
                    raise ModelError(
                        f"{path} must be as it was trusted, but has changed: inspect it, and pass --trust {name} again"
                    )
                return True
        return False

    def require(self, path: Path, kind: str, remedy: str) -> None:
        """Refuse a file that is not trusted; kind: what it is and why that matters."""
        if not self.covers(path):
            raise DataError(
                f"{path} must be trusted, but it is {kind}: pass --trust {path} if you know it, or {remedy}"
            )

    def as_list(self, folder: Path) -> list[str]:
        """Return each file with its hash, for a run to record."""
        plain = {file for file in self.files if HASH_MARK not in file and os.path.isfile(folder / file)}
        return [f"{file}{HASH_MARK}{hash_file(folder / file)}" if file in plain else file for file in self.files]


CHECKPOINT_KEYS = ("state_dict", "model_state_dict", "model", "net")
"""Keys under which training scripts store the state dict in a checkpoint."""
MAX_SHOWN_REASON = 300
"""Characters that are shown of torch's message, which lists all weights with other shapes."""
USUAL_ATTRIBUTES = ("model.", "net.", "backbone.", "network.")
"""Usual prefixes of the model itself in a training module, such as one of Lightning."""


def load_weights(module: nn.Module, path: Path, trust: Trust | None = None) -> None:
    """Load a state dict or a checkpoint, in which every key must match. Code in the file runs only if it is trusted."""
    state = _take_part(_unwrap(_read(path, trust or Trust()), path), module, path)
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = shorten(str(error), MAX_SHOWN_REASON, placeholder=" ...")
        raise ModelError(
            f"the weights in {path} must match the model: {reason}; build it as it was when they were saved"
        ) from error
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]  # missing in older files
    if missing or unexpected:
        raise ModelError(
            f"the weights in {path} must match the model, missing {missing[:3] or 'none'}, "
            f"unexpected {list(unexpected)[:3] or 'none'}: check that they belong to this architecture"
        )
    ledger = read_ledger(path)
    if len(ledger):
        remember(module, ledger)


def _take_part(state: dict[str, Any], module: nn.Module, path: Path) -> dict[str, Any]:
    """Return the weights of the model itself if their names have a prefix.

    DataParallel and torch.compile add a prefix, and a larger module, such as one of Lightning, may have other weights.
    """
    names = [name for name in module.state_dict() if not name.endswith("num_batches_tracked")]
    if not names or all(name in state for name in names):
        return state
    ends = [str(key).removesuffix(names[0]) for key in state if str(key).endswith(f".{names[0]}")]
    prefixes = [prefix for prefix in ends if all(f"{prefix}{name}" in state for name in names)]
    chosen = next((prefix for prefix in (*USUAL_ATTRIBUTES, *prefixes[:1]) if prefix in prefixes), None)
    if chosen is None:
        return state
    if len(prefixes) > 1 and chosen not in USUAL_ATTRIBUTES:
        raise ModelError(
            f"the weights in {path} must hold the model once, but it is there under {' and '.join(map(repr, prefixes))}"
            ": save the state dict of the one to test"
        )
    others = [str(key) for key in state if not str(key).startswith(chosen)]
    left_out = f", and left out {len(others)} weights of other parts, such as {others[0]!r}" if others else ""
    warn(f"{path}: removed {chosen!r} from the names{left_out}")
    return {str(key).removeprefix(chosen): value for key, value in state.items() if str(key).startswith(chosen)}


def _read(path: Path, trust: Trust) -> Any:
    if not os.path.isfile(path):
        raise DataError(f"the weights file must exist, but {path} is not a file: check the path")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if is_script(path):
        raise DataError(f"{path} must be a state dict, but it is a TorchScript program: pass --model {path} alone")
    is_trusted = trust.covers(path)
    if is_trusted:
        make_importable()  # a pickle names the classes of its objects
    try:
        return torch.load(path, map_location="cpu", weights_only=not is_trusted)
    except Exception as error:  # torch.load raises all kinds on a file that it cannot read
        is_pickle = isinstance(error, pickle.UnpicklingError)  # torch's own message advises loading it unsafely
        reason = "it is damaged, or holds more than tensors" if is_pickle else first_line(error)
        or_trust = "" if is_trusted or not is_pickle else f", or pass --trust {path} to run the code in it"
        raise DataError(
            f"{path} must be a state dict that torch.load(weights_only=True) can read: {reason}; save "
            f"model.state_dict(){or_trust}"
        ) from error


def is_script(path: Path) -> bool:
    """Return whether a file is a TorchScript program."""
    return any(name.rpartition("/")[2] == "constants.pkl" for name in names_in_archive(path))


def names_in_archive(path: Path) -> list[str]:
    """Return the members of a zip archive; empty if the file is not one.

    Both zip readers are used, because a forged archive can show each of them different members.
    """
    names: list[str] = []
    with suppress(zipfile.BadZipFile, OSError, ValueError), zipfile.ZipFile(path) as archive:
        names += archive.namelist()
    try:
        names += torch._C.PyTorchFileReader(str(path)).get_all_records()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be an archive with legible names, but it is damaged: restore it") from error
    except RuntimeError:  # not an archive
        pass
    return names


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise DataError(f"{path} must be a safetensors file of tensors: {first_line(error)}") from error


def _unwrap(state: Any, path: Path) -> dict[str, Any]:
    """Return the state dict in the content of a file: a state dict, a model, or a checkpoint with one of them."""
    if isinstance(state, nn.Module):
        state = state.state_dict()
    if not isinstance(state, dict):
        raise DataError(f"{path} must hold a state dict, got {type(state).__name__}: save model.state_dict()")
    for key in CHECKPOINT_KEYS:
        inner = state.get(key)
        if isinstance(inner, nn.Module):
            inner = inner.state_dict()
        if isinstance(inner, dict):
            warn(f"{path}: loaded the weights under {key!r} of a checkpoint")
            return dict(inner)
    return dict(state)
