"""Where the cells of an experiment run side by side: in processes, or in workers on Ray."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from themis.compute.cluster import RayExecutor, connected, environment
from themis.compute.worker_pool import RayPool
from themis.errors import ModelError, ThemisError
from themis.experiments import CellT, Executor, Failure, ResultT, SerialExecutor, attempt
from themis.text import foreign_output_on_stderr

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

_INTERRUPTS = [getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
"""Signals that a terminal sends to all processes in it; SIGTERM ends a worker."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ProcessExecutor:
    """Runs cells in worker processes, each of which prepares once.

    A free worker is given a cell of a group that it has already run, or else one of a group that no other worker has
    run. A worker that dies costs its cell and is replaced.
    """

    def __init__(
        self,
        n_workers: int,
        threads: int = 1,
        on_start: Callable[[int], None] | None = None,
        lookahead: int | None = None,
    ) -> None:
        """threads: torch threads of each worker. on_start: called with the number of workers that are started.

        lookahead: how many of the next cells a worker chooses from, by default all of them. With few, cells end nearly
        in their order, so that an experiment that is stopped has finished the first ones.
        """
        self.n_workers, self.threads, self.on_start, self.lookahead = n_workers, threads, on_start, lookahead

    def map(
        self, prepare: Callable[[], Callable[[CellT], ResultT]], cells: Sequence[CellT]
    ) -> Generator[tuple[CellT, ResultT | Failure]]:
        from multiprocessing.connection import wait

        remaining, n_workers = list(cells), min(self.n_workers, len(cells))
        if n_workers and self.on_start is not None:
            self.on_start(n_workers)
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

    def __init__(
        self,
        executor: RayExecutor,
        on_start: Callable[[int], None] | None = None,
        lookahead: int | None = None,
    ) -> None:
        """on_start and lookahead: as for `ProcessExecutor`."""
        self.executor, self.on_start, self.lookahead = executor, on_start, lookahead

    def map(
        self, prepare: Callable[[], Callable[[CellT], ResultT]], cells: Sequence[CellT]
    ) -> Generator[tuple[CellT, ResultT | Failure]]:
        if not cells:
            return
        executor = replace(self.executor, workers=min(self.executor.workers, len(cells)))
        with connected(executor) as ray, closing(RayPool(ray, executor, partial(CellHost, prepare))) as pool:
            if self.on_start is not None:
                self.on_start(executor.workers)
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


def choose_cell_executor(
    workers: int | RayExecutor,
    threads: int = 1,
    on_start: Callable[[int], None] | None = None,
    lookahead: int | None = None,
) -> Executor:
    """Where cells run: in this process, in several, or in workers on Ray. Arguments as for `ProcessExecutor`."""
    if isinstance(workers, RayExecutor):
        return RayCellExecutor(workers, on_start, lookahead)
    return ProcessExecutor(workers, threads, on_start, lookahead) if workers > 1 else SerialExecutor()


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
        with environment(dict.fromkeys(THREAD_VARIABLES, str(threads))), _ignoring_interrupts():
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
        """Send one of the next cells, if there is one."""
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
    """Workers that end with the block."""
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
