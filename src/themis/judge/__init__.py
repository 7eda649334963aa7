"""Phase 2, judge: from moments to posteriors, from posteriors to coverage, from faults to risk."""

from themis.errors import UsageError, nearest
from themis.judge.coverage import Judge, exact
from themis.judge.gibbs import gibbs
from themis.judge.pymc import pymc

JUDGES: dict[str, Judge] = {"exact": exact, "gibbs": gibbs, "pymc": pymc}
"""The judges by name. The package pymc is imported when its judge is called, not before."""


def choose_judge(name: str) -> Judge:
    """A judge by name."""
    if name not in JUDGES:
        raise UsageError(f"judge must be a known name, got {name!r}: {nearest(name, JUDGES)}")
    return JUDGES[name]
