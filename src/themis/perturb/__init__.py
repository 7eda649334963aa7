"""Perturbations `E(theta)`: named functions with named, bounded parameters theta."""

from themis.perturb.context import Context
from themis.perturb.names import PERTURBATIONS, choose_perturbation, disturb, own_perturbations
from themis.perturb.perturbation import Perturbation, Theta, columns, over_time, perturb

__all__ = [
    "PERTURBATIONS",
    "Context",
    "Perturbation",
    "Theta",
    "choose_perturbation",
    "columns",
    "disturb",
    "over_time",
    "own_perturbations",
    "perturb",
]
