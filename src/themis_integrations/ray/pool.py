"""A pool of workers: objects in other processes, which calls are distributed to.

A worker that dies is replaced, and the calls that it had not answered are made again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from themis.errors import ModelError, ThemisError, first_line, warn
from themis_integrations.ray.cluster import ROOM_SECONDS, RayWorkers, has_room

MAX_CRASHES = 3
"""How many workers may die of the same call; and per worker, how many in a row before their first call."""
AHEAD = 12
"""Calls per worker that are made before the oldest one was taken: the results wait in memory."""
DEPTH = 2
"""Calls that a worker is given before it has answered the first of them."""
_POLL_SECONDS = 5.0
ASIDE = "aside"
"""The group of calls that a worker executes beside the others."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of `mallopt`, from malloc.h."""
DATA_FOLDER = "THEMIS_DATA"
"""The environment variable with the folder of data sets."""
KERNELS = "MKL_CBWR"
"""The environment variable that fixes which kernels MKL uses."""


@dataclass(eq=False)
class _Call:
    """A call of a method, and what has become of it."""

    method: str
    values: tuple[Any, ...] = ()
    number: int | None = None
    """None for calls that set a worker up, or that every worker answers."""
    label: str = ""
    group: str | None = None
    is_urgent: bool = True
    is_waiting: bool = True
    """Whether no worker was given it, or it has to be made again."""
    is_suspect: bool = False
    """Whether a worker has died that was given it: it is now made alone."""
    n_crashes: int = 0
    """How many workers have died while they ran it."""
    actor: _Actor | None = None
    """The worker that it was given to last."""
    answer: Any = None
    error: Exception | None = None


@dataclass(eq=False)
class _Actor:
    """A worker, and the calls that it has not answered, in the order in which it executes them."""

    handle: Any
    calls: deque[tuple[_Call, Any]] = field(default_factory=deque)
    """Each with Ray's reference to its answer."""
    groups: set[str | None] = field(default_factory=set)
    is_ready: bool = False
    since: float = 0.0
    """When it began its oldest call."""

    def send(self, call: _Call) -> None:
        """Add a call, which is executed after the others."""
        if not self.calls:
            self.since = time.monotonic()
        call.actor = self
        self.calls.append((call, self.handle.call.remote(call.method, *call.values)))

    def forget(self) -> None:
        """Drop the oldest call."""
        self.calls.popleft()
        self.since = time.monotonic()


