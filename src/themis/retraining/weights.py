"""The copy of a model that is trained: which parameters, in which types, and its checkpoint after each epoch."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.errors import ModelError, StoreError, ThemisError, UsageError, nearest
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.reading import open_regular
from themis.retraining.grading import name_loss
from themis.retraining.material import Material
from themis.retraining.recipe import FRONTIER_OPTIONS, Recipe
from themis.runs.store.files import explained, write_file
from themis.target.compiled import is_exported
from themis.target.fingerprint import hash_tensors, hash_text
from themis.target.ledger import Ledger
from themis.target.target import AnyTarget, Target

CHECKPOINT_FILE = "checkpoint.pt"
FORMAT = 3
"""Of what a checkpoint holds; one of another format belongs to another training."""
Weights = dict[str, Tensor]
"""All parameters and buffers, on the CPU."""
State = dict[str, Any]
"""Plain data and tensors."""


def check_trainable(target: AnyTarget) -> None:
    """Raise an error if a target has no weights that can be trained."""
    module = target.module if isinstance(target, Target) else None
    is_program = module is not None and (isinstance(module, torch.jit.ScriptModule) or is_exported(module))
    if module is None or is_program or not _trainable(module):
        kind = type(target if module is None else module).__name__
        raise UsageError(
            "retraining needs a PyTorch module with parameters that is not a TorchScript or exported program, got a "
            f"{kind}: give the nn.Module that it was made from, with its weights"
        )


def choose_parameters(module: nn.Module, globs: list[str] | None) -> list[nn.Parameter]:
    """The parameters to train: those whose names match a glob pattern, each of which must match some.

    Without patterns, parameters that the model's author froze stay frozen, unless all of them are, as for inference.
    """
    named = _trainable(module)
    if globs is None:
        return [parameter for parameter in named.values() if parameter.requires_grad] or list(named.values())
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in named):
            raise UsageError(
                f"layers must match the names of parameters, but {glob!r} matches none: {nearest(glob, named)}"
            )
    return [parameter for name, parameter in named.items() if any(fnmatchcase(name, glob) for glob in globs)]


@contextmanager
def trainable_copy(target: Target) -> Iterator[Target]:
    """The target with a copy of its module, half precision raised to float32; types and flags are restored on exit."""
    try:
        module = copy.deepcopy(target.module)
    except Exception as error:  # whatever a user's module raises
        raise ModelError(
            f"the model must support copying to be trained, but it raised {type(error).__name__}: {error}; "
            "remove hooks and handles from it, or give a plain nn.Module"
        ) from error
    flags = [(tensor, tensor.dtype, tensor.requires_grad) for tensor in _named_tensors(module).values()]
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    for tensor, dtype, _ in flags:
        if dtype in (torch.float16, torch.bfloat16):
            tensor.data = tensor.data.float()
    yield replace(target, module=module)
    for submodule, is_training in modes:
        submodule.training = is_training
    for tensor, dtype, requires_grad in flags:
        tensor.grad = None
        tensor.requires_grad_(requires_grad)
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)


@contextmanager
def channels_last(module: nn.Module, answer: Callable[[], Tensor]) -> Iterator[None]:
    """Lay out the weights of convolutions as a GPU computes fastest, unless the model cannot `answer` and learn then.

    A model that views an activation, `x.view(n, -1)`, needs the channels first.
    """
    convolutions = [each for each in module.modules() if type(each) is nn.Conv2d and each.weight.is_contiguous()]
    _lay_out(convolutions, torch.channels_last)
    module.eval()
    can_learn = True
    try:
        answer().float().sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, ThemisError):
        can_learn = False
    if not can_learn:
        gc.collect()  # the error may hold gradients of this stream, with which no step can be captured on another one
        _lay_out(convolutions, torch.contiguous_format)
    for parameter in module.parameters():
        parameter.grad = None
    yield
    _lay_out(convolutions, torch.contiguous_format)


def _lay_out(convolutions: list[nn.Conv2d], layout: torch.memory_format) -> None:
    for convolution in convolutions:
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=layout)


def take_weights(module: nn.Module) -> Weights:
    """A copy of all parameters and buffers."""
    return {name: tensor.detach().cpu().clone() for name, tensor in _named_tensors(module).items()}


def put_weights(module: nn.Module, weights: Weights) -> None:
    """Copy weights into a module, converted to the types of the module."""
    with torch.no_grad():
        for name, tensor in _named_tensors(module).items():
            tensor.copy_(weights[name])


def interpolate(old: Weights, new: Weights, share: float) -> Weights:
    """Weights a share of the way from old to new ones; whole numbers, such as counts of batches, are the new ones."""
    if share in (0, 1):
        return old if share == 0 else new
    return {
        name: torch.lerp(old[name], tensor, share) if tensor.is_floating_point() else tensor
        for name, tensor in new.items()
    }


def training_key(
    target: Target,
    material: Material,
    perturbations: Mapping[str, Perturbation],
    recipe: Recipe,
    oracle: Oracle,
    ledger: Ledger,
) -> str:
    """Identifies a training by everything that its weights depend on, except for devices and versions."""
    tensors = {
        "disturbed": material.disturbed,
        "labels": material.disturbed_labels,
        "seed": material.seed,
        "seeds": torch.from_numpy(ledger.hashes.view(np.int64)),
        **({} if material.groups is None else {"groups": torch.from_numpy(np.concatenate(material.groups))}),
    }
    cases = [
        (name, perturbation.name, [(theta.name, theta.low, theta.high) for theta in perturbation.theta])
        for name, perturbation in perturbations.items()
    ]
    options = {name: value for name, value in recipe.as_dict().items() if name not in FRONTIER_OPTIONS}
    if not recipe.shortens(perturbations.values()):
        del options["attack_steps"]  # it has no effect
    parts = [FORMAT, options, cases, oracle.spec(), target.fingerprint(), hash_tensors(tensors)]
    return hash_text(json.dumps(parts if material.loss is None else [*parts, name_loss(material.loss)]))


def save(folder: Path, state: State) -> None:
    """Write a checkpoint, replacing the previous one."""
    with explained(folder):
        folder.mkdir(exist_ok=True)  # not its parents: the folder of the retraining may have been deleted
        content = BytesIO()
        torch.save(state, content)
        write_file(folder / CHECKPOINT_FILE, content.getvalue())


def load(folder: Path, key: str) -> State | None:
    """The state from which a training resumes; None if there is no checkpoint."""
    path = folder / CHECKPOINT_FILE
    try:
        with open_regular(path) as file:
            state: State = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise ValueError("it holds no state")
    except FileNotFoundError:
        return None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{path} must be the checkpoint of a training, but it is damaged: remove it to start again"
        ) from error
    if state.get("key") != key:
        raise UsageError(
            f"{path} must belong to this training, but it is from one with another model, material or recipe: give "
            "another folder, or remove the file to start again"
        )
    return state


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.is_floating_point()}
