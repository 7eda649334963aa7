"""Phase 3, search: choose the next tests."""

from themis.errors import UsageError, nearest
from themis.plugins import Extensible
from themis.search.boundary import Boundary
from themis.search.policy import Corners, Policy, Random, Space
from themis.search.scheduled import Scheduled

POLICIES: Extensible[type[Policy]] = Extensible(
    "themis.policies", {"random": Random, "corners": Corners, "scheduled": Scheduled, "boundary": Boundary}
)


def choose_policy(policy: str | Policy) -> Policy:
    """A policy by name, or one of the user's own."""
    if not isinstance(policy, str):
        if not isinstance(policy, Policy):
            raise UsageError(
                f"policy must follow the protocol themis.search.Policy, got {type(policy).__name__}: subclass Policy, "
                "which has defaults"
            )
        return policy
    if policy not in POLICIES:
        raise UsageError(f"policy must be a known name, got {policy!r}: {nearest(policy, POLICIES)}")
    return POLICIES[policy]()


__all__ = ["POLICIES", "Policy", "Space", "choose_policy"]