class RayPool:
    """Workers that are actors of Ray. A call goes to any of them.

    `make` creates the object that calls go to, in the process of the worker. A worker executes its calls in order; a
    worker that dies is replaced, and its calls are made again, each alone in its worker: the answer to one may have
    been lost because the next has ended the process. If three workers die of the same call, its result is an error.
    """

    def __init__(self, ray: Any, executor: RayWorkers, make: Callable[[], Any]) -> None:
        self._ray, self._executor = ray, executor
        from ray import cloudpickle

        try:
            made = cloudpickle.dumps(make)
        except Exception as error:
            raise ModelError(
                f"what is sent to workers must be picklable, but pickling it raised {type(error).__name__}: "
                f"{first_line(error)}; name the model and the data as module:factory, on the command line or in "
                "origin=..., so that workers can create them"
            ) from error
        self._make = ray.put(made)
        self._broadcasts: list[tuple[str, tuple[Any, ...]]] = []
        self._calls: dict[int | None, _Call] = {}
        """The calls whose results were not taken."""
        self._done: set[int | None] = set()
        """Those of them that were answered."""
        self._waiting: list[tuple[bool, int | None]] = []
        """A heap of those that wait: whether a call is not urgent, and its number. Some entries are out of date."""
        self._taken: set[_Actor | None] = set()
        """The workers whose results were taken since they were last asked to combine answers."""
        self._awaited: _Call | None = None
        self._failed_starts = 0
        self._n_calls = 0
        self._host = ray.remote(
            num_cpus=executor.threads,
            num_gpus=executor.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy="SPREAD",
            concurrency_groups={ASIDE: 1},
        )(WorkerHost)
        self._had_room = time.monotonic()
        self._actors = [self._start() for _ in range(executor.workers)]

    @property
    def n_workers(self) -> int:
        return self._executor.workers

    def share(self, value: Any) -> Any:
        """A value that several calls are given; it is sent to each machine once."""
        return self._ray.put(value)

    def broadcast(self, method: str, *values: Any) -> None:
        """Call a method of every worker, also of those that replace them, before all calls that are made later."""
        self._broadcasts.append((method, values))
        for actor in self._actors:
            actor.send(_Call(method, values))

    def combine_all(self, method: str, combine: str, *values: Any) -> Any:
        """Ask workers for answers that pairs of them combine until one is left; see `combined`.

        They do so beside the calls that they execute, and this process receives one message. Only those workers are
        asked whose results were taken since the last time.
        """
        asked = [actor for actor in self._actors if actor in self._taken]
        self._taken.clear()
        parts = [(actor.handle, self._aside(actor.handle, method, *values)) for actor in asked]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            odd = parts[len(parts) // 2 * 2 :]
            parts = [(handle, self._aside(handle, combine, mine, other)) for (handle, mine), (_, other) in pairs] + odd
        return parts[0][1] if parts else None

    def combined(self, answer: Any) -> Any:
        """Wait for what `combine_all` has asked for; None if one of the workers has died meanwhile."""
        while answer is not None and not self._receive_next(answer):
            pass
        with suppress(self._ray.exceptions.RayError):
            return None if answer is None else self._ray.get(answer)

    def _aside(self, handle: Any, method: str, *values: Any) -> Any:
        return handle.call.options(concurrency_group=ASIDE).remote(method, *values)

    def submit(self, label: str, method: str, *values: Any, group: str | None = None, is_urgent: bool = True) -> int:
        """Call a method of one worker; returns the number of the call.

        label: what the call is, in messages. group: calls of one group go to the same worker where that costs no time.
        A call that is not urgent waits until a worker would be idle.
        """
        number, self._n_calls = self._n_calls, self._n_calls + 1
        call = self._calls[number] = _Call(method, values, number, label, group, is_urgent)
        self._wait(call)
        self._assign()
        return number

    def hasten(self, call: int) -> None:
        """Make a call urgent."""
        hastened = self._calls[call]
        hastened.is_urgent = True
        if hastened.is_waiting:
            self._wait(hastened)
        self._assign()

    def result(self, call: int) -> Any:
        """Wait for what a call returns, and forget it. If it has raised an error or ended its workers, raise that."""
        self._awaited = awaited = self._calls[call]
        self.hasten(call)
        while call not in self._done:
            self._receive_next()
        self.discard(call)
        self._taken.add(awaited.actor)
        if awaited.error is not None:
            raise awaited.error
        self._assign()
        return awaited.answer

    def discard(self, call: int) -> None:
        """Forget a call whose result is not needed."""
        self._calls.pop(call, None)
        self._done.discard(call)

    def next_done(self, calls: Iterable[int]) -> int:
        """Wait until one of these calls is done, and return its number."""
        numbers = list(calls)
        while not (done := [number for number in numbers if number in self._done]):
            self._receive_next()
        return done[0]

    def close(self) -> None:
        """End all workers."""
        for actor in self._actors:
            with suppress(Exception):  # it may have ended
                self._ray.kill(actor.handle)
        self._actors = []

    def _start(self) -> _Actor:
        """A new worker, which executes its calls once it is placed and has created its object."""
        paths = [os.path.abspath(entry) for entry in sys.path]
        variables = {each: os.environ[each] for each in (DATA_FOLDER, KERNELS) if each in os.environ}
        handle = self._host.remote(os.getcwd(), paths, variables, self._executor.threads)
        actor = _Actor(handle)
        actor.calls += [(_Call("place"), handle.place.remote()), (_Call("make"), handle.make.remote(self._make))]
        for method, values in self._broadcasts:
            actor.send(_Call(method, values))
        return actor

    def _assign(self) -> None:
        """Give calls to workers that are free, and each worker its next call before it has answered, if that is urgent.

        A busy worker gets the call if it will be free first, which is the one that has been busy for longest: calls of
        no group take about the same time. Calls that have a group are long, and none of them should wait for a certain
        worker. Only the call whose result is awaited is made while many results have not been taken.
        """
        while (call := self._first_waiting()) is not None:
            if call is not self._awaited and len(self._done) >= AHEAD * self.n_workers:
                return
            depth = DEPTH if call.group is None and call.is_urgent else 1
            free = [actor for actor in self._actors if actor.is_ready and len(actor.calls) < depth]
            if not free:
                return
            actor = min(free, key=lambda actor: (len(actor.calls), actor.since))
            if call.group is not None:
                call = self._choose(actor)
            if actor.calls and (call.is_suspect or any(other.is_suspect for other, _ in actor.calls)):
                return
            call.is_waiting = False
            actor.groups.add(call.group)
            actor.send(call)

    def _first_waiting(self) -> _Call | None:
        """The call whose result is awaited, else the oldest urgent one, else the oldest; None if no call waits."""
        if self._awaited is not None and self._awaited.is_waiting:
            return self._awaited
        while self._waiting:
            is_spare, number = self._waiting[0]
            call = self._calls.get(number)
            if call is not None and call.is_waiting and call.is_urgent != is_spare:
                return call
            heappop(self._waiting)
        return None

    def _choose(self, actor: _Actor) -> _Call:
        """The next call for a worker: of a group that it has had, else of one that no other has, else the oldest."""
        elsewhere = {group for other in self._actors if other is not actor for group in other.groups}
        waiting = (call for call in self._calls.values() if call.is_waiting)
        return min(waiting, key=lambda call: (call.group not in actor.groups, call.group in elsewhere, call.number))

    def _receive_next(self, aside: Any = None) -> bool:
        """Wait until some worker has answered its oldest call, and take the answer; or until `aside` is there."""
        heads = {actor.calls[0][1]: actor for actor in self._actors if actor.calls}
        awaited = [*heads] if aside is None else [aside, *heads]
        ready, _ = self._ray.wait(awaited, num_returns=1, timeout=_POLL_SECONDS)
        if not ready:
            self._check_placed()
        for ref in ready:
            if ref is not aside:
                self._receive(heads[ref])
        self._assign()
        return aside is not None and aside in ready

    def _receive(self, actor: _Actor) -> None:
        errors, (call, ref) = self._ray.exceptions, actor.calls[0]
        try:
            self._finish(call, self._ray.get(ref))
        except errors.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error  # without the frames of Ray
            translated: Exception = ModelError(
                f"a worker failed with {type(cause).__name__}: {' '.join(str(cause).split())}"
            )
            if isinstance(cause, ThemisError):
                translated = type(cause)(str(cause))
            if call.number is None:
                raise translated from error
            self._finish(call, None, translated)
        except errors.ObjectLostError:  # its machine has died after it had answered
            self._repeat(call)
        except errors.RayError as error:
            self._replace(actor, error)
            return
        actor.forget()
        if not actor.is_ready and all(call.number is not None for call, _ in actor.calls):
            actor.is_ready, self._failed_starts = True, 0

    def _finish(self, call: _Call, answer: Any, error: Exception | None = None) -> None:
        call.answer, call.error = answer, error
        if call.number in self._calls:
            self._done.add(call.number)

    def _wait(self, call: _Call) -> None:
        """Let a call wait until a worker is given it."""
        call.is_waiting = True
        heappush(self._waiting, (not call.is_urgent, call.number))

    def _repeat(self, call: _Call) -> None:
        """Make a call again."""
        call.is_suspect = True
        if call.number in self._calls:
            self._wait(call)

    def _replace(self, actor: _Actor, error: Exception) -> None:
        """Start another worker in place of one that has died, and make its calls again."""
        first, _ = actor.calls[0]
        if "node has died" not in str(error):  # for the death of a machine, no call is to blame
            first.n_crashes += 1
            self._failed_starts += first.number is None
        if self._failed_starts >= MAX_CRASHES * self._executor.workers:
            raise ModelError(f"{self._failed_starts} workers in a row died before their first call: {_reason(error)}")
        if first.number is not None and first.n_crashes >= MAX_CRASHES:
            crash = ModelError(
                f"{MAX_CRASHES} workers in a row died while they ran {first.label}, so the model seems to "
                f"crash its process: {_reason(error)}"
            )
            self._finish(first, None, crash)
            actor.calls.popleft()
        warn("a worker has died and is replaced; its work is done again")
        with suppress(Exception):
            self._ray.kill(actor.handle)
        for call, _ in actor.calls:
            self._repeat(call)
        self._actors[self._actors.index(actor)] = self._start()

    def _check_placed(self) -> None:
        """Refuse to wait for workers that no machine of the cluster has room for, now that others have died."""
        is_waiting = all(actor.calls and actor.calls[0][0].method == "place" for actor in self._actors)
        if not is_waiting or has_room(self._ray.cluster_resources(), self._executor):
            self._had_room = time.monotonic()
        elif time.monotonic() - self._had_room > ROOM_SECONDS:
            raise ModelError(
                f"all workers have died, and no machine was free for {ROOM_SECONDS:.0f} s: add one, and resume"
            )


class WorkerHost:
    """The process of a worker: creates the object that calls go to, and passes them on."""

    def __init__(self, folder: str, paths: list[str], variables: dict[str, str], threads: int) -> None:
        """Take over the driver's working folder, its paths of modules, and its data folder, if this machine has them.

        The paths are searched last. variables: also how kernels of MKL are chosen, which it has not read yet.
        """
        import torch

        if os.path.isdir(folder):
            os.chdir(folder)
        if not os.path.isdir(variables.get(DATA_FOLDER, "")):
            variables.pop(DATA_FOLDER, None)
        os.environ.update(variables)
        sys.path += [path for path in paths if path not in sys.path and os.path.exists(path)]
        warnings.simplefilter("ignore")  # the driver has already shown them
        torch.set_num_threads(threads)
        _keep_freed_memory()
        self._object: Any = None

    def place(self) -> int:
        """The process of the worker, once it was placed."""
        return os.getpid()

    def make(self, pickled: bytes) -> None:
        """Create the object."""
        import pickle

        self._object = pickle.loads(pickled)()

    def call(self, method: str, *values: Any) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*values)


def _keep_freed_memory() -> None:
    """Let this process keep memory that it frees and will need again, if it has the C library of GNU.

    Giving the buffers of a chunk back to the system and taking them again, page by page, can take a tenth of its time.
    """
    with suppress(AttributeError, OSError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_THRESHOLD, 32 << 20)  # the most that it accepts
        set_option(M_TRIM_THRESHOLD, 1 << 30)


def _reason(error: Exception) -> str:
    """Why a worker died, in Ray's words but without its advice."""
    return " ".join(str(error).split()).partition(" Some common causes")[0]
