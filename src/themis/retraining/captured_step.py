"""A training step on a GPU: captured once as a CUDA graph and then replayed for each batch.

A small model's step consists of hundreds of short kernels, and starting them one by one takes longer than running them.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_not

import torch
from torch import Tensor, nn

from themis.compute.rng import host_randomness
from themis.measure.captured import CaptureError, capturing
from themis.retraining.batches import TrainingBatch
from themis.retraining.weights import put_weights, take_weights

Step = Callable[[TrainingBatch], Tensor]
"""Trains on a batch; returns the outputs, which are valid until the next step."""


def can_capture(module: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether it is worth trying: all parameters are on one GPU, and no gradient is sparse."""
    devices = {parameter.device for parameter in parameters}
    has_sparse_gradient = any(getattr(submodule, "sparse", False) is True for submodule in module.modules())
    return len(devices) == 1 and next(iter(devices)).type == "cuda" and not has_sparse_gradient


def capture(
    step: Step,
    batch: TrainingBatch,
    module: nn.Module,
    optimiser: torch.optim.Optimizer,
    sums: Sequence[Tensor],
    device: torch.device,
) -> Step:
    """The step as a CUDA graph for batches of the same shapes; raises `CaptureError` if it cannot be captured.

    sums: what the step adds to, besides the module and the optimiser's state. All of them are left as they were.
    """
    given = TrainingBatch(*(values.clone() for values in batch))
    tensors = [*module.parameters(), *module.buffers()]
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
    try:
        with _unchanged(module, optimiser, sums, device):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                step(given)  # libraries choose their kernels, and the optimiser makes its state
                drawn = host_randomness()
                with _never_waiting():
                    step(given)
                if host_randomness() != drawn:
                    raise CaptureError("the step draws random numbers on the host, which a graph would repeat")
            graph, outputs = _record(lambda: step(given), stream, device)
            if any(map(is_not, [*module.parameters(), *module.buffers()], tensors)):
                raise CaptureError("the module replaces its buffers, and the graph would not find the new ones")
    except Exception as error:  # whatever a user's module or loss raises: the plain step raises it again
        problem = str(error)
    else:
        return lambda batch: _replay(graph, given, batch, outputs)
    torch.cuda.synchronize(device)
    gc.collect()  # the error held the gradients of the step that failed, which belong to the stream that is given up
    raise CaptureError(problem)


def _replay(graph: torch.cuda.CUDAGraph, given: TrainingBatch, batch: TrainingBatch, outputs: Tensor) -> Tensor:
    for static, values in zip(given, batch, strict=True):
        static.copy_(values)
    graph.replay()
    return outputs


def _record(
    run: Callable[[], Tensor], stream: torch.cuda.Stream, device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Capture a graph; what is not captured must find as much memory beside it."""
    torch.cuda.empty_cache()
    reserved, graph = torch.cuda.memory_reserved(device), torch.cuda.CUDAGraph()
    with capturing(graph, stream, device):
        outputs = run()
    torch.cuda.synchronize(device)
    if torch.cuda.mem_get_info(device)[0] < torch.cuda.memory_reserved(device) - reserved:
        raise CaptureError("the graph leaves too little memory for the rest of the training")
    return graph, outputs


@contextmanager
def _unchanged(
    module: nn.Module, optimiser: torch.optim.Optimizer, sums: Sequence[Tensor], device: torch.device
) -> Iterator[None]:
    """Restore weights, buffers, the optimiser's state, sums and random numbers on exit.

    A state that the optimiser did not have before becomes zero, which is how all of ours begin.
    """
    weights = take_weights(module)
    kept = {id(tensor): tensor.clone() for tensor in (*_state(optimiser), *sums)}
    try:
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            yield
    finally:
        put_weights(module, weights)
        for tensor in (*_state(optimiser), *sums):
            tensor.copy_(kept[id(tensor)]) if id(tensor) in kept else tensor.zero_()
        optimiser.zero_grad()


def _state(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimiser.state.values() for value in state.values() if isinstance(value, Tensor)]


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Operations that wait for the GPU raise an error: found here, they do not break off a capture."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode may overlook operations; the capture then fails
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
