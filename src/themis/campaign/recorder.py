"""The recorder: keeps faults, rounds and checkpoints, and informs callbacks once they are on disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.campaign.callback import Callbacks
from themis.campaign.interrupt import Interrupts
from themis.campaign.setup import SeedFacts, Setup
from themis.data.seeds import Seeds
from themis.errors import StoreError
from themis.measure.runner import Measurement
from themis.measure.tests import Tests
from themis.runs.faults import Faults
from themis.runs.run import Round, Run, Start
from themis.runs.store.tensors import NewTensors
from themis.runs.store.writer import Checkpoint, Writer

LARGE = 1 << 20
"""Bytes of disturbed inputs from which on choosing those worth keeping takes less time than handling all of them."""


class Recorder:
    """Owns what outlives a chunk: the faults in memory, the store if there is one, and the callbacks."""

    def __init__(self, faults: Faults, callbacks: Callbacks, store: Writer | None) -> None:
        self.faults, self.callbacks, self.store = faults, callbacks, store
        self._events: deque[tuple[int, str, Any]] = deque()
        """What callbacks will be informed of, each with the number of its addition to the store."""
        self.interrupts = Interrupts()
        self.is_torn = False

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """A block whose changes belong together: Ctrl-C waits for its end, and an error in it prevents a checkpoint."""
        with self.interrupts.deferred():
            self.is_torn = True
            yield
            self.is_torn = False

    def start(self, start: Start, samples: Callable[[], dict[str, Any]]) -> None:
        """Record the start of a campaign, and by which tests its model is known again."""
        if self.store:
            self.store.note("samples", samples())
            self.store.note("start", start.as_dict())
        self.callbacks.call("on_start", start)

    def add_faults(self, setup: Setup, tests: Tests, measurement: Measurement, round: int, stream: str) -> None:
        """Take the faults among `tests`; they are written by `keep`."""
        columns, tensors, addition = None, None, 0
        if len(measurement.faults):
            columns = fault_columns(tests, measurement, setup.facts, round, stream)
            self.faults.add(**columns)
            if self.store:
                tensors = fault_tensors(self.store, columns, tests, measurement, setup.seeds, setup.drawn_outputs)
        if self.store:
            addition = self.store.add_faults(int(tests.number[-1]) + 1, columns, tensors)
        if columns is not None and self.callbacks.wants("on_fault"):
            self._events += [(addition, "on_fault", fault) for fault in self.faults.latest()]

    def add_round(self, round: Round) -> None:
        """Take a finished round; it is written by `keep`."""
        addition = self.store.add_round(round) if self.store else 0
        self._events.append((addition, "on_round", round))

    def keep(self, checkpoint: Callable[[], Checkpoint] | None, *, now: bool = False) -> None:
        """Begin to write faults, rounds and a checkpoint, if they are due or `now`; see `Writer.flush`."""
        if self.store:
            with self.interrupts.deferred():
                n_stored = self.store.flush(checkpoint, now=now)
        self._inform(n_stored if self.store else 0)

    def finish(self) -> None:
        """Wait until everything that `keep` began to write is on disk."""
        if self.store:
            with self.interrupts.deferred():
                n_stored = self.store.wait()
        self._inform(n_stored if self.store else 0)

    def _inform(self, n_stored: int) -> None:
        """Inform the callbacks of what is on disk."""
        while self._events and self._events[0][0] <= n_stored:
            _, name, value = self._events.popleft()
            self.callbacks.call(name, value)

    def end(self, run: Run) -> None:
        """Record the result of a campaign."""
        if self.store:
            self.store.end(run.summary())
        self.callbacks.call("on_end", run)

    def fail(self, error: Exception, conclude: Callable[[], Run]) -> None:
        """Record a failure of the model, the disk or Themis; `conclude` makes the result of what was found so far."""
        if self.store and not isinstance(error, StoreError):
            with suppress(Exception):  # the error itself must be raised
                self.store.note("failed", f"Stopped because it failed: {error}.")
                self.keep(None, now=True)
                self.finish()
                self.store.end(conclude().summary())
        self.callbacks.call("on_error", error)


def fault_tensors(
    store: Writer,
    columns: dict[str, Any],
    tests: Tests,
    measurement: Measurement,
    seeds: Seeds,
    clean_outputs: Tensor | None,
) -> NewTensors:
    """The tensors of the faults among `tests`; if they are large, only of those that are worth keeping."""
    details, rows = measurement.faults, torch.from_numpy(tests.seed[measurement.results.is_fault])
    ids, inputs, outputs = torch.from_numpy(columns["id"]), details.inputs, details.outputs
    if inputs.nbytes > LARGE and not (kept := torch.from_numpy(store.worth_keeping(columns))).all():
        rows, ids, inputs, outputs = (column[kept] for column in (rows, ids, inputs, outputs))
    answers = None if clean_outputs is None else clean_outputs[rows.to(clean_outputs.device)].cpu()
    if isinstance(seeds.inputs, Tensor):
        return NewTensors(ids, seeds.inputs, inputs, outputs, answers, seed=rows)
    return NewTensors(ids, seeds.take(rows), inputs, outputs, answers)


def fault_columns(tests: Tests, measurement: Measurement, facts: SeedFacts, round: int, stream: str) -> dict[str, Any]:
    """The columns of the faults among `tests`, one row per fault."""
    results = measurement.results
    positions = np.flatnonzero(results.is_fault)
    n, rows = len(positions), tests.seed[positions]
    return {
        "id": tests.number[positions],
        "seed_id": facts.seed_id[rows],
        "theta": tests.theta[positions],
        "noise_seed": tests.noise_seed[positions],
        "round": np.full(n, round),
        "stream": np.full(n, stream),
        "kind": tests.kind[positions],
        "label": facts.label[rows],
        "clean_answer": facts.clean_answer[rows],
        "answer": results.outcome[positions],
        "clean_value": facts.clean_value[rows],
        "margin": results.margin[positions],
        "chunk": np.full(n, measurement.pass_size),
        "raised": np.zeros(n, dtype=bool) if results.raised is None else results.raised[positions],
        **measurement.faults.columns,
    }
