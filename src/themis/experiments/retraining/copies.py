"""The copy of a model that is trained: which models can be, which of its parameters are, and in which types."""

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
    """Refuse what has no weights that can be trained."""
    what = None
    if not isinstance(target, Target):
        what = f"a {type(target).__name__}, which shows no weights"
    elif isinstance(target.module, torch.jit.ScriptModule):
        what = "a TorchScript program"
    elif is_exported(target.module):
        what = "an exported program, whose graph is that of evaluation"
    elif not any(each.is_floating_point() for each in target.module.parameters()):
        what = f"a {type(target.module).__name__} without parameters"
    if what is not None:
        raise UsageError(
            f"retraining needs a PyTorch model, got {what}: give the nn.Module that it was made from, with its weights"
        )


def check_layers(module: nn.Module, globs: list[str] | None) -> None:
    """Refuse globs that match no parameter."""
    named = _trainable(module)
    for glob in globs or ():
        if not any(fnmatchcase(name, glob) for name in named):
            raise UsageError(f"layers must match names of parameters, {glob!r} matches none: {nearest(glob, named)}")


def choose_parameters(module: nn.Module, globs: list[str] | None) -> list[nn.Parameter]:
    """The parameters that are trained; all others are fixed."""
    check_layers(module, globs)
    chosen = []
    for name, each in _trainable(module).items():
        is_chosen = globs is None or any(fnmatchcase(name, glob) for glob in globs)
        each.requires_grad_(is_chosen)
        chosen += [each] if is_chosen else []
    return chosen


@contextmanager
def copied(target: Target) -> Iterator[Target]:
    """The target around a copy of its module, in float32 where it has less; in the end with its own types and flags."""
    try:
        module = copy.deepcopy(target.module)
    except Exception as error:  # whatever a user's module holds
        raise ModelError(
            f"the model must be one that can be copied to be trained, it raised {type(error).__name__}: {error}; "
            "remove hooks and handles from it, or give a plain nn.Module"
        ) from error
    tensors = [*module.parameters(), *module.buffers()]
    as_they_were = [(each, each.dtype, each.requires_grad) for each in tensors]
    modes = [(each, each.training) for each in module.modules()]
    _cast((each, torch.float32) for each in tensors if each.dtype in HALF)
    yield replace(target, module=module)
    for each, is_training in modes:
        each.training = is_training
    for tensor, _, requires_grad in as_they_were:
        tensor.grad = None
        tensor.requires_grad_(requires_grad)
    _cast((each, dtype) for each, dtype, _ in as_they_were)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in module.named_parameters() if each.is_floating_point()}


def _cast(tensors: Iterable[tuple[Tensor, torch.dtype]]) -> None:
    for tensor, dtype in tensors:
        if tensor.dtype != dtype:
            tensor.data = tensor.data.to(dtype)
