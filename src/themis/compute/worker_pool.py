"""A pool of workers: objects in other processes, which calls are distributed to.

A worker that dies is replaced, and the calls that it had not answered are made again.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from themis.compute.cluster import ROOM_SECONDS, RayExecutor, has_room
from themis.compute.mailbox import Letter, Mailbox
from themis.errors import ModelError, ThemisError, first_line, warn

MOST_CRASHES = 3
"""How many workers may die of the same call; and per worker, how many in a row before their first call."""
AHEAD = 6
"""Calls per worker that are made before the oldest one was taken: the results wait in memory."""
IDLE_CALLS = 3
"""Calls with which a worker bridges the time until the driver calls it next."""
DEPTH = 2
"""Calls that a worker is given before it has answered the first of them."""
_POLL_SECONDS = 5.0
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of `mallopt`, from malloc.h."""
DATA_FOLDER = "THEMIS_DATA"
"""The environment variable with the folder of data sets."""
KERNELS = "MKL_CBWR"
"""The environment variable that fixes which kernels MKL uses."""
PLACE, IDLE = "place", "idle"
"""Calls of the pool itself: the first of a worker, which is answered once the cluster has placed it, and what it does
when it is idle."""


class Pool(Protocol):
    """Workers of one kind. A call goes to any of them; a broadcast goes to all, and to those that replace them."""

    @property
    def n_workers(self) -> int:
        """The number of workers."""

    def share(self, value: Any) -> Any:
        """A value that several calls are given; it is sent to each machine once."""

    def broadcast(self, method: str, *values: Any) -> None:
        """Call a method of every worker, before all calls that are submitted later."""

    def when_idle(self, method: str) -> None:
        """Call a method of workers that have nothing to do, a few times at once and then while others work.

        It returns whether there is more to do.
        """

    def submit(self, label: str, method: str, *values: Any, group: str | None = None, is_urgent: bool = True) -> int:
        """Call a method of one worker; returns the number of the call.

        label: what the call is, in messages. group: calls of one group go to the same worker where that costs no time.
        A call that is not urgent waits until a worker would be idle while others still work on urgent ones.
        """

    def hasten(self, call: int) -> None:
        """Make a call urgent."""

    def fill(self) -> None:
        """Give calls that are not urgent to workers that have nothing to do: no other will come for a while."""

    def result(self, call: int) -> Any:
        """Wait for what a call returns, and forget it. If it has raised an error or ended its workers, raise that."""

    def discard(self, call: int) -> None:
        """Forget a call whose result is not needed."""

    def next_done(self, calls: Iterable[int]) -> int:
        """Wait until one of these calls is done, and return its number."""


@dataclass(frozen=True)
class _Submitted:
    """A call that any worker can execute."""

    label: str
    method: str
    values: tuple[Any, ...]
    group: str | None


@dataclass(frozen=True)
class _Call:
    """A call that one worker executes."""

    number: int | None
    """None for calls that set the worker up."""
    label: str
    ref: Any


@dataclass(frozen=True)
class _Failed:
    """The result of a call that has none."""

    error: Exception


@dataclass(eq=False)
class _Actor:
    """A worker, and the calls that it has not answered, in the order in which it executes them."""

    handle: Any
    mailbox: Mailbox | None
    """Where it leaves large answers; it may not find it, and sends them then."""
    calls: deque[_Call] = field(default_factory=deque)
    groups: set[str | None] = field(default_factory=set)
    is_ready: bool = False
    is_complete: bool = False
    """Whether nothing is left to do while it is idle."""
    since: float = 0.0
    """When it began its oldest call."""

    def send(self, call: _Call) -> None:
        """Add a call, which is executed after the others."""
        if not self.calls:
            self.since = time.monotonic()
        self.calls.append(call)

    def forget(self) -> None:
        """Drop the oldest call."""
        self.calls.popleft()
        self.since = time.monotonic()


