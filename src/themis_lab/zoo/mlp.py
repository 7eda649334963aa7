"""The fully connected nets that DeepXplore tests on malware data: <200,200> and <200,10>."""

from __future__ import annotations

from torch import nn


def mlp(n_features: int, hidden: tuple[int, int], n_classes: int = 2) -> nn.Sequential:
    """Two hidden layers with ReLU."""
    first, second = hidden
    body = [nn.Linear(n_features, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(second, n_classes))


def mlp_pdf() -> nn.Sequential:
    """<200,200> on the 135 features of a PDF file."""
    return mlp(135, (200, 200))


def mlp_drebin() -> nn.Sequential:
    """<200,10> on the 215 features of an Android app."""
    return mlp(215, (200, 10))
