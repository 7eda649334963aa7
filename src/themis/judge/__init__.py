"""Phase 2, judge: from moments to posteriors, from posteriors to coverage, from faults to risk."""

from functools import cache

from themis.errors import UsageError, nearest
from themis.judge.coverage import Judge, exact
from themis.judge.gibbs import gibbs
from themis.plugins import Extensible

JUDGES: Extensible[Judge] = Extensible("themis.judges", {"exact": exact, "gibbs": gibbs})
"""The judges by name; packages add others."""


@cache
def choose_judge(name: str) -> Judge:
    """A judge by name."""
    if name not in JUDGES:
        raise UsageError(f"judge must be a known name, got {name!r}: {nearest(name, JUDGES)}")
    return JUDGES[name]
