"""The copy of a model that is trained: which models can be trained, which of their parameters, and in which types."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from themis.errors import ModelError, UsageError, nearest
from themis.target.compiled import is_exported
from themis.target.target import AnyTarget, Target

HALF = (torch.float16, torch.bfloat16)


def check_trainable(target: AnyTarget) -> None:
    """Raise an error if a target has no weights that can be trained."""
    problem = None
    if not isinstance(target, Target):
        problem = f"a {type(target).__name__}, whose weights are not visible"
    elif isinstance(target.module, torch.jit.ScriptModule):
        problem = "a TorchScript program"
    elif is_exported(target.module):
        problem = "an exported program, whose graph is fixed to evaluation mode"
    elif not any(parameter.is_floating_point() for parameter in target.module.parameters()):
        problem = f"a {type(target.module).__name__} without parameters"
    if problem is not None:
        raise UsageError(
            f"retraining needs a PyTorch model, got {problem}: give the nn.Module that it was made from, with its "
            "weights"
        )


def check_layers(module: nn.Module, globs: list[str] | None) -> None:
    """Raise an error if a glob pattern matches no parameter."""
    names = _trainable(module)
    for glob in globs or ():
        if not any(fnmatchcase(name, glob) for name in names):
            raise UsageError(
                f"layers must match the names of parameters, but {glob!r} matches none: {nearest(glob, names)}"
            )


def choose_parameters(module: nn.Module, globs: list[str] | None) -> list[nn.Parameter]:
    """Choose the parameters to train and freeze all others.

    Without patterns, parameters that the model's author froze stay frozen, unless all of them are, as for inference.
    """
    check_layers(module, globs)
    chosen, trainable = [], _trainable(module)
    are_all_frozen = not any(parameter.requires_grad for parameter in trainable.values())
    for name, parameter in trainable.items():
        if globs is None:
            is_chosen = are_all_frozen or parameter.requires_grad
        else:
            is_chosen = any(fnmatchcase(name, glob) for glob in globs)
        parameter.requires_grad_(is_chosen)
        chosen += [parameter] if is_chosen else []
    return chosen


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
    tensors = [*module.parameters(), *module.buffers()]
    flags = [(tensor, tensor.dtype, tensor.requires_grad) for tensor in tensors]
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    _cast((tensor, torch.float32) for tensor in tensors if tensor.dtype in HALF)
    yield replace(target, module=module)
    for submodule, is_training in modes:
        submodule.training = is_training
    for tensor, _, requires_grad in flags:
        tensor.grad = None
        tensor.requires_grad_(requires_grad)
    _cast((tensor, dtype) for tensor, dtype, _ in flags)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.is_floating_point()}


def _cast(tensors: Iterable[tuple[Tensor, torch.dtype]]) -> None:
    for tensor, dtype in tensors:
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
