"""Techniques by name: search policies, the paper's preset, and coverage criteria that guide the mutation fuzzer."""

from __future__ import annotations

from dataclasses import dataclass

from themis.errors import UsageError, nearest

BASELINES = ("nc", "kmnc", "idc", "lsa")
"""The criteria that the paper compares itself with."""
GUIDED = "fuzz"
"""The policy that a criterion guides; it is not a technique without one."""
DIFFERENTIAL = "deepxplore"
"""The policy that compares the target with other models."""
PRESET = "paper-preset"
"""The paper's method with all its settings, of which the policy `paper` is only one."""


@dataclass(frozen=True)
class Technique:
    """A way to search: a policy, a preset, or the fuzzer guided by a criterion. Equal techniques have equal names."""

    name: str
    criterion: str | None = None
    preset: str | None = None

    @property
    def policy(self) -> str:
        """The name of its search policy."""
        return "paper" if self.preset is not None else GUIDED if self.criterion is not None else self.name


def choose_technique(name: str) -> Technique:
    """The technique with this name; the baselines have the paper's settings."""
    from themis.criteria import CRITERIA, choose_criterion
    from themis.search import POLICIES
    from themis_lab.criteria import PAPER

    policies = [policy for policy in POLICIES if policy not in (GUIDED, "boundary")]  # which needs a reference
    if name.lower() in policies:
        return Technique(name.lower())
    if name.lower() == PRESET:
        return Technique(PRESET, preset="paper")
    base = name.partition("(")[0].strip().lower()
    try:
        criterion = choose_criterion(name)
    except UsageError as error:
        if "(" in name or base in CRITERIA:
            raise UsageError(f"technique {name!r}: {error}") from error
        raise UsageError(
            f"techniques must be policies or criteria, got {name!r}: {nearest(name, [*policies, PRESET, *CRITERIA])}"
        ) from error
    if not criterion.can_guide:
        raise UsageError(
            f"techniques must be policies or criteria that can guide a campaign, got {name!r}: {criterion.name} needs "
            "more than a campaign provides, leave it out"
        )
    return Technique(str(criterion), PAPER.get(str(criterion), str(criterion)))
