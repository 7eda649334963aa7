"""Load a model from `module:factory`, from a file by its suffix, or from `package:NAME`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from themis.errors import DataError, MissingExtraError, ModelError, UsageError, first_line
from themis.plugins import Extensible
from themis.target.fingerprint import hash_file
from themis.target.loaders.factory import Call, call_factory, read_call
from themis.target.loaders.script import load_script
from themis.target.loaders.trust import Trust
from themis.target.loaders.weights import LOAD_ERRORS, is_script, names_in_archive
from themis.target.traits import Statistics, own_statistics
from themis.user_code import make_importable


class LoadedModel(NamedTuple):
    """A model, the hash of the file it was loaded from, and the normalisation that its package names for it."""

    model: Any
    version: str = ""
    statistics: Statistics | None = None


def load_model(spec: str, trust: Trust, *, has_weights: bool = False) -> LoadedModel:
    """Return the model that `--model` names; if the user has weights, none are downloaded."""
    kind, _, name = spec.partition(":")
    if kind in PACKAGES:
        if not name:
            raise UsageError(f"--model {spec!r} must name a model: write {kind}:NAME")
        return PACKAGES[kind](name, trust, has_weights)
    if kind in LOADERS:
        return LoadedModel(LOADERS[kind](name))
    if not is_file(spec):
        _refuse_file(Path(spec))
        return LoadedModel(call_factory(spec, "model", PACKAGES))
    path = Path(spec)
    if not os.path.isfile(path):
        raise DataError(f"the model file must exist, but {path} does not: check the path")
    model = FILES[path.suffix.lower()](path, trust)
    return LoadedModel(model, getattr(model, "version", None) or hash_file(path))


def collection() -> Any:
    """The models that `--zoo` names, with their data and weights: the loader `zoo`."""
    return LOADERS["zoo"]


def is_file(spec: str) -> bool:
    """Return whether `--model` names a file, judged by its suffix."""
    return Path(spec).suffix.lower() in FILES


def _refuse_file(path: Path) -> None:
    """Refuse a file of another kind, unless it is a module."""
    if not os.path.isfile(path) or path.suffix == ".py":
        return
    if path.suffix in (".safetensors", ".ckpt"):
        raise _no_model(path, "weights, not the class of the model")
    raise UsageError(
        f"--model must be module:factory or a file that ends in {', '.join(FILES)}, got {str(path)!r}: load it in a "
        "function of your own, such as make_net in mymodels.py, and write mymodels:make_net"
    )


def _no_model(path: Path, content: str) -> DataError:
    return DataError(
        f"{path} must be a model, but it holds {content}: pass --model module:factory, which makes the "
        f"model, and --weights {path}"
    )


def load_torch_file(path: Path, trust: Trust) -> nn.Module:
    """Load a TorchScript program, a torch.export program or a pickled model; the content tells which it is."""
    if is_script(path):
        return load_script(path, trust)
    if path.suffix.lower() == ".pt2" or any(name.endswith("archive_format") for name in names_in_archive(path)):
        return _load_exported(path, trust)
    return _load_pickle(path, trust)


def load_onnx(path: Path, trust: Trust) -> Any:
    from themis.target.loaders.onnx import OnnxModel

    return OnnxModel(path)


def load_keras(path: Path, trust: Trust) -> nn.Module:
    """Load a Keras 3 model with the torch backend, which makes it an nn.Module."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras = _import("keras", "keras")
    if keras.backend.backend() != "torch":
        raise UsageError(
            f"Keras must run on torch, but its backend is {keras.backend.backend()}: set KERAS_BACKEND=torch"
        )
    is_safe = not trust.covers(path)
    if is_safe and path.suffix.lower() != ".keras":
        trust.require(path, "an older Keras file, and reading it may run code in it", "save it as .keras")
    if not is_safe:
        make_importable()
    try:
        return _module(keras.saving.load_model(path, safe_mode=is_safe), path)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise DataError(f"{path} must be a Keras model that loads without running code: {first_line(error)}") from error