class RayPool:
    """Workers that are actors of Ray.

    `make` creates the object that calls go to, in the process of the worker. A worker executes its calls in order; a
    worker that dies is replaced, and its calls are made again, each alone in its worker: the answer to one may have
    been lost because the next has ended the process. If three workers die of the same call, its result is an error.
    """

    def __init__(self, ray: Any, executor: RayExecutor, make: Callable[[], Any]) -> None:
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
        self._submitted: dict[int, _Submitted] = {}
        self._waiting: list[int] = []
        """Calls that no worker was given, in the order in which they are: those that are urgent, then the others."""
        self._spare: set[int] = set()
        """Calls that are not urgent."""
        self._awaited: int | None = None
        self._done: dict[int, Any] = {}
        self._crashes: Counter[int] = Counter()
        self._suspects: set[int | None] = set()
        self._idle_method: str | None = None
        self._failed_starts = 0
        self._n_calls = 0
        self._host = ray.remote(
            num_cpus=executor.threads,
            num_gpus=executor.gpus_per_worker,
            max_restarts=0,
            scheduling_strategy="SPREAD",
        )(WorkerHost)
        self._had_room = time.monotonic()
        self._actors = [self._start() for _ in range(executor.workers)]

    @property
    def n_workers(self) -> int:
        return self._executor.workers

    def share(self, value: Any) -> Any:
        return self._ray.put(value)

    def broadcast(self, method: str, *values: Any) -> None:
        self._broadcasts.append((method, values))
        for actor in self._actors:
            actor.send(_Call(None, method, actor.handle.call.remote(method, *values)))

    def when_idle(self, method: str) -> None:
        self._idle_method = method
        for actor in self._actors:
            if actor.is_ready and not actor.calls:
                self._occupy(actor, method, IDLE_CALLS)

    def submit(self, label: str, method: str, *values: Any, group: str | None = None, is_urgent: bool = True) -> int:
        number, self._n_calls = self._n_calls, self._n_calls + 1
        self._submitted[number] = _Submitted(label, method, values, group)
        if not is_urgent:
            self._spare.add(number)
        self._wait_for_worker([number])
        self._assign()
        return number

    def hasten(self, call: int) -> None:
        self._spare.discard(call)
        self._wait_for_worker([])
        self._assign()

    def fill(self) -> None:
        self._assign(is_pausing=True)

    def result(self, call: int) -> Any:
        self._awaited = call
        self.hasten(call)
        while call not in self._done:
            self._receive_next()
        del self._submitted[call]
        result = self._done.pop(call)
        if isinstance(result, _Failed):
            raise result.error
        self._assign()
        return result

    def discard(self, call: int) -> None:
        self._submitted.pop(call, None)
        self._done.pop(call, None)
        self._spare.discard(call)
        with suppress(ValueError):
            self._waiting.remove(call)

    def next_done(self, calls: Iterable[int]) -> int:
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
        paths, name = [os.path.abspath(entry) for entry in sys.path], f"themis-{uuid4().hex}"
        mailbox = Mailbox.create(name, DEPTH)
        variables = {each: os.environ[each] for each in (DATA_FOLDER, KERNELS) if each in os.environ}
        handle = self._host.remote(os.getcwd(), paths, variables, self._executor.threads, name)
        actor = _Actor(handle, mailbox)
        actor.calls += [_Call(None, PLACE, handle.place.remote()), _Call(None, "make", handle.make.remote(self._make))]
        for method, values in self._broadcasts:
            actor.calls.append(_Call(None, method, handle.call.remote(method, *values)))
        return actor

    def _assign(self, *, is_pausing: bool = False) -> None:
        """Give calls to workers that are free, and each worker its next call before it has answered, if that is urgent.

        A busy worker gets the call if it will be free first, which is the one that has been busy for longest: calls of
        no group take about the same time. Calls that have a group are long, and none of them should wait for a certain
        worker. Only the call whose result is awaited is made while many results have not been taken.

        is_pausing: whether the driver makes no call for a while, so that workers get calls that are not urgent.
        """
        while self._waiting:
            number = self._awaited if self._awaited in self._waiting else self._waiting[0]
            if number != self._awaited and len(self._done) >= AHEAD * self.n_workers:
                return
            is_spare = number in self._spare
            if is_spare and not is_pausing and not self._are_urgent_under_way():
                return
            depth = DEPTH if self._submitted[number].group is None and not is_spare else 1
            free = [actor for actor in self._actors if actor.is_ready and len(actor.calls) < depth]
            if not free:
                return
            actor = min(free, key=lambda actor: (len(actor.calls), not actor.is_complete, actor.since))
            if self._submitted[number].group is not None:
                number = self._choose(actor)
            if actor.calls and not self._suspects.isdisjoint([number, *(call.number for call in actor.calls)]):
                return
            self._waiting.remove(number)
            call = self._submitted[number]
            actor.groups.add(call.group)
            actor.send(_Call(number, call.label, actor.handle.call.remote(call.method, *call.values)))

    def _are_urgent_under_way(self) -> bool:
        """Whether urgent calls are executed, so that a worker would wait for others; one that is alone never does.

        The worker that answers the last urgent call is not given any other: the driver will have one for it at once.
        """
        if len(self._actors) == 1:
            return True
        under_way = {call.number for actor in self._actors for call in actor.calls}
        return not under_way.isdisjoint(self._submitted.keys() - self._spare)

    def _use_idle(self) -> None:
        """Give something useful to workers that would wait for others."""
        method = self._idle_method
        if method is None or not any(call.number in self._submitted for actor in self._actors for call in actor.calls):
            return
        for actor in self._actors:
            if actor.is_ready and not actor.calls and not actor.is_complete:
                self._occupy(actor, method, 1)

    def _occupy(self, actor: _Actor, method: str, n_calls: int) -> None:
        for _ in range(n_calls):
            actor.send(_Call(None, IDLE, actor.handle.call.remote(method)))

    def _choose(self, actor: _Actor) -> int:
        """The next call for a worker: of a group that it has had, else of one that no other has, else the oldest."""
        elsewhere = {group for other in self._actors if other is not actor for group in other.groups}

        def rank(number: int) -> tuple[bool, bool]:
            group = self._submitted[number].group
            return group not in actor.groups, group in elsewhere

        return min(self._waiting, key=rank)

    def _receive_next(self) -> None:
        """Wait until some worker has answered its oldest call, and take the answer."""
        self._use_idle()
        heads = {actor.calls[0].ref: actor for actor in self._actors if actor.calls}
        ready, _ = self._ray.wait(list(heads), num_returns=1, timeout=_POLL_SECONDS)
        if not ready:
            self._check_placed()
        for ref in ready:
            self._receive(heads[ref])
        self._assign()

    def _receive(self, actor: _Actor) -> None:
        errors = self._ray.exceptions
        call = actor.calls[0]
        try:
            answer = self._ray.get(call.ref)
            if isinstance(answer, Letter) and actor.mailbox is not None:
                answer = actor.mailbox.take(answer)
        except errors.RayTaskError as error:
            translated = _translated(error.cause if isinstance(error.cause, Exception) else error)
            if call.number is None:
                raise translated from error
            self._finish(call.number, _Failed(translated))
        except errors.ObjectLostError:  # its machine has died after it had answered
            if call.number is not None:
                self._repeat([call.number])
        except errors.RayError as error:
            self._replace(actor, error)
            return
        else:
            if call.number is not None:
                self._finish(call.number, answer)
            elif call.label == IDLE:
                actor.is_complete = not answer
        actor.forget()
        if not actor.is_ready and not any(call.number is None for call in actor.calls):
            actor.is_ready, self._failed_starts = True, 0

    def _replace(self, actor: _Actor, error: Exception) -> None:
        """Start another worker in place of one that has died, and make its calls again."""
        first = actor.calls[0].number
        if "node has died" not in str(error):  # for the death of a machine, no call is to blame
            if first is None:
                self._failed_starts += 1
            else:
                self._crashes[first] += 1
        if self._failed_starts >= MOST_CRASHES * self._executor.workers:
            raise ModelError(f"{self._failed_starts} workers in a row died before their first call: {_reason(error)}")
        if first is not None and self._crashes[first] >= MOST_CRASHES:
            crash = ModelError(
                f"{MOST_CRASHES} workers in a row died while they ran {actor.calls[0].label}, so the model seems to "
                f"crash its process: {_reason(error)}"
            )
            self._finish(first, _Failed(crash))
            actor.calls.popleft()
        warn("a worker has died and is replaced; its work is done again")
        with suppress(Exception):
            self._ray.kill(actor.handle)
        self._repeat([call.number for call in actor.calls if call.number is not None])
        self._actors[self._actors.index(actor)] = self._start()

    def _finish(self, call: int, result: Any) -> None:
        if call in self._submitted:  # else it was discarded
            self._done[call] = result

    def _repeat(self, calls: list[int]) -> None:
        """Make calls again, the oldest first."""
        self._suspects.update(calls)
        self._wait_for_worker(calls)

    def _wait_for_worker(self, calls: list[int]) -> None:
        """Let calls wait for a worker, before those that were submitted later or are less urgent."""
        waiting = {*self._waiting, *calls} & self._submitted.keys()
        self._waiting = sorted(waiting, key=lambda call: (call in self._spare, call))

    def _check_placed(self) -> None:
        """Refuse to wait for workers that no machine of the cluster has room for, now that others have died."""
        is_waiting = all(actor.calls and actor.calls[0].label == PLACE for actor in self._actors)
        if not is_waiting or has_room(self._ray.cluster_resources(), self._executor):
            self._had_room = time.monotonic()
        elif time.monotonic() - self._had_room > ROOM_SECONDS:
            raise ModelError(
                f"all workers have died, and for {ROOM_SECONDS:.0f} seconds the cluster had no machine for another: "
                "add machines, and resume"
            )


