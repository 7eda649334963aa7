"""A Ray whose workers run in virtual time: real campaigns, with the driver's real code, on a cluster that is simulated.

A call is executed at once, in this process, and its answer becomes available when a worker of the cluster would have
sent it. The clock advances by the CPU time that the driver takes, and by the time that it waits.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from themis_integrations.ray.pool import ASIDE, WorkerHost

LATENCY = 2e-3
"""Seconds from the end of a call in a worker to its answer's arrival, beside the time that its bytes take."""
LINK = 10e9 / 8
"""Bytes per second between any two processes; all answers to the driver share one such connection."""
SUBMIT, RECEIVE, STORED, RECEIVE_STORED = 1e-4, 1.5e-4, 100_000, 3e-4
"""What a call takes in the driver, in seconds, as measured with Ray: making it, and taking its answer; more if the
answer has so many bytes that Ray keeps it in shared memory."""


@dataclass(frozen=True)
class Cluster:
    """What the parts of a campaign take on a cluster, in seconds, and their messages, in bytes."""

    chunk: float
    reply: float
    """The bytes of the answer for a chunk."""
    sums: float
    """The bytes of the sums of a stream."""
    add: float
    """Adding sums to those of another worker, beside their transfer."""
    judging: float


@dataclass(eq=False)
class _Answer:
    """An answer, and when it is complete in its worker."""

    value: Any
    end: float
    n_bytes: float
    is_here: bool = False


@dataclass(eq=False)
class _Actor:
    """A worker, and when it will have executed the calls of each group."""

    host: WorkerHost
    free: dict[str, float] = field(default_factory=lambda: {"": 0.0, ASIDE: 0.0})


class VirtualRay:
    """As much of the module `ray` as Themis uses."""

    cloudpickle = pickle
    exceptions = SimpleNamespace(**{name: type(name, (Exception,), {}) for name in ("RayError", "ObjectLostError")})
    exceptions.RayTaskError = type("RayTaskError", (exceptions.RayError,), {})

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.n_chunks = cluster, 0
        self._now = self._link_free = 0.0
        self._seen = time.process_time()

    def now(self, waited: float = 0.0) -> float:
        """The time on the clock, after the driver has waited or computed for so many seconds more."""
        seen = time.process_time()
        self._now += seen - self._seen + waited
        self._seen = seen
        return self._now

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        """What this process computes in the block takes the driver no time."""
        self.now()
        yield
        self._seen = time.process_time()

    def put(self, value: Any) -> Any:
        return value

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float("inf")}

    def remote(self, **_: Any) -> Any:
        return lambda kind: SimpleNamespace(remote=partial(self._start, kind))

    def _start(self, kind: type[WorkerHost], *_: Any) -> Any:
        actor = _Actor(object.__new__(kind))  # this process has its folder, paths and threads already
        return SimpleNamespace(**{name: self._method(actor, name) for name in ("place", "make", "call")})

    def _method(self, actor: _Actor, name: str) -> Any:
        run = partial(self._run, actor, name)
        options = lambda concurrency_group: SimpleNamespace(remote=partial(run, concurrency_group))  # noqa: E731
        return SimpleNamespace(remote=partial(run, ""), options=options)

    def _run(self, actor: _Actor, name: str, group: str, *values: Any) -> _Answer:
        now, cluster = self.now(SUBMIT), self.cluster
        with self._elsewhere():
            given = [each for each in values if isinstance(each, _Answer)]
            called = [each.value if isinstance(each, _Answer) else each for each in values]
            value = getattr(actor.host, name)(*called)
            seconds, n_bytes = 0.0, 0.0
            if called[:1] == ["measure"]:
                self.n_chunks += 1
                seconds, n_bytes = cluster.chunk, cluster.reply
            elif group == ASIDE:
                n_bytes = cluster.sums * len(value)
                seconds = cluster.add * len(value) + sum(LATENCY + each.n_bytes / LINK for each in given[1:])
            end = max(now + LATENCY / 2, actor.free[group], *(each.end for each in given)) + seconds
            actor.free[group] = end
            return _Answer(value, end, n_bytes)

    def wait(self, answers: list[_Answer], **_: Any) -> tuple[list[_Answer], list[_Answer]]:
        """The answer that arrives first."""
        first = min(answers, key=lambda answer: (not answer.is_here, answer.end))
        if not first.is_here:
            first.is_here = True
            self._link_free = max(self._link_free, first.end + LATENCY) + first.n_bytes / LINK
            self._now = max(self.now(), self._link_free)
        return [first], []

    def get(self, answer: _Answer) -> Any:
        self.wait([answer])
        self.now(RECEIVE if answer.n_bytes < STORED else RECEIVE_STORED)
        return answer.value

    def kill(self, _: Any) -> None:
        pass
