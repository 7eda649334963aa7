"""The CUDA graphs of a campaign's chunks: which of them runs which tests, and what was started ahead.

A graph is captured when tests of its kind and number are first run, and serves until the campaign ends.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from themis.measure.captured import CapturedChunk, Launch
from themis.measure.chunk import is_out_of_memory
from themis.measure.fold import Objective
from themis.measure.moments import Accumulator
from themis.measure.tests import Tests

FEW_ROWS, FEW_ASCENTS = 32, 128
"""Rows of a pass of few tests, of which a whole chunk would be mostly padding, and tests with a gradient that are few:
capturing another graph for these takes longer than it saves."""
OCCUPYING = 1 << 27
"""Activations of a pass that occupy a GPU: if `FEW_ROWS` tests have as many, a test takes about as long among them as
in a chunk. Ascents then always have that size, and so have other tests if they leave much of a chunk empty."""
LEAST_CHUNK, FEW_TESTS = 4 * FEW_ROWS, 0.625
"""The smallest chunk for which another graph pays, and the share of a chunk up to which tests are few."""
WIDE, WORTH, LONG = 4, 0.9, 10.0
"""This many chunks run as one where that takes at most this share of their time; it is not tried if one takes longer
than this, in milliseconds, since it then occupies the GPU."""

Capture = Callable[[int, bool], CapturedChunk | None]
"""Captures a chunk of so many rows, with a gradient or without; returns None if that is impossible."""


def rows_of_pass(n_tests: int, chunk: int, wide_chunk: int, *, ascends: bool, few_occupy: bool) -> int:
    """The rows of the forward pass in which the first of `n_tests` tests run.

    ascends: whether they have a gradient. few_occupy: whether `FEW_ROWS` tests occupy the GPU. wide_chunk: 0 if there
    is none.
    """
    if ascends:
        is_few = few_occupy or n_tests <= FEW_ASCENTS
    elif wide_chunk and n_tests >= wide_chunk:
        return wide_chunk
    else:
        is_few = few_occupy and chunk >= LEAST_CHUNK and n_tests <= FEW_TESTS * chunk
    return min(FEW_ROWS, chunk) if is_few else chunk


class Graphs:
    """All graphs of a calculator.

    The size of a graph follows from the number of tests, the chunk, the model and `wide_chunk`, which a run records, so
    that a resumed campaign runs its tests in passes of the same size.
    """

    def __init__(self, chunk: int, n_activations: int, wide_chunk: int | None) -> None:
        """`n_activations` are those of one test."""
        self._chunk, self._few_occupy = chunk, FEW_ROWS * n_activations >= OCCUPYING
        self.wide_chunk = wide_chunk
        """Tests per forward pass where many are pending; 0 if chunks are never joined, None before that is decided."""
        self._captured: dict[tuple[int, bool], CapturedChunk | None] = {}
        self._in_flight: dict[CapturedChunk, tuple[Accumulator, Launch]] = {}

    def choose(self, n_tests: int, chunk: int, capture: Capture, *, ascends: bool) -> CapturedChunk | None:
        """The graph that runs the first of `n_tests` tests; None if it cannot be captured, which is decided once."""
        if chunk != self._chunk:  # memory ran out
            self.drop()
            self._chunk, self.wide_chunk = chunk, 0
        if not ascends and self.wide_chunk is None and n_tests >= WIDE * chunk:
            self._decide_wide_chunk(capture)
        return self._graph(self._rows(n_tests, ascends), ascends, capture)

    def first(self, graph: CapturedChunk, tests: Tests) -> Tests:
        """The first of the tests, as many as are launched at once; the last of them may be left to a smaller graph."""
        n = len(tests)
        n_left = n % graph.chunk
        has_smaller = self._few_occupy or graph.chunk > self._chunk
        if has_smaller and self._rows(n_left, graph.ascends) < graph.chunk:
            n -= n_left
        return tests[: min(n, graph.most_tests)]

    def start(self, graph: CapturedChunk | None, tests: Tests, into: Accumulator, objective: Objective | None) -> None:
        """Start the first of some tests before anybody waits for them."""
        if graph is not None and into.count and graph not in self._in_flight:
            self._in_flight[graph] = (into, graph.launch(self.first(graph, tests), into, objective))

    def launch(self, graph: CapturedChunk, tests: Tests, into: Accumulator, objective: Objective | None) -> Launch:
        """Tests that have been launched: now, or ahead if they are what was started."""
        accumulator, launch = self._in_flight.pop(graph, (None, None))
        if launch is not None:
            if accumulator is into and launch.tests.equals(tests):
                return launch
            launch.done.synchronize()  # its buffers are used again
        return graph.launch(tests, into, objective)

    @property
    def overwritten(self) -> frozenset[str] | None:
        """The layers that the model overwrites; None before a graph was captured."""
        return next((graph.overwritten for graph in self._captured.values() if graph is not None), None)

    def drop(self) -> None:
        """Free all graphs and their memory, after what is in flight has ended."""
        for graph in self._captured.values():
            if graph is not None:
                torch.cuda.synchronize(graph.device)
        self._captured, self._in_flight = {}, {}

    def _rows(self, n_tests: int, ascends: bool) -> int:
        wide_chunk = 0 if ascends else self.wide_chunk or 0
        return rows_of_pass(n_tests, self._chunk, wide_chunk, ascends=ascends, few_occupy=self._few_occupy)

    def _graph(self, rows: int, ascends: bool, capture: Capture) -> CapturedChunk | None:
        if (rows, ascends) not in self._captured:
            self._captured[rows, ascends] = capture(rows, ascends)
        return self._captured[rows, ascends]

    def _decide_wide_chunk(self, capture: Capture) -> None:
        """Decide by measurement, once for a campaign, whether several chunks run as one."""
        self.wide_chunk, usual = 0, self._graph(self._chunk, False, capture)
        if usual is None or usual.steps.is_observed or usual.milliseconds() > LONG:
            return
        try:
            wide = capture(WIDE * self._chunk, False)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return
        if wide is not None and wide.milliseconds() <= WORTH * WIDE * usual.milliseconds():
            self.wide_chunk, self._captured[wide.chunk, False] = wide.chunk, wide
