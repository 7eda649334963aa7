"""Phase 2, judge: from moments to posteriors, from posteriors to coverage, from faults to risk."""

from themis.judge.exact import exact
from themis.judge.gibbs import gibbs
from themis.judge.posterior import Judge
from themis.judge.pymc import pymc

JUDGES: dict[str, Judge] = {"exact": exact, "gibbs": gibbs, "pymc": pymc}
"""The judges by name. The package pymc is imported when its judge is called, not before."""