class WorkerHost:
    """The process of a worker: creates the object that calls go to, and passes them on."""

    def __init__(self, folder: str, paths: list[str], variables: dict[str, str], threads: int, mailbox: str) -> None:
        """Take over the driver's working folder, its paths of modules, and its data folder, if this machine has them.

        The paths are searched last. variables: also how kernels of MKL are chosen, which it has not read yet. mailbox:
        the name under which the driver waits for large answers.
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
        self._mailbox = Mailbox.find(mailbox, DEPTH)

    def place(self) -> int:
        """The process of the worker, once it was placed."""
        return os.getpid()

    def make(self, pickled: bytes) -> None:
        """Create the object."""
        import pickle

        self._object = pickle.loads(pickled)()

    def call(self, method: str, *values: Any) -> Any:
        """Call a method of the object."""
        answer = getattr(self._object, method)(*values)
        return answer if self._mailbox is None else self._mailbox.post(answer)


def _keep_freed_memory() -> None:
    """Let this process keep memory that it frees and will need again, if it has the C library of GNU.

    Giving the buffers of a chunk back to the system and taking them again, page by page, can take a tenth of its time.
    """
    with suppress(AttributeError, OSError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(M_MMAP_THRESHOLD, 32 << 20)  # the most that it accepts
        set_option(M_TRIM_THRESHOLD, 1 << 30)


def _translated(error: Exception) -> Exception:
    """An error of a worker as one of this process, without the frames of Ray."""
    if isinstance(error, ThemisError):
        return type(error)(str(error))
    return ModelError(f"a worker failed with {type(error).__name__}: {' '.join(str(error).split())}")


def _reason(error: Exception) -> str:
    """Why a worker died, in Ray's words but without its advice."""
    return " ".join(str(error).split()).partition(" Some common causes")[0]