def _load_exported(path: Path, trust: Trust) -> nn.Module:
    trust.require(path, "a torch.export program, and reading it runs code in it", "save it as TorchScript or ONNX")
    import torch.export

    make_importable()
    log = logging.getLogger("torch.export")
    was_disabled, log.disabled = log.disabled, True  # it would print a traceback above the error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path).module()
    except Exception as error:  # its code may raise anything
        raise DataError(f"{path} must be a torch.export program that loads: {first_line(error)}") from error
    finally:
        log.disabled = was_disabled


def _load_pickle(path: Path, trust: Trust) -> nn.Module:
    if not trust.covers(path):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except LOAD_ERRORS as error:
            raise DataError(
                f"{path} must be a model that can be read without running code, but it is pickled, damaged, or "
                f"something else: save it as TorchScript or ONNX, or pass --trust {path} if you know it"
            ) from error
        raise _no_model(path, "weights" if isinstance(content, dict) else type(content).__name__)
    make_importable()  # a pickle names the classes of its objects
    try:
        return _module(torch.load(path, map_location="cpu", weights_only=False), path)
    except ModelError:
        raise
    except Exception as error:  # its code may raise anything
        raise DataError(f"{path} must be a pickled model that loads: {first_line(error)}") from error


def _torchvision(name: str, trust: Trust, has_weights: bool) -> LoadedModel:
    call = read_call(name, "model")
    models = _import("torchvision.models", "torchvision")
    return _named(call, models.get_model, {"weights": None if has_weights else "DEFAULT"})


def _timm(name: str, trust: Trust, has_weights: bool) -> LoadedModel:
    call = read_call(name, "model")
    return _configured(_named(call, _import("timm", "timm").create_model, {"pretrained": not has_weights}))


def _hugging_face(name: str, trust: Trust, has_weights: bool) -> LoadedModel:
    call = read_call(name, "model")
    models = _import("transformers", "transformers")
    models.utils.logging.disable_progress_bar()  # it would be printed beside the progress of the campaign
    return _configured(_named(call, models.AutoModelForImageClassification.from_pretrained, {}))


def _configured(loaded: LoadedModel) -> LoadedModel:
    return loaded._replace(statistics=own_statistics(loaded.model))


def _keras(name: str, trust: Trust, has_weights: bool) -> LoadedModel:
    path = Path(name)
    if not os.path.isfile(path):
        raise DataError(f"the model file must exist, but {path} does not: check the path")
    return LoadedModel(load_keras(path, trust), hash_file(path))


def _named(call: Call, make: Callable[..., Any], defaults: dict[str, Any]) -> LoadedModel:
    try:
        return LoadedModel(make(call.name, *call.args, **{**defaults, **call.kwargs}))
    except Exception as error:  # an unknown name, no network, an incompatible version
        raise ModelError(f"--model: {call.name} raised {type(error).__name__}: {first_line(error)}") from error


def _import(name: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(f"this model needs {package}: pip install {package}") from error
    except Exception as error:  # such as torchvision's operators that another torch does not have
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise MissingExtraError(
            f"this model needs {package}, which cannot be imported ({reason}): install a version of it that fits "
            f"PyTorch {torch.__version__}"
        ) from error


def _module(model: Any, path: Path) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path} must hold an nn.Module, got {type(model).__name__}: save the model itself")
    return model


FILES: dict[str, Callable[[Path, Trust], Any]] = {
    ".pt": load_torch_file,
    ".pth": load_torch_file,
    ".ts": load_torch_file,
    ".pt2": load_torch_file,
    ".onnx": load_onnx,
    ".keras": load_keras,
}
LOADERS: Extensible[Callable[[str], Any]] = Extensible("themis.loaders", {})
"""Functions that return a model, given the text after `NAME:`; packages add them."""
PACKAGES: dict[str, Callable[[str, Trust, bool], LoadedModel]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "hf": _hugging_face,
    "keras": _keras,
}
