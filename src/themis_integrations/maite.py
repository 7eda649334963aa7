"""MAITE, the protocols that the tools of JATIC share: models by name, and perturbations as augmentations.

Themis itself knows its models and data sets by what they have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.compute import rng
from themis.data.maite import picture_bounds
from themis.errors import UsageError
from themis.oracle import Motion
from themis.oracle.detection import moved_boxes
from themis.perturb.context import Context
from themis.perturb.distribution import Distribution
from themis.perturb.names import choose_perturbation, theta_columns
from themis.perturb.perturbation import Perturbation, Theta, check_fits, perturb
from themis.target.estimator import is_maite_model
from themis.target.loaders.factory import call_factory


def load_model(name: str) -> Any:
    """The model that `maite:module:factory` names."""
    model = call_factory(name, "model")
    if not is_maite_model(model):
        raise UsageError(
            f"--model maite:{name} must be a model of MAITE, but {type(model).__name__} has no metadata with an id: "
            "add them, or leave out maite:"
        )
    return model


Batch = tuple[Sequence[Any], Sequence[Any], Sequence[Mapping[str, Any]]]
"""Pictures `[channels, height, width]`, targets, and metadata."""


@dataclass(frozen=True)
class MovedTarget:
    """The boxes `[objects, 4]`, labels and scores `[objects]` of a picture that has moved."""

    boxes: Tensor
    labels: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Augmentation:
    """A perturbation as an augmentation of MAITE, created by `as_augmentation`."""

    perturbation: Perturbation
    theta: Mapping[str, float]
    bounds: tuple[float, float] | None
    random_seed: int
    metadata: dict[str, Any] = field(default_factory=dict)

    def __call__(self, batch: Batch, /) -> Batch:
        """The disturbed batch; the metadata of each datum have its theta, as `theta_NAME`."""
        datums = [self._disturbed(*datum) for datum in zip(*batch, strict=True)]
        inputs, targets, metadata = (list(column) for column in zip(*datums, strict=True)) if datums else ([], [], [])
        return inputs, targets, metadata

    def _disturbed(self, picture: Any, target: Any, metadata: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        given = picture if isinstance(picture, Tensor) else torch.as_tensor(np.asarray(picture))
        inputs = given.float()[None]
        check_fits(self.perturbation, tuple(given.shape))
        perturbation = self.perturbation.fitted(tuple(given.shape))
        digest = blake2b(repr(metadata["id"]).encode(), digest_size=7).digest()
        noise_seed = rng.mix(self.random_seed, np.array([int.from_bytes(digest)]))
        theta = {
            each.name: self.theta[each.name] if each.name in self.theta else _drawn(each, rng.uniform(k, noise_seed)[0])
            for k, each in enumerate(perturbation.theta)
        }
        boxes = getattr(target, "boxes", None)
        context = Context(self._bounds_of(given), motion=None if boxes is None else Motion())
        columns = theta_columns(perturbation, theta, inputs)
        disturbed = perturb(perturbation, inputs, columns, torch.from_numpy(noise_seed).to(given.device), context)[0]
        if boxes is not None and context.motion:
            target = _moved(target, context.motion)
        values = disturbed if given.is_floating_point() else disturbed.round()
        result = values.to(given.dtype)
        described = {**metadata, **{f"theta_{name}": float(value) for name, value in theta.items()}}
        return result if isinstance(picture, Tensor) else result.numpy(), target, described

    def _bounds_of(self, picture: Tensor) -> tuple[float, float]:
        low, high = self.bounds or picture_bounds(picture.numpy(force=True).dtype)
        least, most = (float(value) for value in picture.aminmax())
        if least < low or most > high:
            raise UsageError(f"pictures must lie in ({low:g}, {high:g}), got {least:g} to {most:g}: pass bounds=")
        return low, high


def as_augmentation(
    perturbation: str | Perturbation,
    *,
    bounds: tuple[float, float] | None = None,
    random_seed: int = 0,
    **theta: float,
) -> Augmentation:
    """A perturbation as an augmentation of MAITE: `as_augmentation("fog", density=0.3)`.

    Args:
        perturbation: As for `themis.run`; one that attacks the model is refused.
        bounds: The range of a picture; by default 0..255 for bytes, and 0..1 for floating-point numbers.
        random_seed: What a datum is disturbed by depends on this and on the id in its metadata, not on its batch.
        theta: Values of theta. Those that are not given are drawn from their range, for each datum anew.
    """
    chosen = choose_perturbation(perturbation)
    if chosen.needs_gradient or chosen.passes:
        raise UsageError(f"an augmentation cannot attack the model, which it does not know, got {chosen.name!r}")
    chosen.check_names(theta)
    words = ", ".join(f"{name}={value:g}" for name, value in theta.items())
    return Augmentation(
        chosen, theta, bounds, random_seed, {"id": f"themis {chosen.name}{f' ({words})' * bool(words)}"}
    )


def _drawn(theta: Theta, share: float) -> float:
    """The quantile of the values of theta."""
    if isinstance(theta.distribution, Distribution):
        return float(theta.distribution.value_at(share, theta.low, theta.high))
    return theta.low + share * (theta.high - theta.low)


def _moved(target: Any, motion: Motion) -> MovedTarget:
    """The target of a picture that has moved, without the objects that no model could be expected to find."""
    boxes, labels, scores = (torch.as_tensor(getattr(target, name)) for name in ("boxes", "labels", "scores"))
    moved, is_visible = moved_boxes(boxes.float().reshape(1, -1, 4), motion)
    return MovedTarget(moved[0][is_visible[0]], labels[is_visible[0]], scores[is_visible[0]])
