"""Where a target and its data come from, in words: enough for another process to make them again."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError, nearest
from themis.options import option

if TYPE_CHECKING:
    from themis.target.target import AnyTarget


@dataclass(frozen=True)
class Origin:
    """How the command line makes a target and its data. A run remembers it, so that it can be resumed and replayed."""

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
        """An origin from plain data that may hold other names too."""
        names = {each.name for each in fields(Origin)}
        return Origin(**{name: value for name, value in values.items() if name in names})

    def as_dict(self) -> dict[str, Any]:
        """Plain data; a trusted file with its hash, so that no other one takes its place."""
        from themis.target.loaders.trust import Trust

        trust = None if self.trust is None else Trust.of(self.trust).as_list(Path(self.folder or ""))
        return {**asdict(self), "bounds": list(self.bounds), "trust": trust}

    def target(self) -> AnyTarget:
        """The target, made again, with its weights loaded."""
        if self.zoo is not None:
            return self._zoo_target(self.zoo)
        from themis.target.loaders import Trust, load_model, load_weights
        from themis.target.target import AnyTarget, Target

        trust = Trust.of(self.trust)
        with self.at_home():
            made, version = load_model(self.model, trust, has_weights=self.weights is not None)
            if isinstance(made, AnyTarget):
                self._refuse_what_a_target_has()
                target = made
            else:
                target = self._around(made, version)
            if self.weights is not None:
                if not isinstance(target, Target):
                    raise UsageError(f"--weights must be left out, {self.model} has its own")
                load_weights(target.module, Path(self.weights), trust)
        if self.device is not None:
            _move(target, self.device)
        return target

    def _around(self, made: Any, version: str) -> AnyTarget:
        """A target around a model, as the options say."""
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
        if isinstance(made, OnnxModel):
            return BlackBox(made, **options, version=made.version)
        return Target(made, **options, version=version)

    def read(self) -> Any:
        """The data, read again, with its features where they are described."""
        data = self._read()
        if self.features is None:
            return data
        from themis.data.seeds import read_seeds

        with self.at_home():
            return read_seeds(data).with_features(self.features)

    def read_rivals(self) -> list[AnyTarget]:
        """The rivals, made again: those of the zoo with their weights, others around as the target is."""
        from themis.zoo import ZOO

        plain, made = replace(self, rivals=None, weights=None), []
        for each in self.rivals or ():
            if each not in ZOO and ":" not in each and not os.path.exists(each):
                raise UsageError(
                    f"--rivals must be names of the zoo, or as --model, got {each!r}: {nearest(each, ZOO)}"
                )
            changed = replace(plain, zoo=each, model="") if each in ZOO else replace(plain, zoo=None, model=each)
            made.append(changed.target())
        return made

    def read_train(self) -> Any:
        """The training data, read again: as named, or that of the zoo's model; None where there is none."""
        if self.train is not None:
            return self._read_named(self.train, "train")
        if self.zoo is None:
            return None
        from themis.errors import DataError
        from themis.zoo import data

        with self.at_home():
            try:
                return data(self.zoo, "train")
            except DataError:
                return None

    def _read(self) -> Any:
        if self.zoo is not None and not self.data:
            from themis.zoo import data

            with self.at_home():
                return data(self.zoo)
        return self._read_named(self.data, "data")

    def _read_named(self, text: str, flag: str) -> Any:
        from themis.data.readers import READERS, read_data
        from themis.target.loaders.factory import call_factory

        name, _, rest = text.partition(":")
        with self.at_home():
            return read_data(text) if name in READERS or not rest else call_factory(text, flag)

    def weights_path(self) -> Path | None:
        """The weights file, if it can be found."""
        if self.weights is None:
            return self._zoo_weights()
        path = Path(self.folder or "", self.weights)
        return path if path.is_file() else None

    def _zoo_target(self, name: str) -> AnyTarget:
        """The zoo's target; what the zoo knows better is refused, weights and data may be others."""
        from themis.target.loaders import Trust
        from themis.zoo import load

        plain = Origin()
        for each in ("model", "bounds", "mean", "std"):
            if getattr(self, each) != getattr(plain, each):
                raise UsageError(f"--{each} must be left out, {name} of the zoo has its own: leave out --zoo to set it")
        layers = "auto" if self.layers is None else tuple(self.layers)
        with self.at_home():
            how: dict[str, Any] = {"layers": layers, "neurons": self.neurons, "oracle": self.oracle}
            target = load(name, self.weights, trust=Trust.of(self.trust), **how)
        if self.device is not None:
            _move(target, self.device)
        return target

    def _zoo_weights(self) -> Path | None:
        if self.zoo is None:
            return None
        from themis.zoo import find_weights

        with self.at_home():
            path = find_weights(self.zoo)
            return None if path is None else path.absolute()

    def _refuse_what_a_target_has(self) -> None:
        plain = Origin()
        for name in ("bounds", "mean", "std", "layers", "neurons", "oracle"):
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"--{name} must be left out, {self.model} makes a Target, which has its own: set {name} there"
                )

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """In the folder where the names were given, if it is still there; modules are looked up there too."""
        before = os.getcwd()
        home = self.folder if self.folder is not None and os.path.isdir(self.folder) else before
        if home not in sys.path:
            sys.path.insert(0, home)
        os.chdir(home)
        try:
            yield
        finally:
            os.chdir(before)


def _move(target: AnyTarget, name: str) -> None:
    import torch

    from themis.target.target import Target

    if not isinstance(target, Target):
        if name != "cpu":
            raise UsageError(f"--device must be left out, the model runs where its own code puts it, got {name!r}")
        return
    try:
        target.module.to(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"--device must be usable here, {name!r} is not: {why}") from error
