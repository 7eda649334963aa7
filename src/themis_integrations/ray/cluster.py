"""What workers are asked of Ray, and the connection to it."""

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from themis.errors import UsageError, needs_extra
from themis.options import check_count

CONNECT_SECONDS = 10.0
"""How long the address of a cluster may take to accept a connection."""
ROOM_SECONDS = 120.0
"""How long a cluster that is busy may take until it has room for a worker."""
OBJECT_STORE_BYTES = 512 << 20
"""Shared memory of a Ray that is started here: enough for a few hundred chunks that wait to be merged."""
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
"""For a Ray that is started here: it sends no statistics and does not warn of a future default, its workers have the
priority of a local campaign, and if the driver is killed, its processes give up after 10 seconds instead of 60."""


@dataclass(frozen=True)
class RayWorkers:
    """How many workers there are, and what each of them reserves."""

    workers: int = 2
    address: str | None = None
    cpus_per_worker: int | None = None
    gpus_per_worker: float = 0.0

    def __post_init__(self) -> None:
        check_count("workers", self.workers)
        if self.cpus_per_worker is not None:
            check_count("cpus_per_worker", self.cpus_per_worker)
        gpus = self.gpus_per_worker
        if isinstance(gpus, bool) or not isinstance(gpus, int | float) or not 0 <= gpus < float("inf"):
            raise UsageError(f"gpus_per_worker must be a number of at least 0, got {gpus!r}")
        if gpus > 1 and gpus != int(gpus):
            raise UsageError(f"gpus_per_worker must be a whole number if it is above 1, got {gpus!r}")

    @property
    def threads(self) -> int:
        """Threads of each worker."""
        return self.cpus_per_worker or 1

    @property
    def n_sharing(self) -> int:
        """How many workers may share the memory of a device: all of them, unless each has a GPU or a part of one."""
        return math.ceil(1 / self.gpus_per_worker) if self.gpus_per_worker else self.workers


@contextmanager
def connected(executor: RayWorkers) -> Iterator[Any]:
    """The module `ray`, connected to a cluster with room for the workers. A Ray that is started here ends here."""
    ray = import_ray()
    if ray.is_initialized():  # by the program that calls Themis
        _check_room(ray, executor)
        yield ray
        return
    address = executor.address or os.environ.get("RAY_ADDRESS")
    with _own_signals(), _quiet(ray):
        if address:
            _connect(ray, address)
        else:
            _start(ray, executor)
    try:
        _check_room(ray, executor)
        yield ray
    finally:
        with _own_signals():
            ray.shutdown()


def import_ray() -> Any:
    """The module `ray`, which is an optional extra."""
    with needs_extra("ray", "executor ray needs the package ray, which is not installed"):
        return import_module("ray")


def _start(ray: Any, executor: RayWorkers) -> None:
    """Start a Ray on this machine. Its CPUs are a count only: workers may share cores."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        ray.init(
            address="local",
            num_cpus=executor.workers * executor.threads,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
    except Exception as error:
        raise UsageError(
            f"Ray must be able to start on this machine, but it failed with {type(error).__name__}: "
            f"{' '.join(str(error).split())}: start a cluster with ray start --head and pass address=auto"
        ) from error


def _connect(ray: Any, address: str) -> None:
    """Connect to a running cluster."""
    remedy = "check it, or start a cluster with ray start --head; without an address, Ray is started on this machine"
    problem = f"address must be that of a running Ray cluster, but {address!r} does not answer"
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            raise UsageError(f"{problem} ({error.strerror or error}): {remedy}") from error
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except Exception as error:
        with suppress(Exception):
            ray.shutdown()
        raise UsageError(f"{problem} ({' '.join(str(error).split())}): {remedy}") from error


def _check_room(ray: Any, executor: RayWorkers) -> None:
    """Refuse more workers than a cluster has room for, and to wait forever until a busy one can hold the first."""
    resources = ray.cluster_resources()
    for unit, each in _needs(executor).items():
        needed, there = executor.workers * each, resources.get(unit, 0.0)
        if needed > there:
            raise UsageError(
                f"{executor.workers} workers with {each:g} {unit} each need {needed:g} {unit}s, but the cluster has "
                f"{there:g}: ask for fewer workers, or add machines to the cluster"
            )
    end = time.monotonic() + ROOM_SECONDS
    while not has_room(free := ray.available_resources(), executor):
        if time.monotonic() > end:
            raise UsageError(
                f"no worker could be placed within {ROOM_SECONDS:.0f} seconds: each needs {executor.threads} CPU and "
                f"{executor.gpus_per_worker:g} GPU, and the cluster has {free.get('CPU', 0):g} CPU and "
                f"{free.get('GPU', 0):g} GPU free; wait until other work has ended, or add machines"
            )
        time.sleep(0.5)


def has_room(resources: dict[str, float], executor: RayWorkers) -> bool:
    """Whether these resources of a cluster suffice for a worker."""
    return all(resources.get(unit, 0.0) >= each for unit, each in _needs(executor).items())


def _needs(executor: RayWorkers) -> dict[str, float]:
    return {"CPU": executor.threads, "GPU": executor.gpus_per_worker}


@contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Keep what Ray says about itself off the terminal: its start, and deaths of workers, which `RayPool` reports.

    Ray prints those to stdout, where they would break the output of `--json`.
    """
    log = logging.getLogger("ray")
    before = log.level
    log.setLevel(logging.ERROR)
    with suppress(AttributeError):  # it is not part of Ray's interface
        ray._private.worker.print_to_stdstream = lambda *_, **__: None
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets handlers of its own, which end the process at once: put those of this process back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
