"""Comparing two runs: versions of a model by the same tests on both, or techniques by the faults they found."""
