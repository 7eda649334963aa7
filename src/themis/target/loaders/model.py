"""Loading models from `module:factory`, from files by suffix, or from `package:NAME`."""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from themis.errors import DataError, ModelError, ThemisError, UsageError, first_line
from themis.plugins import Extensible
from themis.target.fingerprint import hash_file
from themis.target.loaders.factory import call_factory, import_package, read_call
from themis.target.loaders.script import load_script
from themis.target.loaders.weights import Trust, is_script, names_in_archive
from themis.target.traits import Statistics, own_statistics
from themis.user_code import make_importable


class LoadedModel(NamedTuple):
    """A model, the hash of its file, and the normalisation that its package recommends."""

    model: Any
    version: str = ""
    statistics: Statistics | None = None


def load_model(spec: str, trust: Trust, *, has_weights: bool = False) -> LoadedModel:
    """Return the model that `--model` names; has_weights: the user has weights, so none are downloaded."""
    kind, _, name = spec.partition(":")
    if kind in PACKAGES:
        if not name:
            raise UsageError(f"--model {spec!r} must name a model: write {kind}:NAME")
        if f".{kind}" in FILE_LOADERS:
            return _from_file(Path(name), FILE_LOADERS[f".{kind}"], trust)
        return _from_package(kind, name, has_weights)
    if kind in LOADERS:
        return LoadedModel(LOADERS[kind](name))
    if not is_file(spec):
        _refuse_file(Path(spec))
        return LoadedModel(call_factory(spec, "model", PACKAGES))
    path = Path(spec)
    return _from_file(path, FILE_LOADERS[path.suffix.lower()], trust)


def _from_file(path: Path, load: Callable[[Path, Trust], Any], trust: Trust) -> LoadedModel:
    if not os.path.isfile(path):
        raise DataError(f"the model file must exist, but {path} does not: check the path")
    model = load(path, trust)
    return LoadedModel(model, getattr(model, "version", None) or hash_file(path))


def collection() -> Any:
    """The models that `--zoo` names, with their data and weights: the loader `zoo`."""
    return LOADERS["zoo"]


def is_file(spec: str) -> bool:
    """Return whether `--model` names a file, judged by its suffix."""
    return Path(spec).suffix.lower() in FILE_LOADERS


def _refuse_file(path: Path) -> None:
    """Refuse a file of another kind, unless it is a module."""
    if not os.path.isfile(path) or path.suffix == ".py":
        return
    if path.suffix in (".safetensors", ".ckpt"):
        raise _no_model(path, "weights, not the class of the model")
    raise UsageError(
        f"--model must be module:factory or a file that ends in {', '.join(FILE_LOADERS)}, got {str(path)!r}: load it "
        "in a function of your own, such as make_net in mymodels.py, and write mymodels:make_net"
    )


def _no_model(path: Path, content: str) -> DataError:
    return DataError(
        f"{path} must be a model, but it holds {content}: pass --model module:factory, which makes the "
        f"model, and --weights {path}"
    )


def load_torch_file(path: Path, trust: Trust) -> nn.Module:
    """Load a TorchScript program, a torch.export program or a pickled model, depending on the content."""
    if is_script(path):
        return load_script(path, trust)
    if path.suffix.lower() == ".pt2" or any(name.endswith("archive_format") for name in names_in_archive(path)):
        return _load_exported(path, trust)
    return _load_pickle(path, trust)


def _load_exported(path: Path, trust: Trust) -> nn.Module:
    trust.require(path, "a torch.export program, and reading it runs code in it", "save it as TorchScript or ONNX")
    import torch.export

    make_importable()
    log = logging.getLogger("torch.export")
    was_disabled, log.disabled = log.disabled, True  # it would print a traceback above the error
    try:
        with warnings.catch_warnings(), _running_its_code(path, "a torch.export program"):
            warnings.simplefilter("ignore")
            return torch.export.load(path).module()
    finally:
        log.disabled = was_disabled


def _load_pickle(path: Path, trust: Trust) -> nn.Module:
    if not trust.covers(path):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises all kinds on a file that it cannot read
            raise DataError(
                f"{path} must be a model that can be read without running code, but it is pickled, damaged, or "
                f"something else: save it as TorchScript or ONNX, or pass --trust {path} if you know it"
            ) from error
        raise _no_model(path, "weights" if isinstance(content, dict) else type(content).__name__)
    make_importable()  # a pickle names the classes of its objects
    with _running_its_code(path, "a pickled model"):
        model = torch.load(path, map_location="cpu", weights_only=False)
        if not isinstance(model, nn.Module):
            raise ModelError(f"{path} must hold an nn.Module, got {type(model).__name__}: save the model itself")
        return model


@contextmanager
def _running_its_code(path: Path, kind: str) -> Iterator[None]:
    """Turn any error of the code in a trusted file into a one-line error."""
    try:
        yield
    except ThemisError:
        raise
    except Exception as error:
        raise DataError(f"{path} must be {kind} that loads: {first_line(error)}") from error


def _from_package(package: str, name: str, has_weights: bool) -> LoadedModel:
    call = read_call(name, "model")
    defaults: dict[str, Any] = {}
    if package == "torchvision":
        make = import_package("torchvision.models").get_model
        defaults = {"weights": None if has_weights else "DEFAULT"}
    elif package == "timm":
        make, defaults = import_package("timm").create_model, {"pretrained": not has_weights}
    else:
        models = import_package("transformers")
        models.utils.logging.disable_progress_bar()  # it would be printed beside the progress of the campaign
        make = models.AutoModelForImageClassification.from_pretrained
    try:
        model = make(call.name, *call.args, **{**defaults, **call.kwargs})
    except Exception as error:  # an unknown name, no network, an incompatible version
        raise ModelError(f"--model: {call.name} raised {type(error).__name__}: {first_line(error)}") from error
    return LoadedModel(model, statistics=own_statistics(model))


FILE_LOADERS: Extensible[Callable[[Path, Trust], Any]] = Extensible(
    "themis.model_files", dict.fromkeys((".pt", ".pth", ".ts", ".pt2"), load_torch_file)
)
"""Functions that load the model in a file, by suffix; packages add others."""
LOADERS: Extensible[Callable[[str], Any]] = Extensible("themis.loaders", {})
"""Functions that load a model from the text after `NAME:`, by NAME; packages add others."""
PACKAGES = ("torchvision", "timm", "hf", "keras")
"""Prefixes of models of a package; `keras:` is followed by the path of a file."""
