"""What a run's last checkpoint says about the model: of a run that goes on, or was killed, as of one that ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from time import sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from themis.errors import StoreError

if TYPE_CHECKING:
    from themis.judge.estimate import Estimate
    from themis.runs.store.reader import Reader
    from themis.runs.store.writer import Checkpoint

BINS = 12
"""Parts of theta's range that the fault rate is shown for."""
LEAST = 10
"""Uniform tests that a part must have on average; with fewer tests there are fewer parts."""
Z = 1.959963984540054


def read_checkpoint(run: Reader) -> Checkpoint | None:
    """The last checkpoint; None before the first, or where its file was removed."""
    for _ in range(3):  # a campaign may write the next one and remove the file before it is opened
        try:
            return run.checkpoint()
        except StoreError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
        sleep(0.05)
    return None


def uniform_estimates(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """Fault rate and residual risk, from the uniform stream's counts."""
    if checkpoint is None:
        return {"fault_rate": None, "residual_risk": None}
    from themis.judge.risk import fault_rate, residual_risk

    arrays = checkpoint.arrays
    tests, faults = (arrays[f"/tally/uniform_{each}_by_seed"] for each in ("tests", "faults"))
    return {
        "fault_rate": _plain(fault_rate(tests, faults)),
        "residual_risk": _plain(residual_risk(arrays["/tally/uniform_times_seen"], int(tests.sum()))),
    }


def layer_sensitivity(run: Reader, checkpoint: Checkpoint | None) -> dict[str, list[float]]:
    """By layer: the mean sensitivity of its neurons, and how it is spread over them (5th to 95th percentile)."""
    if checkpoint is None or "start" not in run.record:
        return {}
    arrays, totals, n_tests = checkpoint.arrays, 0.0, 0
    for stream in ("uniform", "search"):
        count = int(arrays[f"/moments/{stream}/count"])
        shift, sums = (arrays[f"/moments/{stream}/{each}"].double().numpy() for each in ("shift", "sums"))
        totals, n_tests = totals + shift * count + sums, n_tests + count
    if not n_tests:
        return {}
    mean = np.asarray(totals / n_tests)
    found = {}
    for layer in run.record["start"]["layers"]:
        part = mean[layer["start"] : layer["start"] + layer["n_neurons"]]
        if len(part) and np.isfinite(part).all():
            low, high = np.quantile(part, (0.05, 0.95))
            found[layer["name"]] = [float(f"{each:.5g}") for each in (part.mean(), low, high)]
    return found


def phase_seconds(summary: dict[str, Any] | None, checkpoint: Checkpoint | None) -> dict[str, float] | None:
    """Where the time went."""
    if summary is not None:
        return dict(summary["seconds"])
    return None if checkpoint is None else dict(checkpoint.values["seconds"])


def rates_by_theta(run: Reader, checkpoint: Checkpoint | None) -> list[dict[str, Any]]:
    """The uniform stream's fault rate in equal parts of each dimension of theta.

    The stream's theta is a function of counters, so the tests in a part are counted again, not guessed from its width.
    """
    from themis.compute import rng
    from themis.runs.store.schema import theta_column
    from themis.search.policy import FOR_THETA, UNIFORM_STREAM

    if checkpoint is None:
        return []
    n_tests = int(checkpoint.values["tally"]["counts"]["uniform_tests"])
    if not n_tests:
        return []
    seed, counter = int(run.record["settings"]["random_seed"]), np.arange(n_tests)
    columns = ", ".join(theta_column(name) for name in run.theta)
    found = run.select(columns, "stream = 'uniform' AND id < ?", (checkpoint.tests,))
    broken = np.array(found, dtype=np.float64).reshape(-1, len(run.theta))
    bins = int(np.clip(n_tests // LEAST, 1, BINS))
    rates = []
    for k, each in enumerate(run.record["theta"]):
        low, high = float(each["low"]), float(each["high"])
        if high <= low:
            continue
        edges = np.linspace(low, high, bins + 1)
        drawn = low + rng.uniform(seed, FOR_THETA, k, UNIFORM_STREAM, counter) * (high - low)
        tests, faults = (np.histogram(v.clip(low, high), edges)[0] for v in (drawn, broken[:, k]))
        tests = np.maximum(tests, faults)  # of redrawn tests the theta is another one than the counter says
        parts = [
            {"low": float(edges[b]), "high": float(edges[b + 1]), "tests": int(n), "faults": int(f), **_wilson(f, n)}
            for b, (n, f) in enumerate(zip(tests, faults, strict=True))
            if n
        ]
        rates.append({"name": each["name"], "unit": each["unit"], "identity": each["identity"], "parts": parts})
    return rates


def _wilson(faults: int, tests: int) -> dict[str, float]:
    """A share with its 95% interval after Wilson."""
    share, z2 = faults / tests, Z * Z / tests
    centre, half = share + z2 / 2, Z * np.sqrt(share * (1 - share) / tests + z2 / tests / 4)
    low, high = (centre - half) / (1 + z2), (centre + half) / (1 + z2)
    return {"rate": float(share), "rate_low": max(0.0, min(share, float(low))), "rate_high": min(1.0, float(high))}


def strengths(theta: Any, dimensions: Sequence[dict[str, Any]]) -> tuple[Any, Any]:
    """How strong faults are, and which dimension of theta goes furthest: the share of its range from its identity."""
    low, high, identity = (np.array([each[end] for each in dimensions]) for end in ("low", "high", "identity"))
    away = np.asarray(theta, dtype=np.float64) - identity
    reach = np.where(away >= 0, high - identity, identity - low)
    shares = np.divide(np.abs(away), reach, out=np.zeros_like(away), where=reach > 0)
    return shares.max(-1), shares.argmax(-1)


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else asdict(estimate)
