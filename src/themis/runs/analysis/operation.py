"""The fault rate in operation: the uniform tests of a finished run, weighted by how often their theta occurs there."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from themis.errors import DataError, StoreError, UsageError, nearest
from themis.judge.estimate import Estimate, describe_share
from themis.judge.risk import weighted_fault_rate
from themis.measure.tests import Floats
from themis.perturb.distribution import Distribution, read_distribution
from themis.perturb.names import split_outside
from themis.reading import MAX_YAML, parse_yaml, read_regular
from themis.runs.estimates import read_progress, recorded_space
from themis.runs.store.reader import Reader
from themis.runs.store.schema import theta_column
from themis.search.policy import UNIFORM_STREAM
from themis.text import counted

MIN_EFFECTIVE_TESTS = 50
"""Least effective sample size of the weighted tests; below it, a few tests would dominate the estimate."""


@dataclass(frozen=True)
class OperationalRate:
    """A fault rate under an operational profile, and the number of tests behind it."""

    fault_rate: Estimate
    profile: dict[str, str]
    """The distribution of each theta in operation; a theta without an entry is distributed as in the run."""
    tests: int
    effective_tests: float
    """The number of tests drawn from the profile itself that would give the same precision."""

    def __str__(self) -> str:
        profile = ", ".join(f"{name}~{distribution}" for name, distribution in self.profile.items())
        return (
            f"fault rate in operation, {profile}: {describe_share(self.fault_rate)}; the run's "
            f"{counted(self.tests, 'uniform test')} are worth {self.effective_tests:,.0f}"
        )


def rate_in_operation(run: str | Path, profile: str | Path | Mapping[str, str]) -> OperationalRate:
    """The fault rate of a run if theta were distributed as in a profile; no test is run.

    Args:
        run: The folder of the run.
        profile: Distributions by theta: `{"density": "beta(1,8)"}`, `"density~beta(1,8)"`, or a YAML file with one line
            per theta, such as `density: beta(1,8)`.
    """
    with closing(Reader(run)) as reader:
        progress, record = read_progress(reader), reader.record
        dimensions = {theta["name"]: theta for theta in record["theta"]}
        wanted = _read_profile(profile, dimensions)
        for name, each in wanted.items():
            each.check(dimensions[name]["low"], dimensions[name]["high"], name)
        n_tests = 0 if progress is None else progress.counts["uniform_tests"]
        if progress is None or not n_tests:
            raise DataError(f"{run} must have uniform tests, but has none: run it with a uniform_share above 0")
        for name in ("min_ssim", "min_vif", "seed_weights", "decide"):
            if record["settings"].get(name) is not None:
                raise UsageError(f"{run} was run with {name}, so its tests cannot be weighted again: run it without")
        columns = ", ".join(map(theta_column, dimensions))
        rows = reader.select(columns, "stream = 'uniform' AND id < ?", (progress.tests,))
    counter, space = np.arange(n_tests), recorded_space(record)
    drawn = space.uniform_tests(counter, UNIFORM_STREAM, counter)
    is_fault = np.isin(_as_words(drawn.theta), _as_words(np.array(rows, dtype=np.float32).reshape(-1, len(dimensions))))
    if is_fault.sum() < 0.99 * len(rows):
        raise StoreError(f"the faults of {run} must be those of its uniform tests, but are not: run the campaign again")
    weight = np.ones(n_tests)
    for k, theta in enumerate(space.theta):
        if theta.name in wanted:
            weight *= wanted[theta.name].density(drawn.theta[:, k], theta.low, theta.high)
            if isinstance(theta.distribution, Distribution):
                weight /= theta.distribution.density(drawn.theta[:, k], theta.low, theta.high)
    effective = float(weight.sum() ** 2 / (weight**2).sum()) if np.isfinite(weight).all() and weight.any() else 0.0
    if effective < MIN_EFFECTIVE_TESTS:
        ranges = ((name, dimensions[name], each) for name, each in wanted.items())
        profile_text = ", ".join(f"{name}={theta['low']:g}:{theta['high']:g}~{each}" for name, theta, each in ranges)
        single, _, rest = record["perturbation"].partition("(")
        specification = profile_text if "+" in single + rest else f"{single}({profile_text})"
        raise DataError(
            f"the uniform tests of {run} must be worth at least {MIN_EFFECTIVE_TESTS} tests under the profile, but "
            f"{counted(n_tests, 'test')} are worth {effective:.0f}: run a campaign under the profile itself, with "
            f"'{specification}' in --perturb"
        )
    rate = weighted_fault_rate(drawn.seed, is_fault, weight)
    return OperationalRate(rate, {name: str(each) for name, each in wanted.items()}, n_tests, effective)


def _as_words(theta: Floats) -> NDArray[np.void]:
    """Each row as a single value, so that rows can be compared."""
    return np.ascontiguousarray(theta).view(np.dtype((np.void, theta.shape[1] * theta.itemsize))).ravel()


def _read_profile(profile: str | Path | Mapping[str, str], known: Mapping[str, object]) -> dict[str, Distribution]:
    if isinstance(profile, str) and "~" in profile:
        parts = (part.partition("~") for part in split_outside(profile, ","))
        texts = {name.strip(): text for name, _, text in parts}
    elif isinstance(profile, str | Path):
        try:
            texts = parse_yaml(read_regular(profile, MAX_YAML).decode())
        except (OSError, ValueError) as error:
            raise DataError(
                f"a profile must be a YAML file, but {profile} is not: {getattr(error, 'strerror', None) or error}; "
                "correct it, or write THETA~DISTRIBUTION"
            ) from error
    else:
        texts = dict(profile)
    if not isinstance(texts, dict) or not texts or not all(isinstance(text, str) for text in texts.values()):
        raise UsageError(f"a profile must name distributions by theta, such as density: beta(1,8), got {texts!r:.80}")
    for name in texts:
        if name not in known:
            raise UsageError(f"theta {name!r} of the profile must be one of the run's: {nearest(str(name), known)}")
    return {name: read_distribution(text) for name, text in texts.items()}
