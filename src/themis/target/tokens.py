"""Noticing token ids: whole numbers that a model looks up in a table of embeddings, and that cannot be disturbed."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from themis.errors import NO_TEXT, DataError

if TYPE_CHECKING:
    from themis.target.target import AnyTarget


def refuse_tokens(target: AnyTarget, example: Tensor) -> None:
    """Raise an error if the model takes the values of an input `[tokens]` for the rows of an embedding.

    Only models with embeddings, and only whole numbers that could be such rows, are tried.
    """
    module = getattr(target, "module", None)
    if not isinstance(module, nn.Module) or example.ndim != 1 or len(example) < 2:
        return
    embeddings = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    if not embeddings or not bool(((example >= 0) & (example == example.round())).all()):
        return
    seen: list[Tensor] = []

    def look(part: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.extend(value.detach().cpu() for value in inputs if isinstance(value, Tensor))

    with ExitStack() as stack, torch.no_grad(), suppress(Exception):  # the model may refuse floating-point numbers
        for part in embeddings:
            stack.callback(part.register_forward_pre_hook(look).remove)
        module(example[None].to(target.device))
    rows = example.cpu().double()
    if any(value.numel() == len(rows) and torch.equal(value.flatten().double(), rows) for value in seen):
        raise DataError(
            f"inputs must be numbers that can vary, got token ids such as {rows[:4].int().tolist()}: {NO_TEXT}"
        )
