"""Cells in several processes, each with a bench of its own.

The parent gives a free worker the next cell: best of a technique that it has fitted already, else of one that the
others are not at. A worker that dies costs its cell, and is replaced.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from themis.errors import ModelError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from themis.experiments.comparison.cells import Bench
    from themis.experiments.comparison.plan import Cell, Plan
    from themis.runs.source import Origin

Take = Callable[["Cell", dict[str, Any]], None]
"""Is given each cell with its result, as soon as there is one."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Workshop:
    """How another process makes a bench: names, no objects."""

    origin: Origin
    perturbation: str
    plan: Plan

    def bench(self) -> Bench:
        from themis.data.seeds import read_seeds
        from themis.experiments.comparison.cells import Bench
        from themis.experiments.comparison.rates import split_seeds
        from themis.perturb import choose_perturbation

        plan, origin = self.plan, self.origin
        with origin.in_folder():
            perturbation = choose_perturbation(self.perturbation)
        parts = split_seeds(read_seeds(origin.read()), plan.seeds, plan.judge_seeds, plan.grid_seeds)
        return Bench(origin.target(), parts.search, perturbation, plan, origin.read_train, origin.read_rivals)


def attempt(bench: Bench, cell: Cell) -> dict[str, Any]:
    """A cell's result, or why it has none."""
    try:
        return bench.run(cell)
    except Exception as error:
        return failed(cell, " ".join(f"{type(error).__name__}: {error}".split()))


def failed(cell: Cell, why: str) -> dict[str, Any]:
    """What is kept of a cell without a result."""
    return {"technique": cell.technique, "magnitude": cell.magnitude, "campaign": cell.campaign, "error": why}


def run_here(cells: list[Cell], bench: Bench, take: Take) -> None:
    """Run cells one by one in this process."""
    for cell in cells:
        take(cell, attempt(bench, cell))


def run_in_processes(cells: list[Cell], workshop: Workshop, n_workers: int, take: Take) -> None:
    """Run cells in `n_workers` processes; ended by an exception, they are ended with it."""
    from multiprocessing.connection import wait

    left = list(cells)
    with _team(workshop, min(n_workers, len(cells))) as team:
        while waiting := {worker.link: worker for worker in team if worker.is_awaited}:
            for link in wait(list(waiting)):
                worker = waiting[link]  # type: ignore[index]
                cell, record = worker.cell, worker.hear()
                if cell is not None:
                    if record is None:
                        record = failed(cell, f"its process ended with exit code {worker.process.exitcode}")
                        if left:
                            worker.start(workshop)
                    take(cell, record)
                if not worker.is_awaited:
                    worker.give(left, team)


@dataclass(eq=False)
class _Worker:
    """A process, the link to it, what it is at, and the techniques it has been at."""

    process: BaseProcess = field(init=False)
    link: Connection = field(init=False)
    cell: Cell | None = None
    is_ready: bool = False
    is_over: bool = False
    fitted: set[str] = field(default_factory=set)

    @property
    def is_awaited(self) -> bool:
        """Whether it will say something: that it is ready, or a result."""
        return not self.is_over and (not self.is_ready or self.cell is not None)

    def start(self, workshop: Workshop) -> None:
        from multiprocessing import get_context

        context = get_context("spawn")
        self.link, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, workshop), daemon=True)
        self.fitted, self.is_ready, self.is_over = set(), False, False
        with _environment(dict.fromkeys(THREADS, str(workshop.plan.threads))), _deaf():
            self.process.start()
        other.close()

    def hear(self) -> dict[str, Any] | None:
        """What it says of its cell; None where it has died of it, or is only ready for the first one."""
        self.cell = None
        try:
            said: dict[str, Any] = self.link.recv()
        except (EOFError, OSError):
            self.process.join()
            self.is_over = True
            said = {"error": f"it ended with exit code {self.process.exitcode}"}
            if self.is_ready:
                return None
        if not self.is_ready:
            if "error" in said:
                raise ModelError(
                    f"a worker must make the target again, {said['error']}: run with one worker to see why; a script "
                    'that starts workers must do so under if __name__ == "__main__"'
                )
            self.is_ready = True
            return None
        return said

    def give(self, left: list[Cell], team: list[_Worker]) -> None:
        """The next cell, if one is left."""
        if not left:
            return
        elsewhere = {name for worker in team if worker is not self for name in worker.fitted}
        self.cell = min(left, key=lambda cell: (cell.technique not in self.fitted, cell.technique in elsewhere))
        left.remove(self.cell)
        self.fitted.add(self.cell.technique)
        with suppress(OSError):  # it has died: that is heard next
            self.link.send(self.cell)


@contextmanager
def _team(workshop: Workshop, n: int) -> Iterator[list[_Worker]]:
    team = [_Worker() for _ in range(n)]
    started = []
    try:
        for worker in team:
            worker.start(workshop)
            started.append(worker)
        yield team
    finally:
        for worker in started:
            worker.process.terminate()
        for worker in started:
            worker.process.join()
            worker.link.close()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that a new process starts with; libraries read them once, when they are loaded."""
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
def _deaf() -> Iterator[None]:
    """A process that starts in this block takes no notice of Ctrl-C: it is the parent's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def work(link: Connection, workshop: Workshop) -> None:
    """A worker: cells in, results out, until the parent is done."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # the parent has said what there is to say
    torch.set_num_threads(workshop.plan.threads)
    with suppress(EOFError, OSError):  # the parent is gone
        try:
            bench = workshop.bench()
        except Exception as error:
            link.send({"error": f"it failed: {type(error).__name__}: {error}"})
            return
        link.send({})
        while True:
            link.send(attempt(bench, link.recv()))
