"""The recorder stores faults, rounds and checkpoints, and calls callbacks once these are on disk."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.campaign.callback import EVENTS, FINAL_EVENTS, Callback, report_failure
from themis.campaign.interrupt import SIGNALS
from themis.campaign.setup import DRAWN_ORACLES, SeedFacts, Setup
from themis.errors import StoreError, UsageError
from themis.measure.runner import Measurement
from themis.measure.tests import Tests
from themis.runs.faults import Faults
from themis.runs.run import Round, Run, Start
from themis.runs.store.tensors import Tensors
from themis.runs.store.writer import Checkpoint, Writer

MIN_SELECTED_BYTES = 1 << 20
"""Above this size in bytes of disturbed inputs, selecting those worth keeping before copying is faster."""


class Callbacks:
    """Calls each callback in turn, and drops one that raises. A callback need not define every event."""

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        if not isinstance(callbacks, Iterable):
            raise UsageError(f"callbacks must be a list of callbacks, got {type(callbacks).__name__}: write [callback]")
        self._callbacks = list(callbacks)
        for callback in self._callbacks:
            if isinstance(callback, type) or not any(hasattr(callback, event) for event in EVENTS):
                name = getattr(callback, "__name__", type(callback).__name__)
                raise UsageError(
                    f"a callback must be an object with methods such as on_round, got {name}: pass an instance of a "
                    "subclass of themis.Callback"
                )
        self.is_stopping = False  # whether the user has stopped the campaign; remaining events are still delivered

    def wants(self, event: str) -> bool:
        """Whether any callback overrides `event`; otherwise its value need not be prepared."""
        default = getattr(Callback, event)
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None and getattr(method, "__func__", method) is not default:
                return True
        return False

    def call(self, event: str, value: Any) -> None:
        for callback in list(self._callbacks):
            method = getattr(callback, event, None)
            if method is None:
                continue
            try:
                method(value)
            except Exception as error:
                self._drop(callback, event, error)
            except KeyboardInterrupt as error:
                if event not in FINAL_EVENTS and not self.is_stopping:
                    raise
                self._drop(callback, event, error)

    def _drop(self, callback: Callback, event: str, error: BaseException) -> None:
        self._callbacks = [other for other in self._callbacks if other is not callback]
        report_failure(callback, f"in {event} and was dropped", error)


class Interrupts:
    """Defers signals that stop a campaign to the end of blocks.

    The handlers are set once per campaign. Setting them for each block would take longer than many blocks do, and a
    signal could arrive when only some of them are set.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._received: list[tuple[int, Any]] = []
        self._are_deferred = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """In the block, signals can be deferred. No effect outside the main thread, which gets all signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with ExitStack() as restoring:
            for number in SIGNALS:
                if callable(handler := signal.getsignal(number)):
                    self._handlers[number] = handler
                    restoring.callback(self._restore, number, handler)
                    signal.signal(number, self._receive)
            yield

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals take effect at the end of the block; a second one takes effect at once."""
        self._received.clear()
        self._are_deferred = True
        try:
            yield
        finally:
            self._are_deferred = False
        if self._received:
            number, frame = self._received[0]
            self._handlers[number](number, frame)

    def _receive(self, number: int, frame: Any) -> None:
        if self._are_deferred and not self._received:
            self._received.append((number, frame))
            return
        self._handlers[number](number, frame)
        if self._are_deferred and number == signal.SIGINT:
            raise KeyboardInterrupt

    def _restore(self, number: int, handler: Any) -> None:
        if signal.getsignal(number) == self._receive:  # unless the program has set another handler
            signal.signal(number, handler)


class Recorder:
    """Owns the faults in memory, the store, if there is one, and the callbacks."""

    def __init__(self, faults: Faults, callbacks: Callbacks, store: Writer | None) -> None:
        self.faults, self.callbacks, self.store = faults, callbacks, store
        self._informs_of_faults = callbacks.wants("on_fault")
        self._events: deque[tuple[int, str, Any]] = deque()
        """Pending events for callbacks, each with the number of its addition to the store."""
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
        """Record the start of a campaign and, the first time, the samples by which its model can be recognised."""
        if self.store:
            first = {} if start.tests_before else {"samples": samples()}
            self.store.note(**first, start=start.as_dict())
        self.callbacks.call("on_start", start)

    def add_faults(self, setup: Setup, tests: Tests, measurement: Measurement, round: int, stream: str) -> None:
        """Add the faults among `tests`; `keep` writes them."""
        columns, tensors, addition = None, None, 0
        if measurement.faults.columns:
            columns = fault_columns(tests, measurement, setup.facts, round, stream)
            self.faults.add(**columns)
            if self.store:
                tensors = fault_tensors(self.store, columns, tests, measurement, setup)
        if self.store:
            addition = self.store.add_faults(int(tests.number[-1]) + 1, columns, tensors)
        if columns is not None and self._informs_of_faults:
            self._events += [(addition, "on_fault", fault) for fault in self.faults.latest()]

    def add_round(self, round: Round) -> None:
        """Add a finished round; `keep` writes it."""
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
        """Call the callbacks for what is on disk."""
        while self._events and self._events[0][0] <= n_stored:
            _, name, value = self._events.popleft()
            self.callbacks.call(name, value)

    def end(self, run: Run) -> None:
        """Record the result of a campaign."""
        if self.store:
            self.store.end(run.summary())
        self.callbacks.call("on_end", run)

    def fail(self, error: Exception, conclude: Callable[[], Run]) -> None:
        """Record a failure of the model, the disk or Themis; `conclude` returns the result so far."""
        if self.store and not isinstance(error, StoreError):
            with suppress(Exception):  # the error itself must be raised
                self.store.note(failed=f"Stopped because it failed: {error}.")
                self.keep(None, now=True)
                self.finish()
                self.store.end(conclude().summary())
        self.callbacks.call("on_error", error)


def fault_tensors(
    store: Writer, columns: dict[str, Any], tests: Tests, measurement: Measurement, setup: Setup
) -> Tensors:
    """The tensors of the faults among `tests` on the CPU; if they are large, only of those worth keeping."""
    details, rows = measurement.faults, torch.from_numpy(tests.seed[measurement.results.is_fault])
    ids, inputs, outputs = torch.from_numpy(columns["id"]), details.inputs, details.outputs
    if not setup.settings.max_stored or inputs.nbytes > MIN_SELECTED_BYTES:
        kept = torch.from_numpy(np.flatnonzero(store.worth_keeping(columns)))
        rows, ids = rows[kept], ids[kept]
        inputs, outputs = (column[kept.to(column.device)] for column in (inputs, outputs))
    inputs, outputs = inputs.cpu(), outputs.cpu()
    seeds, clean, answers = setup.calculator.seeds, setup.calculator.clean, None
    if isinstance(clean.oracle, DRAWN_ORACLES):
        answers = clean.outputs[rows.to(clean.outputs.device)].cpu()
    if isinstance(seeds.inputs, Tensor):
        return Tensors(ids, seeds.inputs, inputs, outputs, answers, seed=rows)
    return Tensors(ids, seeds.take(rows), inputs, outputs, answers)


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
