"""Where a target and its data come from, in a form that lets another process load them again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import ThemisError, UsageError, first_line, nearest
from themis.options import option
from themis.progress import step
from themis.runs.trust import CODE_OPTIONS, Permission, code_of, pickled_files
from themis.user_code import LOG, imported_anew, looked_up_in, working_in

if TYPE_CHECKING:
    from themis.target.loaders.weights import Trust
    from themis.target.target import AnyTarget
    from themis.target.traits import Statistics


@dataclass(frozen=True)
class Origin:
    """The options that define a target and its data. A run records them, so that it can be resumed and replayed."""

    model: str = option(
        "",
        "module:factory or module:factory(width=32) that returns a model or a Target; a file (.pt, .pt2, .onnx, "
        ".keras); or torchvision:NAME, timm:NAME, hf:NAME, keras:FILE, maite:module:factory",
    )
    weights: str | None = option(None, "state dict or checkpoint (.pt, .pth, .safetensors) to load into the model")
    data: str = option(
        "",
        "READER, READER:PATH or READER:PATH?option=value (images, coco, yolo, voc, npz, npy, csv, parquet, idx, cifar, "
        "cifar10c, cifar100c, imagenetc, wav, hf, digits, mnist, cifar10, imagenet, pdf, drebin, udacity), "
        "module:factory or maite:module:factory",
    )
    train: str | None = option(
        None, "data that the criterion learns from, as in --data (default: the training data of the zoo, or the seeds)"
    )
    rivals: list[str] | None = option(
        None,
        "other models of the task, for policies that compare this one with them: names of the zoo, or as in --model",
    )
    against: str | None = option(
        None,
        "reference that the model should agree with, as in --model or a name of the zoo; a fault is then a test on "
        "which the two disagree",
    )
    features: str | None = option(
        None, "CSV file with the type, range and allowed changes of each column of a table: name,kind,low,high,change"
    )
    classes: list[str] | None = option(
        None, "names of the classes in order, such as cat,dog,owl (default: those in the data)"
    )
    bounds: tuple[float, float] = option((0.0, 1.0), "range of a raw input, such as 0,255; auto takes that of a table")
    mean: list[float] | None = option(None, "mean of the normalisation: one number, or one per channel: 0.4,0.5,0.4")
    std: list[float] | None = option(None, "standard deviation of the normalisation: one number, or one per channel")
    label_order: list[int] | None = option(
        None, "label of each output, such as 2,0,1, if the labels have another order"
    )
    channels: str = option("auto", "where the model expects channels: first, last, or auto, which asks a Keras model")
    perturbed: str | None = option(
        None, "name or position of the input to perturb, if the data has several per example"
    )
    output: str | None = option(
        None,
        "entry of the model's result that holds the scores: a key, an attribute or an index (default: logits, out, or "
        "the only tensor); or the form of a detector's result: torchvision, yolo, yolov5, detr, rows",
    )
    layers: list[str] | None = option(
        None, "layers to measure, as glob patterns such as conv*,fc1 (default: all with activations)"
    )
    neurons: str = option("element", "what counts as a neuron: element or channel")
    oracle: str = option(
        "auto",
        "what counts as a fault: auto, wrong, changed, top5, threshold:0.5, regression:0.1, ... or module:function",
    )
    autocast: str | None = option(
        None, "run with fewer bits where torch.autocast considers that safe: bfloat16 or float16"
    )
    device: str | None = option(None, "cpu or cuda (default: the device of the model)")
    folder: str | None = option(None, "folder of modules and relative paths (default: the current folder)")
    trust: list[str] | None = option(
        None,
        "files and run folders whose code may run: a pickled model, a checkpoint or a .pt2 contains code, and a run "
        "folder from elsewhere names it; can be repeated",
    )
    zoo: str | None = option(None, "model of the zoo with its weights and data, such as lenet5-mnist; see themis zoo")
    permission: Permission | None = field(default=None, repr=False, compare=False)
    """Whether the code that a run folder recorded may run; None if the user named it."""

    @staticmethod
    def of(values: dict[str, Any]) -> Origin:
        """Return an origin from a dict, ignoring names that are not its options."""
        return Origin(**{name: value for name, value in values.items() if name in OPTIONS})

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, with the hash of each trusted file, and without names of code that may not run."""
        values = {name: getattr(self, name) for name in OPTIONS}
        if self.permission is not None and not self.permission.is_granted:
            default = Origin()
            values |= {name: getattr(default, name) for name in CODE_OPTIONS if self.code(name)}
        folder = Path(self.folder or "")
        files = [file for file in self._trust().as_list(folder) if not os.path.isdir(folder / file)]
        return {**values, "bounds": list(self.bounds), "trust": files or None}

    def code(self, *options: str) -> list[str]:
        """Return in words the code that these options name, leaving out what the user named."""
        own = frozenset() if self.permission is None else self.permission.own
        code = code_of(vars(self), [name for name in options if name not in own])
        if "model" in options and self.permission is not None and "model" not in own:
            code += pickled_files(file for file in self.trust or () if file not in self.permission.own_trust)
        return code

    def _require(self, *options: str) -> None:
        """Refuse to run code that these options name if it comes from a run folder that is not trusted."""
        if self.permission is not None:
            self.permission.require(self.code(*options))

    def _trust(self) -> Trust:
        """Return the files that may run code: those that the user trusts and, with permission, those of the run."""
        from themis.target.loaders.weights import HASH_MARK, Trust

        if self.permission is None:
            return Trust.of(self.trust)
        own = self.permission.own_trust
        recorded = self.trust if self.permission.is_granted else None
        return Trust.of([*own, *(file for file in recorded or () if file.partition(HASH_MARK)[0] not in own)])

    def target(self) -> AnyTarget:
        """Load the target and its weights."""
        self._require("model", "oracle")
        if self.against is not None:
            self._require("against")
            self._refuse_given("oracle", because="--against defines a fault: the model and its reference disagree")
        target = self._load("loading the model")
        if self.against is None:
            return target
        from themis.target.against import Against

        is_zoo = self.against in _collection().names
        own = Origin(folder=self.folder, trust=self.trust, permission=self.permission, device=self.device)
        weights = self.weights if self.against == self.model else None  # such as the model without --autocast
        reference = replace(own, zoo=self.against) if is_zoo else replace(own, model=self.against, weights=weights)
        try:
            return Against(target, reference._load("loading the reference", target))
        except ThemisError as error:
            raise type(error)(f"reference {self.against!r}: {str(error).replace('--model', '--against')}") from error

    def _load(self, what: str, tested: AnyTarget | None = None) -> AnyTarget:
        """Load the target on its device; if it is a reference, `tested` is the model that is tested against it."""
        with self.in_folder(), step(what):
            target = self._load_target(tested) if self.zoo is None else self._load_from_zoo(self.zoo)
        if self.device is not None:
            _move(target, self.device)
        return target

    def _load_target(self, tested: AnyTarget | None) -> AnyTarget:
        from themis.target.loaders import load_model, load_weights
        from themis.target.target import AnyTarget, Target

        trust = self._trust()
        model, version, statistics = load_model(self.model, trust, has_weights=self.weights is not None)
        if isinstance(model, AnyTarget):
            of_inputs = ("bounds", "mean", "std", "channels", "perturbed")
            of_outputs = ("label_order", "output", "layers", "neurons", "oracle", "autocast")
            self._refuse_given(*of_inputs, *of_outputs, because=f"{self.model} returns a Target: set it there")
            target = model
        else:
            target = self._wrap(model, version, None if tested is not None else statistics)
        if tested is not None and target is not model:
            from themis.target.against import like

            target = like(target, tested)
        if self.weights is not None:
            if not isinstance(target, Target):
                raise UsageError(f"--weights must be left out, because {self.model} has its own")
            load_weights(target.module, Path(self.weights), trust)
        return target

    def _load_from_zoo(self, name: str) -> AnyTarget:
        """Load a target of the zoo; refuses options that the zoo defines, except for weights and data."""
        of_zoo = ("model", "bounds", "mean", "std", "label_order", "channels", "perturbed", "output")
        self._refuse_given(*of_zoo, because=f"{name} of the zoo has its own: leave out --zoo to set it")
        layers = "auto" if self.layers is None else tuple(self.layers)
        options: dict[str, Any] = {"layers": layers, "neurons": self.neurons, "oracle": self.oracle}
        loaded: Any = _collection().load(name, self.weights, trust=self._trust(), **options)
        target: AnyTarget = replace(loaded, autocast=self.autocast)
        return target

    def _refuse_given(self, *names: str, because: str) -> None:
        """Refuse options whose values differ from the default."""
        default = Origin()
        for name in names:
            if getattr(self, name) != getattr(default, name):
                raise UsageError(f"--{name.replace('_', '-')} must be left out, because {because}")

    def _wrap(self, model: Any, version: str, statistics: Statistics | None) -> AnyTarget:
        """Return a target for a model, with the options.

        Without a normalisation of the user's, the one that the model's package recommends is applied. A run records
        the normalisation it used, so nothing is added to a recorded origin.
        """
        from torch import nn

        from themis.target.blackbox import BlackBox
        from themis.target.detections import DETECTION_FORMS
        from themis.target.estimator import FileModel, is_estimator, is_maite_model
        from themis.target.target import UNBOUNDED, Normalize, Target

        if (self.mean is None) != (self.std is None):
            raise UsageError("--mean and --std must be given together, got one of them")
        options: dict[str, Any] = {
            "bounds": (self.bounds[0], self.bounds[1]),
            "preprocess": None if self.mean is None or self.std is None else Normalize(self.mean, self.std),
            "label_order": self.label_order,
            "channels": self.channels,
            "layers": "auto" if self.layers is None else tuple(self.layers),
            "neurons": self.neurons,
            "oracle": self.oracle,
        }
        if self.mean is None and statistics is not None and self.permission is None:
            options["preprocess"] = Normalize.within(options["bounds"], *statistics)
            mean, std = (",".join(f"{value:g}" for value in values) for values in statistics)
            LOG.info("normalised with mean %s and std %s, as the configuration of %s says", mean, std, self.model)
        if not isinstance(model, nn.Module) and self.autocast is not None:
            raise UsageError(f"--autocast must be left out, because {self.model} is not a PyTorch module")
        if is_maite_model(model) or (is_estimator(model) and not isinstance(model, nn.Module)):
            if self.bounds == Origin().bounds:  # as in Python, tables and MAITE data sets have their own bounds
                options["bounds"] = UNBOUNDED
            return BlackBox(model, **options, version=version)
        if isinstance(model, FileModel):
            if self.output in DETECTION_FORMS:
                return BlackBox(model, **options, output=self.output, version=model.version)
            return BlackBox(model.choose(self.output), **options, version=model.version)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"--model {self.model!r} must be a PyTorch module, an estimator, a Target or a BlackBox, got "
                f"{type(model).__name__}: return the model itself, or themis.BlackBox(function)"
            )
        return Target(
            model, **options, output=self.output, perturbed=self.perturbed, version=version, autocast=self.autocast
        )

    def resolved(self, target: AnyTarget) -> Origin:
        """Return the origin with the bounds and the normalisation that were derived from the data and the model."""
        from themis.target.loaders import PACKAGES
        from themis.target.target import UNBOUNDED, Normalize

        origin, preprocess = self, getattr(target, "preprocess", None)
        if self.bounds == UNBOUNDED:
            origin = replace(origin, bounds=target.bounds)
        if self.mean is None and self.model.partition(":")[0] in PACKAGES and isinstance(preprocess, Normalize):
            origin = replace(origin, mean=preprocess.mean.tolist(), std=preprocess.std.tolist())
        return origin

    def read(self) -> Any:
        """Read the data, with the features of a table if they are described."""
        self._require("data")
        if self.zoo is not None and not self.data:
            with self.in_folder():
                data = _collection().data(self.zoo)
        else:
            data = self._read_named(self.data, "data")
        if self.features is None:
            return data
        from themis.data.seeds import read_seeds

        with self.in_folder():
            return read_seeds(data).with_features(self.features)

    def read_rivals(self) -> list[AnyTarget]:
        """Load the rivals: models of the zoo with their own weights, others with the options of the target."""
        self._require("rivals", "oracle")
        if not self.rivals:
            return []
        known = _collection().names
        options, rivals = replace(self, rivals=None, weights=None, against=None), []
        for name in self.rivals:
            if name not in known and ":" not in name and not os.path.exists(name):
                raise UsageError(
                    f"--rivals must be names from the zoo, or given like --model, got {name!r}: {nearest(name, known)}"
                )
            rival = replace(options, zoo=name, model="") if name in known else replace(options, zoo=None, model=name)
            rivals.append(rival.target())
        return rivals

    def read_train(self) -> Any:
        """Read the training data that is named, or that of the zoo's model; None if there is none."""
        if self.train is not None:
            self._require("train")
            return self._read_named(self.train, "train")
        if self.zoo is None:
            return None
        from themis.errors import DataError

        with self.in_folder():
            try:
                return _collection().data(self.zoo, "train")
            except DataError:
                return None

    def _read_named(self, text: str, flag: str) -> Any:
        from themis.data.maite import required_dataset
        from themis.data.readers import READERS, read_data
        from themis.target.loaders.factory import call_factory

        name, _, rest = text.partition(":")
        with self.in_folder(), step("reading the data"):
            if name == "maite":
                return required_dataset(call_factory(rest, flag), f"--{flag} {text}")
            return read_data(text) if name in READERS or not rest else call_factory(text, flag, READERS)

    def weights_path(self) -> Path | None:
        """Return the weights file, if it exists."""
        if self.weights is not None:
            path = Path(self.folder or "", self.weights)
            return path if path.is_file() else None
        if self.zoo is None:
            return None
        with self.in_folder():
            found: Path | None = _collection().find_weights(self.zoo)
            return None if found is None else found.absolute()

    @contextmanager
    def in_folder(self) -> Iterator[None]:
        """Work in the folder that paths and module names are relative to, if it still exists.

        A recorded folder is used only if its code may run; names that the user gave are looked up in the user's folder.
        """
        permission, here = self.permission, os.getcwd()
        folder = self.folder if self.folder is not None and os.path.isdir(self.folder) else here
        if permission is None:
            places = [folder]
        elif permission.is_granted:
            places = [permission.home, folder] if permission.own else [folder]
        else:
            places, folder = [permission.home], here
        with looked_up_in(*map(os.path.abspath, places)), working_in(folder):
            yield

    @contextmanager
    def imported_anew(self) -> Iterator[None]:
        """Import modules from the origin's folder, even if modules of the same name were imported from elsewhere."""
        is_permitted = self.permission is None or self.permission.is_granted
        folder = self.folder if is_permitted else None
        with imported_anew(folder) if folder is not None and os.path.isdir(folder) else nullcontext():
            yield


