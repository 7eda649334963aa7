"""What a test criterion is: a measure of how much of a model a set of tests has covered.

The criteria of the literature are in `themis_lab.criteria`; packages add others as entry points.
"""

from themis.criteria.criterion import Criterion, Laws
from themis.criteria.fitting import activations, fit_to
from themis.criteria.names import CRITERIA, choose_criterion
from themis.criteria.readings import Batch, Layout, Readings

__all__ = ["CRITERIA", "Batch", "Criterion", "Laws", "Layout", "Readings", "activations", "choose_criterion", "fit_to"]
