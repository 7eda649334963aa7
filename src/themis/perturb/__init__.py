"""Perturbations `E(theta)`, by name."""

from __future__ import annotations

from themis.perturb.attack import ATTACKS
from themis.perturb.context import Context
from themis.perturb.noise import NOISE
from themis.perturb.perturbation import Perturbation, Theta, columns, perturb
from themis.perturb.spec import read_perturbation

FAMILIES: tuple[tuple[Perturbation, ...], ...] = (NOISE, ATTACKS)

PERTURBATIONS: dict[str, Perturbation] = {each.name: each for family in FAMILIES for each in family}


def choose_perturbation(perturbation: str | Perturbation, magnitude: float | None = None) -> Perturbation:
    """A perturbation in words (`rain`, `rain(angle=-10:10) + fog`, `mine:STRIPES`) or as it is, its reach set."""
    if isinstance(perturbation, str):
        perturbation = read_perturbation(perturbation, PERTURBATIONS)
    return perturbation.at(magnitude)


__all__ = ["PERTURBATIONS", "Context", "Perturbation", "Theta", "choose_perturbation", "columns", "perturb"]