def _collection() -> Any:
    from themis.target.loaders import collection

    return collection()


OPTIONS = tuple(each.name for each in fields(Origin) if each.name != "permission")


def recorded_origin(record: dict[str, Any], permission: Permission) -> Origin | None:
    """Return how a run's target and data were made, with the permission to run that code; None if not recorded."""
    if record["origin"] is None:
        return None
    origin = Origin.of({**record["origin"], "bounds": tuple(record["origin"]["bounds"])})
    return replace(origin if permission.is_granted else _anchored(origin), permission=permission)


def _anchored(origin: Origin) -> Origin:
    """Return the origin with absolute paths of plain files, so that the folder need not be the working directory."""
    from themis.data.readers import READERS
    from themis.target.loaders import is_file

    folder = origin.folder or ""
    paths: dict[str, Any] = {name: getattr(origin, name) for name in ("weights", "features")}
    changes: dict[str, Any] = {name: os.path.join(folder, path) for name, path in paths.items() if path}
    for name in ("model", "against"):
        if is_file(getattr(origin, name) or ""):
            changes[name] = os.path.join(folder, getattr(origin, name))
    for name in ("data", "train"):
        reader, colon, path = (getattr(origin, name) or "").partition(":")
        if reader in READERS and path and reader != "hf":
            changes[name] = f"{reader}{colon}{os.path.join(folder, path)}"
    return replace(origin, **changes)


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
        remedy = "leave it out, or pass --device cpu; themis doctor lists the devices"
        raise UsageError(f"--device must be usable here, but {name!r} is not: {first_line(error)}; {remedy}") from error
