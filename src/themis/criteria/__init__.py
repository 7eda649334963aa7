"""What a test criterion is: a measure of how much of a model a set of tests has covered.

The criteria of the literature are in `themis_lab.criteria`; packages add others as entry points.
"""

from themis.criteria.criterion import Batch, Criterion, Laws, Layout, Readings
from themis.criteria.names import CRITERIA, choose_criterion
from themis.criteria.view import activations, fit_to

__all__ = ["CRITERIA", "Batch", "Criterion", "Laws", "Layout", "Readings", "activations", "choose_criterion", "fit_to"]
