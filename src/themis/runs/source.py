"""Where a target and its data come from, described so that another process can load them again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, first_line, nearest
from themis.options import option

if TYPE_CHECKING:
    from themis.target.target import AnyTarget


@dataclass(frozen=True)
class Origin:
    """The options that define a target and its data. A run records them, so that it can be resumed and replayed."""

    model: str = option(
        "",
        "module:factory or module:factory(width=32) that returns a model or a Target; a file (.pt, .pt2, .onnx, "
        ".keras); or torchvision:NAME, timm:NAME, hf:NAME, keras:FILE",
    )
    weights: str | None = option(None, "state dict or checkpoint (.pt, .pth, .safetensors) to load into the model")
    data: str = option(
        "",
        "READER, READER:PATH or READER:PATH?option=value (images, npz, npy, csv, parquet, idx, cifar, hf, digits, "
        "mnist, cifar10, imagenet, pdf, drebin, udacity) or module:factory",
    )
    train: str | None = option(
        None, "data that the criterion learns from, as in --data (default: the training data of the zoo, or the seeds)"
    )
    rivals: list[str] | None = option(
        None, "models that policy deepxplore compares with this one: names of the zoo, or as in --model"
    )
    features: str | None = option(
        None,
        "CSV file with the type, range and allowed changes of each column of a table: name,kind,low,high,change",
    )
    classes: list[str] | None = option(
        None, "names of the classes in order, such as cat,dog,owl (default: the names in the data)"
    )
    bounds: tuple[float, float] = option((0.0, 1.0), "range of a raw input, such as 0,255")
    mean: list[float] | None = option(
        None, "mean of the normalisation: one number, or one per channel such as 0.4,0.5,0.4"
    )
    std: list[float] | None = option(None, "standard deviation of the normalisation: one number, or one per channel")
    layers: list[str] | None = option(
        None, "layers to measure, as glob patterns such as conv*,fc1 (default: all layers with activations)"
    )
    neurons: str = option("element", "what counts as a neuron: element or channel")
    oracle: str = option(
        "auto",
        "what counts as a fault: auto, wrong, changed, top5, threshold:0.5, regression:0.1, ... or module:function",
    )
    device: str | None = option(None, "cpu or cuda (default: the device of the model)")
    folder: str | None = option(
        None, "folder in which modules and relative paths are looked up (default: the current folder)"
    )
    trust: list[str] | None = option(None, "files that may run code when they are loaded: pickled models, .pt2")
    zoo: str | None = option(None, "model of the zoo with its weights and data, such as lenet5-mnist; see themis zoo")

    @staticmethod
    def of(values: dict[str, Any]) -> Origin:
        """Return an origin from a dict that may hold other names too."""
        names = {field.name for field in fields(Origin)}
        return Origin(**{name: value for name, value in values.items() if name in names})

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the hash of each trusted file so that no other can take its place."""
        from themis.target.loaders.trust import Trust

        trust = None if self.trust is None else Trust.of(self.trust).as_list(Path(self.folder or ""))
        return {**asdict(self), "bounds": list(self.bounds), "trust": trust}

    def target(self) -> AnyTarget:
        """Load the target and its weights."""
        if self.zoo is not None:
            return self._zoo_target(self.zoo)
        from themis.target.loaders import Trust, load_model, load_weights
        from themis.target.target import AnyTarget, Target

        trust = Trust.of(self.trust)
        with self.in_folder():
            model, version = load_model(self.model, trust, has_weights=self.weights is not None)
            if isinstance(model, AnyTarget):
                self._refuse_options_of_target()
                target = model
            else:
                target = self._wrap(model, version)
            if self.weights is not None:
                if not isinstance(target, Target):
                    raise UsageError(f"--weights must be left out, because {self.model} has its own")
                load_weights(target.module, Path(self.weights), trust)
        if self.device is not None:
            _move(target, self.device)
        return target

    def _wrap(self, model: Any, version: str) -> AnyTarget:
        """Return a target around a model, with the options."""
        from themis.target.blackbox import BlackBox
        from themis.target.loaders.onnx import OnnxModel
        from themis.target.target import Normalize, Target

        if (self.mean is None) != (self.std is None):
            raise UsageError("--mean and --std must be given together, got one of them")
        options: dict[str, Any] = {
            "bounds": (self.bounds[0], self.bounds[1]),
            "preprocess": None if self.mean is None or self.std is None else Normalize(self.mean, self.std),
            "layers": "auto" if self.layers is None else tuple(self.layers),
            "neurons": self.neurons,
            "oracle": self.oracle,
        }
        if isinstance(model, OnnxModel):
            return BlackBox(model, **options, version=model.version)
        return Target(model, **options, version=version)

    def read(self) -> Any:
        """Read the data, with the features of a table if they are described."""
        data = self._read()
        if self.features is None:
            return data
        from themis.data.seeds import read_seeds

        with self.in_folder():
            return read_seeds(data).with_features(self.features)

    def read_rivals(self) -> list[AnyTarget]:
        """Load the rivals: those of the zoo with their weights, others with the options of the target."""
        from themis.zoo import ZOO

        options, rivals = replace(self, rivals=None, weights=None), []
        for name in self.rivals or ():
            if name not in ZOO and ":" not in name and not os.path.exists(name):
                raise UsageError(
                    f"--rivals must be names from the zoo, or given like --model, got {name!r}: {nearest(name, ZOO)}"
                )
            rival = replace(options, zoo=name, model="") if name in ZOO else replace(options, zoo=None, model=name)
            rivals.append(rival.target())
        return rivals

    def read_train(self) -> Any:
        """Read the training data, given by name or by the zoo's model; None if there is none."""
        if self.train is not None:
            return self._read_named(self.train, "train")
        if self.zoo is None:
            return None
        from themis.errors import DataError
        from themis.zoo import data

        with self.in_folder():
            try:
                return data(self.zoo, "train")
            except DataError:
                return None

    def _read(self) -> Any:
        if self.zoo is not None and not self.data:
            from themis.zoo import data

            with self.in_folder():
                return data(self.zoo)
        return self._read_named(self.data, "data")

    def _read_named(self, text: str, flag: str) -> Any:
        from themis.data.readers import READERS, read_data
        from themis.target.loaders.factory import call_factory

        name, _, rest = text.partition(":")
        with self.in_folder():
            return read_data(text) if name in READERS or not rest else call_factory(text, flag)

    def weights_path(self) -> Path | None:
        """Return the weights file, if it exists."""
        if self.weights is None:
            return self._zoo_weights()
        path = Path(self.folder or "", self.weights)
        return path if path.is_file() else None

    def _zoo_target(self, name: str) -> AnyTarget:
        """Load a target of the zoo; options that the zoo defines are refused, except for weights and data."""
        from themis.target.loaders import Trust
        from themis.zoo import load

        default = Origin()
        for option_name in ("model", "bounds", "mean", "std"):
            if getattr(self, option_name) != getattr(default, option_name):
                raise UsageError(
                    f"--{option_name} must be left out, because {name} of the zoo has its own: leave out --zoo to set "
                    "it"
                )
        layers = "auto" if self.layers is None else tuple(self.layers)
        with self.in_folder():
            options: dict[str, Any] = {"layers": layers, "neurons": self.neurons, "oracle": self.oracle}
            target = load(name, self.weights, trust=Trust.of(self.trust), **options)
        if self.device is not None:
            _move(target, self.device)
        return target

    def _zoo_weights(self) -> Path | None:
        if self.zoo is None:
            return None
        from themis.zoo import find_weights

        with self.in_folder():
            path = find_weights(self.zoo)
            return None if path is None else path.absolute()

    def _refuse_options_of_target(self) -> None:
        default = Origin()
        for name in ("bounds", "mean", "std", "layers", "neurons", "oracle"):
            if getattr(self, name) != getattr(default, name):
                raise UsageError(
                    f"--{name} must be left out, because {self.model} returns a Target, which has its own: set {name} "
                    "there"
                )

    @contextmanager
    def in_folder(self) -> Iterator[None]:
        """Work in the folder that the names refer to, if it still exists, and look up modules there."""
        before = os.getcwd()
        folder = self.folder if self.folder is not None and os.path.isdir(self.folder) else before
        if folder not in sys.path:
            sys.path.insert(0, folder)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _move(target: AnyTarget, name: str) -> None:
    import torch

    from themis.target.target import Target

    if not isinstance(target, Target):
        if name != "cpu":
            raise UsageError(f"--device must be left out, because the model chooses its own device, got {name!r}")
        return
    try:
        target.module.to(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device must be usable here, but {name!r} is not: {first_line(error)}") from error
