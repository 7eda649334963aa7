"""Perturbations `E(theta)`, by name."""

from themis.errors import UsageError, nearest
from themis.perturb.attack import fgsm
from themis.perturb.noise import gaussian
from themis.perturb.perturbation import Context, Perturbation, Theta, perturb

_SHARE = "share of the input range"

PERTURBATIONS = {
    "gaussian": Perturbation("gaussian", (Theta("sigma", 0.0, 0.1, unit=_SHARE),), gaussian, theta_is_magnitude=True),
    "fgsm": Perturbation(
        "fgsm",
        (Theta("radius", 0.0, 8 / 255, unit=_SHARE),),
        fgsm,
        is_random=False,
        theta_is_magnitude=True,
        passes=3,
        needs_gradient=True,
    ),
}


def choose_perturbation(perturbation: str | Perturbation, magnitude: float | None = None) -> Perturbation:
    """A perturbation by name or as it is, with its reach set by `magnitude`."""
    if isinstance(perturbation, str):
        if perturbation not in PERTURBATIONS:
            raise UsageError(
                f"perturbation must be a known name, got {perturbation!r}: {nearest(perturbation, PERTURBATIONS)}"
            )
        perturbation = PERTURBATIONS[perturbation]
    return perturbation.at(magnitude)


__all__ = ["PERTURBATIONS", "Context", "Perturbation", "Theta", "choose_perturbation", "perturb"]
