"""Where a target and its data come from, in words: enough for another process to make them again."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import DataError, ModelError, UsageError, nearest
from themis.settings import option

if TYPE_CHECKING:
    from torch import nn

    from themis.target import Target


@dataclass(frozen=True)
class Origin:
    """How the command line makes a target and its data. A run remembers it, so that it can be resumed and replayed."""

    model: str = option("", "module:factory that makes an nn.Module or a Target")
    weights: str | None = option(None, "state dict to load into the model")
    data: str = option("", "READER, READER:PATH (digits, cifar10, npz) or module:factory")
    bounds: tuple[float, float] = option((0.0, 1.0), "range of a raw input, as 0,255")
    mean: list[float] | None = option(None, "normalisation mean: one number, or one a channel as 0.4,0.5,0.4")
    std: list[float] | None = option(None, "normalisation spread: one number, or one a channel")
    layers: list[str] | None = option(None, "globs over layer names, as conv*,fc1; by default all with activations")
    neurons: str = option("element", "element or channel")
    oracle: str = option("auto", "wrong, changed, or auto: wrong if there are labels")
    device: str | None = option(None, "cpu or cuda; by default where the model is")
    folder: str | None = option(None, "where modules and relative paths are looked up; by default here")

    @staticmethod
    def of(values: dict[str, Any]) -> Origin:
        """An origin from plain data that may hold other names too."""
        names = {each.name for each in fields(Origin)}
        return Origin(**{name: value for name, value in values.items() if name in names})

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "bounds": list(self.bounds)}

    def target(self) -> Target:
        """The target, made again, with its weights loaded."""
        from themis.target import Normalize, Target

        with self._at_home():
            made = _call(self.model, "model")
            if isinstance(made, Target):
                self._refuse_what_a_target_has()
                target = made
            else:
                if (self.mean is None) != (self.std is None):
                    raise UsageError("--mean and --std must be given together, got one of them")
                preprocess = None if self.mean is None or self.std is None else Normalize(self.mean, self.std)
                layers = "auto" if self.layers is None else tuple(self.layers)
                target = Target(
                    made,
                    (self.bounds[0], self.bounds[1]),
                    preprocess,
                    layers,
                    neurons=self.neurons,  # type: ignore[arg-type]  # checked by Target
                    oracle=self.oracle,
                )
            if self.weights is not None:
                load_weights(target.module, Path(self.weights))
        if self.device is not None:
            _move(target.module, self.device)
        return target

    def read(self) -> Any:
        """The data, read again."""
        from themis.data.readers import READERS, read_data

        name, _, rest = self.data.partition(":")
        with self._at_home():
            return read_data(self.data) if name in READERS or not rest else _call(self.data, "data")

    def weights_path(self) -> Path | None:
        """The weights file, if it can be found."""
        if self.weights is None:
            return None
        path = Path(self.folder or "", self.weights)
        return path if path.is_file() else None

    def _refuse_what_a_target_has(self) -> None:
        plain = Origin()
        for name in ("bounds", "mean", "std", "layers", "neurons", "oracle"):
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(
                    f"--{name} must be left out, {self.model} makes a Target, which has its own: set {name} there"
                )

    @contextmanager
    def _at_home(self) -> Iterator[None]:
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


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a state dict without running code; every key must find its place."""
    import pickle

    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise DataError(f"the weights file must exist, {path} does not: check the path") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        is_pickle = isinstance(error, pickle.UnpicklingError)  # torch's own text advises to load it unsafely
        why = "it is damaged, or holds more than tensors" if is_pickle else _first_line(error)
        raise DataError(
            f"{path} must be a state dict that torch.load(weights_only=True) reads: {why}; save model.state_dict()"
        ) from error
    if not isinstance(state, dict):
        raise DataError(f"{path} must hold a state dict, got {type(state).__name__}: save model.state_dict()")
    try:
        missing, unexpected = module.load_state_dict(state, strict=False)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ModelError(f"the weights in {path} must fit the model: {' '.join(str(error).split())}") from error
    missing = [key for key in missing if not key.endswith("num_batches_tracked")]  # older files have none
    if missing or unexpected:
        raise ModelError(
            f"the weights in {path} must fit the model, missing {missing[:3] or 'none'}, "
            f"unexpected {unexpected[:3] or 'none'}: check that they are of this architecture"
        )


def _move(module: nn.Module, name: str) -> None:
    import torch

    try:
        module.to(torch.device(name))
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"--device must be usable here, {name!r} is not: {_first_line(error)}") from error


def _call(spec: str, what: str) -> Any:
    """What `module:factory` makes."""
    name, _, attribute = spec.partition(":")
    if not attribute:
        raise UsageError(f"--{what} must be module:factory, got {spec!r}: write for instance mymodels:make_net")
    failure = ModelError if what == "model" else DataError
    try:
        made = getattr(importlib.import_module(name), attribute)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--{what} {spec!r}: {error}; modules are looked up in the working directory and the environment"
        ) from error
    except AttributeError as error:
        module = sys.modules.get(name)
        known = [each for each in vars(module) if not each.startswith("_")] if module else []
        raise UsageError(f"--{what} {spec!r}: {error}: {nearest(attribute, known)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise failure(f"--{what} {spec!r}: importing it raised {type(error).__name__}: {_first_line(error)}") from error
    import torch

    if isinstance(made, torch.nn.Module) or not callable(made):
        return made
    try:
        return made()
    except (Exception, SystemExit) as error:
        raise failure(f"--{what} {spec!r} raised {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
