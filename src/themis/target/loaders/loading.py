"""Loading a model: `module:factory`, a file by its ending, or `package:NAME`."""

from __future__ import annotations

import os
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from themis.errors import DataError, MissingExtraError, ModelError, UsageError
from themis.target.fingerprint import hash_file
from themis.target.loaders.factory import Call, call_factory, first_line, read_call
from themis.target.loaders.trust import Trust
from themis.target.loaders.weights import BROKEN, is_script, names_in_archive

REACHES_OUT = re.compile(
    rb"\b(from_file|save|load_tensor)\b"
    rb"|\bops\s*\.\s*(?!(aten|prim|prims|quantized|_quantized|torchvision|mkldnn|mkldnn_prepacked|prepacked|onednn)\b)"
)
"""What TorchScript code must not name: operators that read and write files, and operators of other libraries."""


class Loaded(NamedTuple):
    """A model as it was loaded, and what tells its program from others: the hash of its file."""

    model: Any
    version: str = ""


def load_model(spec: str, trust: Trust, *, has_weights: bool = False) -> Loaded:
    """The model that `--model` names; with weights of the user's own none are downloaded."""
    kind, _, name = spec.partition(":")
    if kind in PACKAGES:
        if not name:
            raise UsageError(f"--model {spec!r} must name a model, as {kind}:NAME")
        return PACKAGES[kind](name, trust, has_weights)
    if not is_file(spec):
        return Loaded(call_factory(spec, "model"))
    path = Path(spec)
    if not path.is_file():
        raise DataError(f"the model file must exist, {path} does not: check the path")
    model = FILES[path.suffix.lower()](path, trust)
    return Loaded(model, getattr(model, "version", None) or hash_file(path))


def is_file(spec: str) -> bool:
    """Whether `--model` names a file: by its ending."""
    return Path(spec).suffix.lower() in FILES


def load_torch_file(path: Path, trust: Trust) -> nn.Module:
    """A TorchScript or torch.export program, or a pickled model; what it is shows in the file."""
    if is_script(path):
        return _load_script(path, trust)
    if path.suffix.lower() == ".pt2" or any(name.endswith("archive_format") for name in names_in_archive(path)):
        return _load_exported(path, trust)
    return _load_pickle(path, trust)


def load_onnx(path: Path, trust: Trust) -> Any:
    from themis.target.loaders.onnx import OnnxModel

    return OnnxModel(path)


def load_keras(path: Path, trust: Trust) -> nn.Module:
    """A Keras 3 model on its torch backend, which is an nn.Module."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = _import("keras", "keras")
    if keras.backend.backend() != "torch":
        raise UsageError(f"Keras must run on torch, its backend is {keras.backend.backend()}: set KERAS_BACKEND=torch")
    is_safe = not trust.covers(path)
    if is_safe and path.suffix.lower() != ".keras":
        trust.require(path, "an older Keras file, whose reader may run code in it", "save it as .keras")
    try:
        return _module(keras.saving.load_model(path, safe_mode=is_safe), path)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise DataError(f"{path} must be a Keras model that loads without running code: {first_line(error)}") from error


def _load_script(path: Path, trust: Trust) -> nn.Module:
    """TorchScript is code too, in a language of its own that reaches no Python; what reaches files is refused."""
    if not trust.covers(path):
        with zipfile.ZipFile(path) as archive:
            for each in archive.infolist():
                name = each.filename.lower()
                if name.endswith("model.json") or ("/code/" in name and REACHES_OUT.search(archive.read(each))):
                    trust.require(path, "TorchScript that may read and write files", "use a program that does not")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            module: nn.Module = torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError, ValueError) as error:
        raise DataError(f"{path} must be a TorchScript program that loads: {first_line(error)}") from error
    return module


def _load_exported(path: Path, trust: Trust) -> nn.Module:
    trust.require(path, "a torch.export program, whose reader runs code in it", "save it as TorchScript or ONNX")
    import torch.export

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path).module()
    except Exception as error:  # whatever its code does
        raise DataError(f"{path} must be a torch.export program that loads: {first_line(error)}") from error


def _load_pickle(path: Path, trust: Trust) -> nn.Module:
    if not trust.covers(path):
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except BROKEN as error:
            raise DataError(
                f"{path} must be a model that is read without running code, it is a pickled one, damaged, or something "
                f"else: save it as TorchScript or ONNX, or give --trust {path} if you know it"
            ) from error
        raise DataError(
            f"{path} must be a model, it holds {'weights' if isinstance(found, dict) else type(found).__name__}: "
            f"give --model module:factory and --weights {path}"
        )
    try:
        return _module(torch.load(path, map_location="cpu", weights_only=False), path)
    except ModelError:
        raise
    except Exception as error:  # whatever its code does
        raise DataError(f"{path} must be a pickled model that loads: {first_line(error)}") from error


def _torchvision(name: str, trust: Trust, has_weights: bool) -> Loaded:
    call = read_call(name, "model")
    models = _import("torchvision.models", "torchvision")
    return _named(call, models.get_model, {"weights": None if has_weights else "DEFAULT"})


def _timm(name: str, trust: Trust, has_weights: bool) -> Loaded:
    call = read_call(name, "model")
    return _named(call, _import("timm", "timm").create_model, {"pretrained": not has_weights})


def _hugging_face(name: str, trust: Trust, has_weights: bool) -> Loaded:
    call = read_call(name, "model")
    return _named(call, _import("transformers", "transformers").AutoModelForImageClassification.from_pretrained, {})


def _keras(name: str, trust: Trust, has_weights: bool) -> Loaded:
    path = Path(name)
    if not path.is_file():
        raise DataError(f"the model file must exist, {path} does not: check the path")
    return Loaded(load_keras(path, trust), hash_file(path))


def _named(call: Call, make: Callable[..., Any], defaults: dict[str, Any]) -> Loaded:
    try:
        return Loaded(make(call.name, *call.args, **{**defaults, **call.kwargs}))
    except Exception as error:  # an unknown name, no network, a version that does not fit
        raise ModelError(f"--model: {call.name} raised {type(error).__name__}: {first_line(error)}") from error


def _import(name: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"this model needs {package}: pip install {package}") from error


def _module(found: Any, path: Path) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise ModelError(f"{path} must hold an nn.Module, got {type(found).__name__}: save the model itself")
    return found


FILES: dict[str, Callable[[Path, Trust], Any]] = {
    ".pt": load_torch_file,
    ".pth": load_torch_file,
    ".ts": load_torch_file,
    ".pt2": load_torch_file,
    ".onnx": load_onnx,
    ".keras": load_keras,
}
PACKAGES: dict[str, Callable[[str, Trust, bool], Loaded]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _hugging_face,
    "keras": _keras,
}
