"""The cells of an experiment: running and storing them, in this process, in several, or in workers on Ray."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from themis.campaign.setup import Executor as CampaignExecutor
from themis.campaign.setup import choose_executor
from themis.errors import ModelError, StoreError, ThemisError, UsageError
from themis.experiments import Cell, CellEnd, ExperimentFolder, Listener
from themis.reading import record
from themis.text import foreign_output_on_stderr
from themis_integrations.ray.cluster import connected
from themis_integrations.ray.executor import RayExecutor
from themis_integrations.ray.pool import RayPool

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_INTERRUPTS = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
"""Signals that a terminal sends to all processes in it; SIGTERM ends a worker."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


CellT = TypeVar("CellT", bound=Cell)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result."""

    reason: str
    exception: Exception | None = None
    """None if the cell ran in another process."""


class Executor(Protocol):
    """Runs cells."""

    def map(
        self, prepare: Callable[[], Callable[[CellT], ResultT]], cells: Sequence[CellT]
    ) -> Generator[tuple[CellT, ResultT | Failure]]:
        """Yield every cell with its result, or with a `Failure`, as soon as it ends.

        prepare: makes the function that runs a cell; called once per process. Other processes need it to be picklable.
        Closing the generator stops the cells that are still running.
        """


class SerialExecutor:
    """Runs cells in this process, in order."""

    def map(
        self, prepare: Callable[[], Callable[[CellT], ResultT]], cells: Sequence[CellT]
    ) -> Generator[tuple[CellT, ResultT | Failure]]:
        if cells:
            run = prepare()
            for cell in cells:
                yield cell, attempt(run, cell)


def attempt(run: Callable[[CellT], ResultT], cell: CellT) -> ResultT | Failure:
    """The result of a cell, or why it has none."""
    try:
        return run(cell)
    except Exception as error:
        return Failure(" ".join(f"{type(error).__name__}: {error}".split()), error)


LoadedT = TypeVar("LoadedT", bound=Cell, contravariant=True)
StoredT = TypeVar("StoredT")


class ResultStore(Protocol[LoadedT, StoredT]):
    """How results are stored."""

    def load(self, cell: LoadedT) -> StoredT | None:
        """The result of a finished cell; None if the cell must be run."""

    def save(self, cell: LoadedT, result: StoredT) -> None:
        """Store a result, completely or not at all."""


SIGNATURE = "sha256"
"""The key of the checksum in a result."""


def read_result(folder: ExperimentFolder, name: str) -> dict[str, Any] | None:
    """What `write_result` wrote, which nobody may have changed."""
    content: dict[str, Any] | None = folder.read(name, record({}))
    if content is not None and content.pop(SIGNATURE, None) != _sign(name, content):
        raise StoreError(
            f"{folder.path}/{name} cannot be read: it was changed or is that of another cell; remove it to create it "
            "again"
        )
    return content


def write_result(folder: ExperimentFolder, name: str, content: dict[str, Any]) -> None:
    """Write a JSON file with a checksum of its name and content."""
    folder.write_bytes(name, f"{json.dumps({**content, SIGNATURE: _sign(name, content)})}\n".encode())


def _sign(name: str, content: Any) -> str:
    as_read = json.loads(json.dumps(content))  # all keys are text
    return hashlib.sha256(json.dumps([name, as_read], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class JsonResults:
    """Results that are plain data, one JSON file per cell; a cell whose result has an `error` runs again."""

    folder: ExperimentFolder
    under: str = "cells"

    def load(self, cell: Cell) -> dict[str, Any] | None:
        result = read_result(self.folder, f"{self.under}/{cell.file}")
        return None if result is None or "error" in result else result

    def save(self, cell: Cell, result: dict[str, Any]) -> None:
        write_result(self.folder, f"{self.under}/{cell.file}", result)


@dataclass(frozen=True)
class CellKind(Generic[CellT, ResultT]):
    """What the cells of an experiment are called, and what is said of them."""

    noun: str
    describe: Callable[[CellT, ResultT], str]
    """A finished cell in one line."""
    failed: Callable[[CellT, str], ResultT] | None = None
    """The result of a cell that failed, from the reason; without it, the first failure ends the experiment."""


def run_cells(
    cells: Sequence[CellT],
    prepare: Callable[[], Callable[[CellT], ResultT]],
    *,
    results: ResultStore[CellT, ResultT],
    kind: CellKind[CellT, ResultT],
    executor: Executor | None = None,
    listener: Listener | None = None,
) -> dict[CellT, ResultT]:
    """The results of all cells, in their order: finished ones are loaded, the others are run and stored one by one.

    prepare: makes the function that runs a cell, see `Executor.map`.
    """
    executor, listener = executor or SerialExecutor(), listener or Listener()
    finished = {cell: result for cell in cells if (result := results.load(cell)) is not None}
    listener.on_cells(len(finished), len(cells), kind.noun)
    with closing(executor.map(prepare, [cell for cell in cells if cell not in finished])) as outcomes:
        for cell, outcome in outcomes:
            if not isinstance(outcome, Failure):
                result, text, error = outcome, kind.describe(cell, outcome), None
            elif kind.failed is not None:
                error = outcome.reason
                result, text = kind.failed(cell, error), f"{cell} failed"
            elif outcome.exception is not None:
                raise outcome.exception
            else:
                raise ModelError(f"{cell} failed: {outcome.reason}")
            results.save(cell, result)
            finished[cell] = result
            listener.on_cell_end(CellEnd(cell, result, text, error, len(finished), len(cells)))
    return {cell: finished[cell] for cell in cells}


class ProcessExecutor:
    """Runs cells in worker processes, each of which prepares once.

    A free worker is given a cell of a group that it has already run, or else one of a group that no other worker has
    run. A worker that dies costs its cell and is replaced.
    """

    def __init__(self, n_workers: int, threads: int = 1, lookahead: int | None = None) -> None:
        """threads: torch threads of each worker.

        lookahead: how many of the next cells a worker chooses from, by default all of them. With few, cells end nearly
        in their order, so that an experiment that is stopped has finished the first ones.
        """
        self.n_workers, self.threads, self.lookahead = n_workers, threads, lookahead

    def map(
        self, prepare: Callable[[], Callable[[CellT], ResultT]], cells: Sequence[CellT]
    ) -> Generator[tuple[CellT, ResultT | Failure]]:
        from multiprocessing.connection import wait

        remaining, n_workers = list(cells), min(self.n_workers, len(cells))
        with _started(n_workers, prepare, self.threads) as workers:
            while waiting := {worker.connection: worker for worker in workers if worker.is_busy}:
                for connection in wait(list(waiting)):
                    worker = waiting[connection]  # type: ignore[index]
                    cell, result = worker.receive()
                    if worker.has_ended and remaining:
                        worker.start(prepare, self.threads)
                    if not worker.is_busy:
                        worker.assign(remaining, workers, self.lookahead)
                    if cell is not None:
                        yield cell, result


class RayCellExecutor:
    """Runs cells in workers on Ray, each of which prepares once.

    A worker that dies is replaced, and its cell is run again; a cell that ends three workers fails.
    """

    def __init__(self, executor: RayExecutor, lookahead: int | None = None) -> None:
        """lookahead: as for `ProcessExecutor`."""
        self.executor, self.lookahead = executor, lookahead

    def map(
        self, prepare: Callable[[], Callable[[CellT], ResultT]], cells: Sequence[CellT]
    ) -> Generator[tuple[CellT, ResultT | Failure]]:
        if not cells:
            return
        executor = replace(self.executor, workers=min(self.executor.workers, len(cells)))
        with connected(executor) as ray, closing(RayPool(ray, executor, partial(CellHost, prepare))) as pool:
            submitted = ((pool.submit(str(cell), "run", cell, group=cell.group), cell) for cell in cells)
            most = None if self.lookahead is None else executor.workers + self.lookahead
            calls = dict(islice(submitted, most))
            while calls:
                number = pool.next_done(calls)
                cell = calls.pop(number)
                try:
                    result = pool.result(number)
                except ThemisError as error:
                    result = Failure(str(error))
                calls.update(islice(submitted, 1))
                yield cell, result


def choose_ray(executor: CampaignExecutor | str | None, threads: int) -> RayExecutor | None:
    """The workers on Ray that were asked for; None if cells run in processes of this machine."""
    chosen = choose_executor(executor, threads)
    if chosen is not None and not isinstance(chosen, RayExecutor):
        raise UsageError(f"executor must be local, ray or a RayExecutor, got {executor!r}")
    return chosen


def choose_cell_executor(workers: int | RayExecutor, threads: int = 1, lookahead: int | None = None) -> Executor:
    """Where cells run: in this process, in several, or in workers on Ray. Arguments as for `ProcessExecutor`."""
    if isinstance(workers, RayExecutor):
        return RayCellExecutor(workers, lookahead)
    return ProcessExecutor(workers, threads, lookahead) if workers > 1 else SerialExecutor()


class CellHost:
    """Runs cells in the process of a worker."""

    def __init__(self, prepare: Callable[[], Callable[[Any], Any]]) -> None:
        self._run = prepare()

    def run(self, cell: Any) -> Any:
        """The result of a cell, or why it has none."""
        result = attempt(self._run, cell)
        return Failure(result.reason) if isinstance(result, Failure) else result


@dataclass(eq=False)
class _Worker:
    """A process, the connection to it, the cell it is running, and the groups it has run."""

    process: BaseProcess = field(init=False)
    connection: Connection = field(init=False)
    cell: Any = None
    is_ready: bool = False
    has_ended: bool = False
    groups: set[str] = field(default_factory=set)

    @property
    def is_busy(self) -> bool:
        """Whether it will send something: that it is ready, or a result."""
        return not self.has_ended and (not self.is_ready or self.cell is not None)

    def start(self, prepare: Callable[[], Any], threads: int) -> None:
        from multiprocessing import get_context

        context = get_context("spawn")
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=_work, args=(other_end, prepare, threads), daemon=True)
        self.groups, self.is_ready, self.has_ended = set(), False, False
        with _environment(dict.fromkeys(THREAD_VARIABLES, str(threads))), _ignoring_interrupts():
            self.process.start()
        other_end.close()

    def receive(self) -> tuple[Any, Any]:
        """The cell it was running with the result; no cell if it has only become ready."""
        cell, self.cell = self.cell, None
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.connection.close()
            self.has_ended = True
            message = Failure(f"its process ended with exit code {self.process.exitcode}")
        if self.is_ready:
            return cell, message
        if isinstance(message, Failure):
            raise ModelError(
                f"a worker process must be able to create the experiment again, but {message.reason}: run with one "
                "worker to "
                'see why; a script that starts workers must do so under if __name__ == "__main__"'
            )
        self.is_ready = True
        return None, None

    def assign(self, remaining: list[Any], workers: list[_Worker], lookahead: int | None) -> None:
        if not remaining:
            return
        elsewhere = {group for worker in workers if worker is not self for group in worker.groups}
        self.cell = min(
            remaining[:lookahead], key=lambda cell: (cell.group not in self.groups, cell.group in elsewhere)
        )
        remaining.remove(self.cell)
        self.groups.add(self.cell.group)
        with suppress(OSError):  # it has died, which the next `receive` notices
            self.connection.send(self.cell)


@contextmanager
def _started(n_workers: int, prepare: Callable[[], Any], threads: int) -> Iterator[list[_Worker]]:
    started: list[_Worker] = []
    try:
        for _ in range(n_workers):
            worker = _Worker()
            worker.start(prepare, threads)
            started.append(worker)
        yield started
    finally:
        for worker in started:
            worker.process.terminate()
        for worker in started:
            worker.process.join()
            worker.connection.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables for a new process: libraries read them once, when they are loaded."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _ignoring_interrupts() -> Iterator[None]:
    """A process that starts in this block ignores Ctrl-C and the end of the terminal, which its parent handles."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _work(connection: Connection, prepare: Callable[[], Callable[[Any], Any]], threads: int) -> None:
    """The main function of a worker: it receives cells and sends results until its parent is done."""
    for number in _INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the parent has already shown them
    with suppress(EOFError, OSError), foreign_output_on_stderr():  # the parent has ended
        try:
            run = prepare()
        except Exception as error:
            connection.send(Failure(f"it failed with {type(error).__name__}: {error}"))
            return
        if "torch" in sys.modules:  # one that is imported later reads THREAD_VARIABLES
            sys.modules["torch"].set_num_threads(threads)
        connection.send(None)
        while True:
            result = attempt(run, connection.recv())
            connection.send(Failure(result.reason) if isinstance(result, Failure) else result)
