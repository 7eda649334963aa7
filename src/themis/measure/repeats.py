"""Checks of a model before a campaign: the answer to an input must depend on this input alone."""

from __future__ import annotations

import torch
from torch import Tensor

from themis.compute.rng import host_randomness
from themis.errors import ModelError, warn
from themis.measure.calculator import Calculator
from themis.measure.chunk import pass_size
from themis.target.target import Target

N_REPEATED, N_ALONE = 2, 2
"""Clean inputs that are run again by a black box, and that are run alone by any model."""
REPEATED_DIVISOR = 4
"""On a CPU, `check_repeats` runs one in this many tests of the first chunk again, and all of them only in case of
doubt."""
SETTLING_PASSES = 3
"""Passes of one shape after which the choice of kernels is settled even if memory is short."""
REPEAT_TOLERANCE = 1e-4
"""Largest difference between two runs that counts as rounding, as a share of the largest output; GPU kernels can
vary."""
BATCH_TOLERANCE, ROUGH_BATCH_TOLERANCE = 1e-3, 2e-2
"""Largest difference between an input alone and in a batch that counts as rounding, as a share of the largest output.
The second is for 16-bit models and for GPUs, whose convolutions round float32 to TF32, which is as rough. Dynamic
quantisation to int8 causes about 5e-3."""


def check_repeats(calculator: Calculator) -> None:
    """Refuse a model whose answers to the same inputs differ from one run to the next.

    Many faults of such a model would not be caused by the disturbances.
    """
    target, clean, swept = calculator.target, calculator.clean.outputs, calculator.chunk
    rows = calculator.clean.usable[:N_REPEATED]
    calculator.passes += 2 * len(rows)
    with torch.no_grad():
        if isinstance(target, Target):  # each row of the first chunk may reveal a difference
            first, second = calculator.memory.attempt(lambda: _repeat_first_chunk(calculator, swept))
        else:
            inputs = calculator.read(rows)
            first, second = (target.forward(inputs).float() for _ in range(2))
    difference = _difference(first, second, clean)
    if difference > REPEAT_TOLERANCE:
        n_different = int(((first - second).flatten(1).abs().amax(1) > 0).sum())
        raise ModelError(
            f"the model must give the same output for the same input, but {n_different} of {len(first)} outputs "
            f"differ between two runs, by up to {difference:.2g} of the largest output: switch off what is random, "
            "such as functional dropout without training=self.training, noise layers or sampling"
        )


def _repeat_first_chunk(calculator: Calculator, swept: int) -> tuple[Tensor, Tensor]:
    """The outputs of the first clean inputs in the sweep, in chunks of `swept`, and in another pass.

    On a CPU, a part of the chunk suffices if the model draws no random numbers from the usual generators and the
    answers agree; if not, the other shape or batch may be the reason. If the chunk has been halved since the sweep,
    both passes are run at the new size, because shapes round differently. If memory is short, cuDNN uses other kernels,
    which round differently: then successive passes are compared until the choice has settled.
    """
    target, clean, chunk = calculator.target, calculator.clean.outputs, calculator.chunk

    def run_first(size: int) -> tuple[Tensor, Tensor]:
        """Run the first clean inputs; return the rows of the pass and their outputs."""
        rows = torch.arange(size, device=target.device).clamp(max=len(clean) - 1)
        return rows, target.forward(calculator.read(rows)).float()

    if target.device.type == "cpu" and chunk == swept:
        before = host_randomness()
        rows, outputs = run_first(pass_size(-(-chunk // REPEATED_DIVISOR), chunk, target.device))
        if host_randomness() == before and _difference(clean[rows], outputs, clean) <= REPEAT_TOLERANCE:
            return clean[rows], outputs
    rows, outputs = run_first(chunk)
    first = clean[rows] if chunk == swept else run_first(chunk)[1]
    for _ in range(SETTLING_PASSES if calculator.memory.is_short or target.device.type != "cpu" else 0):
        if _difference(first, outputs, clean) <= REPEAT_TOLERANCE:
            break
        first, outputs = outputs, run_first(chunk)[1]
    return first, outputs


def warn_of_batch_dependence(calculator: Calculator) -> None:
    """Warn if the answer to an input depends on the other inputs of its batch by more than rounding."""
    if len(calculator.inputs) == 1:
        return
    target, clean, rows = calculator.target, calculator.clean.outputs, calculator.clean.usable[:N_ALONE]
    calculator.passes += len(rows)
    try:
        with torch.no_grad():
            alone = torch.cat([target.forward(calculator.read(row)) for row in torch.split(rows, 1)])
    except ModelError:  # it does not accept an input alone
        return
    difference = _difference(alone.float(), clean[rows], clean)
    has_few_bits = target.dtype.itemsize <= 2 or getattr(target, "autocast", None) is not None
    has_few_bits |= target.device.type == "cuda" and target.dtype == torch.float32
    if difference > (ROUGH_BATCH_TOLERANCE if has_few_bits else BATCH_TOLERANCE):
        warn(
            f"the answer to an input depends on the other inputs of its batch: alone, outputs differ by up to "
            f"{difference:.2%} of the largest output. Dynamic quantisation and batch statistics do that. A fault may "
            "be due to its neighbours, and replays may differ: use static quantisation, or test a function that "
            "predicts one input at a time with themis.BlackBox(predict, batch_size=1)"
        )


def _difference(first: Tensor, second: Tensor, clean: Tensor) -> float:
    """The largest difference between outputs, as a share of the largest clean output."""
    scale = clean.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return float((first - second).abs().amax() / scale)
