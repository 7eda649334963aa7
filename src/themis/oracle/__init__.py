"""Oracles decide what a fault is: they compare a test's output with that of its seed, or with the label."""

from themis.oracle.choose import ORACLES, choose_oracle, is_own_oracle
from themis.oracle.classes import Changed, Disagreement, Top, Wrong, are_probabilities, confidence
from themis.oracle.compare import Compare
from themis.oracle.detection import Detection
from themis.oracle.keypoints import KeyPoints
from themis.oracle.motion import Motion
from themis.oracle.oracle import KEPT_ANSWER, NOT_FINITE, Oracle, Verdict
from themis.oracle.regression import Regression
from themis.oracle.segmentation import Segmentation
from themis.oracle.thresholds import Multilabel, Threshold

__all__ = [
    "KEPT_ANSWER",
    "NOT_FINITE",
    "ORACLES",
    "Changed",
    "Compare",
    "Detection",
    "Disagreement",
    "KeyPoints",
    "Motion",
    "Multilabel",
    "Oracle",
    "Regression",
    "Segmentation",
    "Threshold",
    "Top",
    "Verdict",
    "Wrong",
    "are_probabilities",
    "choose_oracle",
    "confidence",
    "is_own_oracle",
]
