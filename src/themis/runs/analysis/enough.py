"""What a shrunk fault still needs, in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from themis.measure.tests import Floats
    from themis.perturb.perturbation import Theta
    from themis.runs.analysis.bench import TestBench

NAMED = 3
"""Dimensions that a sentence names, those that go furthest; the others are counted."""


def what_is_enough(bench: TestBench, before: Floats, after: Floats) -> str:
    """Such as "12 of 200 drops are enough" or "sigma 0.031 instead of 0.2 is enough; angle does not matter"."""
    is_back = (after == bench.identity) if len(bench.theta) > 1 else np.array([False])
    idle = [theta.name for theta, back in zip(bench.theta, is_back, strict=True) if back]
    order = [k for k in np.argsort(-bench.shares(after), kind="stable").tolist() if not is_back[k]]
    needed = [_say(bench.theta[k], float(before[k]), float(after[k]), bool(bench.is_whole[k])) for k in order]
    if not needed:
        return "the identity of theta is enough: nothing of it matters"
    is_one = len(needed) == 1 and (not needed[0][0].isdigit() or needed[0].startswith("1 of "))
    if len(needed) > NAMED:
        needed[NAMED:] = [f"{len(needed) - NAMED} more"]
    text = f"{_listed(needed)} {'is' if is_one else 'are'} {'needed in full' if (before == after).all() else 'enough'}"
    return f"{text}; {_listed(idle)} {'does' if len(idle) == 1 else 'do'} not matter" if idle else text


def _say(theta: Theta, before: float, after: float, is_whole: bool) -> str:
    was, now = (f"{before:.0f}", f"{after:.0f}") if is_whole else _said(before, after)
    if theta.name == "count" or theta.name.endswith("_count"):
        return f"{now} of {was} {theta.unit}"
    return f"{theta.name} {now}" if now == was else f"{theta.name} {now} instead of {was}"


def _said(*values: float) -> list[str]:
    """Numbers, with as many digits as tell them apart."""
    for digits in (3, 5, 9):
        words = [f"{value:.{digits}g}" for value in values]
        if len(set(words)) == len(set(values)):
            break
    return words


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
