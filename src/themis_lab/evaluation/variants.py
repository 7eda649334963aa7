"""Variants of the paper's method: one of its parameters is changed at a time, and its cost is measured."""

from __future__ import annotations

from typing import Any

BASE = "paper"
"""The variant that changes nothing."""
ALL = 1 << 30
"""A sample size that includes every neuron."""
CHANGES: dict[str, dict[str, Any]] = {
    "sample": {"sample-50": 50, "sample-100": 100, "sample-200": 200, "sample-500": 500, "sample-2000": 2000},
    "tolerance": {f"tolerance-{value:g}": value for value in (2.5e-4, 1e-3, 2e-3, 5e-3)},
    "draws": {"draws-1000": 1000, "draws-16000": 16_000},
    "scale": {"scale-relative": "relative"},
    "policy": {"policy-random": "random", "policy-corners": "corners", "policy-scheduled": "scheduled"},
    "judge": {"judge-exact": "exact"},
}
"""Values of an option of `run`, by the name of their variant."""
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {},
    **{name: {option: value} for option, values in CHANGES.items() for name, value in values.items()},
    "sample-all": {"sample": ALL},
    "exact-sample-all": {"judge": "exact", "sample": ALL},
    "neurons-channel": {"neurons": "channel"},
    "pymc-sample-50": {"judge": "pymc", "sample": 50},
}
"""Options that differ from those of the preset, by variant; `neurons` is that of the target.

`sample-all` is the method without its sampler. `judge-exact` judges by the closed form instead of Markov chains.
`pymc-sample-50` is `sample-50` with the sampler of PyMC.
"""
ONLY_IF_NAMED = ("pymc-sample-50",)
"""Variants that `all` leaves out: PyMC is an extra, and takes minutes."""
