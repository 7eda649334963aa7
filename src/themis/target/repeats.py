"""Checks of a model before a campaign: the answer to an input must depend on this input alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from themis.compute.rng import host_randomness
from themis.errors import ModelError
from themis.target.blackbox import fresh_answers
from themis.target.target import AnyTarget, Target

REPEATED = 2
"""Clean inputs of a black box that `check_repeats` is given."""
REPEATED_PART = 4
"""On a CPU, it runs this part of the first chunk again, and the whole chunk only if that leaves a doubt."""
SETTLING_PASSES = 3
"""Passes of one shape after which the same kernels are used where memory is short."""
REPEAT_TOLERANCE = 1e-4
"""Difference of two runs, as a share of the largest output, that rounding may cause: GPU kernels can vary."""
ALONE = 2
"""Clean inputs that `batch_dependence` is given."""
BATCH_TOLERANCE, ROUGH_BATCH_TOLERANCE = 1e-3, 2e-2
"""Difference between an input alone and in a batch, as a share of the largest output, that rounding may cause; the
second is for models with 16 bits, and for GPUs, whose convolutions round float32 to TF32 with as many. Dynamic
quantisation to int8 causes about 5e-3."""

Result = TypeVar("Result")
Read = Callable[[Tensor], Tensor]
"""Returns the clean inputs of the seeds `rows`, which the target runs next."""


class Chunks(Protocol):
    """How many inputs go through the model at once."""

    chunk: int
    is_short: bool
    """Whether memory has run out."""

    def attempt(self, work: Callable[[], Result]) -> Result:
        """Return what `work` returns; while memory runs out, halve the chunk and try again."""

    def pass_size(self, n_tests: int) -> int:
        """Rows of a forward pass of so many inputs."""


def check_repeats(target: AnyTarget, read: Read, clean: Tensor, rows: Tensor, chunks: Chunks) -> None:
    """Refuse a model whose answers to the same inputs differ from one run to the next.

    Such a model would be full of faults that no disturbance caused. clean: the clean outputs. rows: the seeds that a
    black box runs twice.
    """
    swept = chunks.chunk
    with torch.no_grad(), fresh_answers(target):
        if isinstance(target, Target):  # the first chunk again: every row is an independent chance to differ
            first, second = chunks.attempt(lambda: _repeat_first_chunk(target, read, clean, chunks, swept))
        else:
            inputs = read(rows)
            first, second = (target.forward(inputs).float() for _ in range(2))
    difference = _difference(first, second, clean)
    if difference > REPEAT_TOLERANCE:
        n_different = int(((first - second).flatten(1).abs().amax(1) > 0).sum())
        raise ModelError(
            f"the model must give the same output for the same input, but {n_different} of {len(first)} outputs "
            f"differ between two runs, by up to {difference:.2g} of the largest output: switch off what is random, "
            "such as functional dropout without training=self.training, noise layers or sampling"
        )


def _repeat_first_chunk(target: Target, read: Read, clean: Tensor, chunks: Chunks, swept: int) -> tuple[Tensor, Tensor]:
    """The outputs of the first clean inputs: of the sweep, in chunks of `swept`, and of another pass.

    On a CPU, a part of the chunk suffices if the model draws no random numbers from the usual generators and the
    answers agree; they may also differ because another shape rounds differently, or another batch matters. If the
    chunk has been halved since, both are of passes of this size, for the same reason. Where memory is short, cuDNN
    falls back to kernels that need less of it and round differently: then passes that follow one another are compared,
    until the choice has settled.
    """

    def run_first(size: int) -> tuple[Tensor, Tensor]:
        """The rows of a pass of the first clean inputs, and their outputs."""
        rows = torch.arange(size, device=target.device).clamp(max=len(clean) - 1)
        return rows, target.forward(read(rows)).float()

    chunk = chunks.chunk
    if target.device.type == "cpu" and chunk == swept:
        before = host_randomness()
        rows, outputs = run_first(chunks.pass_size(-(-chunk // REPEATED_PART)))
        if host_randomness() == before and _difference(clean[rows], outputs, clean) <= REPEAT_TOLERANCE:
            return clean[rows], outputs
    rows, outputs = run_first(chunk)
    first = clean[rows] if chunk == swept else run_first(chunk)[1]
    for _ in range(SETTLING_PASSES if chunks.is_short or target.device.type != "cpu" else 0):
        if _difference(first, outputs, clean) <= REPEAT_TOLERANCE:
            break
        first, outputs = outputs, run_first(chunk)[1]
    return first, outputs


def batch_dependence(target: AnyTarget, read: Read, clean: Tensor, rows: Tensor) -> float | None:
    """How much the outputs of the seeds `rows` alone differ from those in a batch, as a share of the largest output.

    None if they agree, but for rounding, or if the model does not accept an input alone.
    """
    try:
        with torch.no_grad(), fresh_answers(target):
            alone = torch.cat([target.forward(read(rows[k : k + 1])) for k in range(len(rows))])
    except ModelError:
        return None
    difference = _difference(alone.float(), clean[rows], clean)
    has_few_bits = target.dtype.itemsize <= 2 or getattr(target, "autocast", None) is not None
    has_few_bits |= target.device.type == "cuda" and target.dtype == torch.float32
    tolerance = ROUGH_BATCH_TOLERANCE if has_few_bits else BATCH_TOLERANCE
    return difference if difference > tolerance else None


def _difference(first: Tensor, second: Tensor, clean: Tensor) -> float:
    """The largest difference between outputs, as a share of the largest clean output."""
    scale = clean.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return float((first - second).abs().amax() / scale)
