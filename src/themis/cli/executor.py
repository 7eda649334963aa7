"""The executor of a command: which options choose it, and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from themis.cli.options import Parser, add_option
from themis.compute.cluster import RayExecutor, choose_executor
from themis.errors import UsageError

if TYPE_CHECKING:
    from argparse import Namespace

WORKERS_HELP = "number of workers on Ray; never changes the result"
RAY_ONLY = ("address", "cpus_per_worker", "gpus_per_worker")
"""Options that only the executor ray has."""


def add_executor(parser: Parser, *, workers: str | None = WORKERS_HELP) -> None:
    """Add the options that choose an executor. workers: the help of `--workers`; None if the command has it already."""
    group = parser.add_argument_group("where it runs")
    text = "local, or ray: in workers on this machine or on a cluster, with the same results"
    add_option(group, "executor", str, "local", text)
    if workers is not None:
        add_option(group, "workers", int | None, None, workers)
    text = "address of a running Ray cluster, or auto for one on this machine (default: Ray is started and stopped)"
    add_option(group, "address", str | None, None, text)
    add_option(group, "cpus_per_worker", int | None, None, "CPUs and threads of each worker (default: 1)")
    add_option(group, "gpus_per_worker", float, 0.0, "GPUs of each worker; 0.5 lets two workers share one")


def read_executor(
    arguments: Namespace, explicit_options: set[str], *, shares_workers: bool = False
) -> RayExecutor | None:
    """The executor that the options choose; None is the local one.

    shares_workers: whether the local executor has workers too.
    """
    if choose_executor(arguments.executor) is not None:
        n_workers = arguments.workers if "workers" in explicit_options else None
        n_workers = RayExecutor.workers if n_workers is None else n_workers
        return RayExecutor(n_workers, arguments.address, arguments.cpus_per_worker, arguments.gpus_per_worker)
    for name in (*RAY_ONLY, *(() if shares_workers else ("workers",))):
        if name in explicit_options and getattr(arguments, name):  # a printed configuration has all options
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} must come with --executor ray, which starts workers: add it, or leave {flag} out")
    return None
