"""The moments of sensitivities that are all at hand."""

from torch import Tensor

from themis.measure.moments import Moments


def moments_of(chunk: Tensor) -> Moments:
    """The moments of sensitivities `[tests, neurons]`."""
    if len(chunk) == 0:
        return Moments.empty(chunk.shape[1], chunk.device)
    # Deviations from the first test: common values cancel exactly, so a constant neuron has M2 = 0.
    first = chunk[0]
    deviations = chunk - first
    sums = deviations.sum(0)
    squares = deviations.square_().sum(0)
    return Moments.from_sums(len(chunk), first, sums, squares)
