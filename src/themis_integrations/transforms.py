"""Transforms of albumentations and torchvision as perturbations: `albumentations:GaussNoise(std_range=(0, 0.2))`.

Arguments that are a pair `(LOW, HIGH)` become theta: those from which the transform would draw a value, and single
numbers, such as the `sigma` of torchvision's `GaussianNoise`.
"""

import importlib
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.compute.rng import Rng
from themis.data.files import Numbers
from themis.errors import MissingExtraError, UsageError, first_line, nearest
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, Theta
from themis.target.loaders.factory import read_call

SAMPLE_PICTURE = np.full((32, 32, 3), 0.5, np.float32)
"""A grey picture on which every transform is tried."""
N_TRANSFORM_SEEDS = 1 << 24
"""Number of seeds for a transform's random numbers, as many as a uniform float32 can distinguish."""
EXAMPLE = "albumentations:GaussNoise(std_range=(0, 0.2))"


class Library(NamedTuple):
    """How the transforms of a package are found, made and called."""

    module: str
    base: str
    """The class that all of them have as a base."""
    stays: Callable[[type], bool]
    """Whether everything in a picture stays where it is."""
    make: Callable[[type, dict[str, Any]], Any]
    apply: Callable[[Any, Numbers, int], Any]
    """`(transform, picture [height, width, channels], seed) -> picture`."""


def _make_albumentations(kind: type, arguments: dict[str, Any]) -> Any:
    return kind(**{"p": 1.0, **arguments}, strict=True)  # strict: unknown arguments are errors


def _apply_albumentations(transform: Any, picture: Numbers, seed: int) -> Any:
    transform.set_random_seed(seed)
    return transform(image=picture)["image"]


def _apply_torchvision(transform: Any, picture: Numbers, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transform(torch.from_numpy(picture).movedim(-1, 0)).movedim(0, -1).numpy()


LIBRARIES = {
    "albumentations": Library(
        "albumentations",
        "BasicTransform",
        lambda kind: any(base.__name__ == "ImageOnlyTransform" for base in kind.__mro__),
        _make_albumentations,
        _apply_albumentations,
    ),
    "torchvision": Library(
        "torchvision.transforms.v2",
        "Transform",
        lambda kind: not kind.__module__.endswith("._geometry"),
        lambda kind, arguments: kind(**arguments),
        _apply_torchvision,
    ),
}


def albumentations(name: str, arguments: str) -> Perturbation:
    """The perturbation `albumentations:NAME(ARGUMENTS)`."""
    return _read_transform("albumentations", name, arguments)


def torchvision(name: str, arguments: str) -> Perturbation:
    """The perturbation `torchvision:NAME(ARGUMENTS)`."""
    return _read_transform("torchvision", name, arguments)


def _read_transform(package: str, name: str, arguments: str) -> Perturbation:
    library, spec = LIBRARIES[package], f"{package}:{name}({arguments.strip()})"
    kind = _find(package, library, name)
    call = read_call(spec, "perturb")
    ranges = {key: value for key, value in call.kwargs.items() if _is_range(value)}
    if call.args or not ranges:
        raise UsageError(f"{spec} must name its arguments and give one a range, which becomes theta, as in {EXAMPLE}")
    lows, highs = ({key: value[end] for key, value in ranges.items()} for end in (0, 1))

    def make(values: dict[str, float], *, is_pair: bool = True) -> Any:
        given = {key: (value, value) if is_pair else value for key, value in values.items()}
        return library.make(kind, {**call.kwargs, **given})

    def reason_against(make: Callable[[dict[str, float]], Any]) -> Exception | None:
        try:
            for values in (lows, highs):
                library.apply(make(values), SAMPLE_PICTURE, 0)
        except Exception as error:  # whatever the package raises
            return error
        return None

    if error := reason_against(make):
        single = partial(make, is_pair=False)
        if reason_against(single):
            text = " ".join(str(error).split())
            raise UsageError(f"{spec} must be a transform of pictures: {text[:200]}; correct its arguments") from error
        make = single
    may_be_whole = [key for key, ends in ranges.items() if all(type(end) is int for end in ends)]
    whole = {key for key in may_be_whole if _is_whole(make, lows, key)}

    def apply(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
        pictures = inputs.detach().cpu().movedim(1, -1).contiguous().numpy()
        seeds, changed = (rng.uniform(1) * N_TRANSFORM_SEEDS).long().flatten().tolist(), []
        for picture, row, seed in zip(pictures, theta.tolist(), seeds, strict=True):
            values = {key: round(value) if key in whole else value for key, value in zip(ranges, row, strict=True)}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as that the size of a kernel was made odd
                result = np.asarray(library.apply(make(values), picture, seed))
            changed.append(torch.from_numpy(result if result.ndim == 3 else result[..., None]).movedim(-1, 0))
        return torch.stack(changed).to(inputs)

    apply.__module__, apply.__qualname__ = kind.__module__, kind.__qualname__
    apply.__doc__ = f"The transform {name} of {package}."
    theta = tuple(
        Theta(
            key.removesuffix("_range").removesuffix("_limit"),
            float(low),
            float(high),
            float(min(max(0, low), high)),
            key,
        )
        for key, (low, high) in ranges.items()
    )
    moves: Any = False if library.stays(kind) else None
    return Perturbation(spec, theta, apply, inputs="picture", is_smooth=False, has_identity=False, moves=moves)


def _find(package: str, library: Library, name: str) -> type:
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it would look for a newer version on the internet
    try:
        module = importlib.import_module(library.module)
    except Exception as error:  # such as torchvision's operators that another torch does not have
        extra = ' with the extra "transforms" (pip install "themis-dl[transforms]")' * (package == "albumentations")
        raise MissingExtraError(
            f"{package}:{name} needs {package}, which cannot be imported ({first_line(error)}): install it{extra}"
        ) from error
    base: type = getattr(module, library.base)
    known = {key: value for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, base)}
    if name not in known:
        raise UsageError(f"{package}:{name} must be a transform of {package}: {nearest(name, known)}")
    return known[name]


def _is_range(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(type(end) in (int, float) for end in value)
        and (value[0] < value[1])
    )


def _is_whole(make: Callable[[dict[str, float]], Any], lows: dict[str, float], key: str) -> bool:
    """Whether an argument takes only whole numbers."""
    try:
        make({**lows, key: lows[key] + 0.5})
    except Exception:  # whatever the package raises
        return True
    return False
