"""Perturbations `E(theta)`: each is a named function with a table of its theta."""

from themis.perturb.context import Context
from themis.perturb.disturb import disturb
from themis.perturb.names import PERTURBATIONS, choose_perturbation
from themis.perturb.perturbation import Perturbation, Theta, columns, perturb

__all__ = ["PERTURBATIONS", "Context", "Perturbation", "Theta", "choose_perturbation", "columns", "disturb", "perturb"]
