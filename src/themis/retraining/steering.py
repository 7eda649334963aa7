"""Steering: fresh inputs are drawn more often where the model, as it is now, answers incorrectly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.measure.tests import Floats, Ints
from themis.perturb import Perturbation

N_BINS = 5
"""Equal parts of the range of each theta."""
KEPT_WEIGHT = 0.8
"""The weight of what was measured before, each time that fresh inputs are created."""


class Steering:
    """The error of the model by perturbation, part of the range of each theta, and class, over recent fresh inputs."""

    def __init__(self, perturbations: Sequence[Perturbation], labels: Tensor, steer: float) -> None:
        """labels: those of the seeds that are trained on. steer: the share of the draws that follows the errors."""
        self.weight = np.ones(len(labels))
        self.steer, self.n_dimensions = steer, max(len(perturbation.theta) for perturbation in perturbations)
        is_class = labels.ndim == 1 and not labels.is_floating_point()
        self.label = np.unique(labels.numpy(), return_inverse=True)[1] if is_class else np.zeros(len(labels), np.int64)
        n_cases, n_classes = len(perturbations), int(self.label.max()) + 1
        shapes = {"case": (n_cases,), "theta": (n_cases, self.n_dimensions, N_BINS), "label": (n_classes,)}
        self.wrong = {name: np.ones(shape) for name, shape in shapes.items()}
        self.total = {name: np.ones(shape) for name, shape in shapes.items()}
        self._expected: tuple[Ints, Ints, Ints] | None = None
        self._errors: list[Tensor] = []

    def favour(self, error: Floats, share: float) -> None:
        """Let a share of the draws follow the clean error of the original model, given for each seed."""
        if error.sum() > 0:
            self.weight = (1 - share) / len(error) + share * error / error.sum()

    def choose_rows(self, draws: Any) -> Ints:
        """Rows of the seeds that are trained on, for uniform draws in 0..1."""
        return _choose(self.weight * self._weights("label")[self.label], draws)

    def choose_cases(self, draws: Any) -> Ints:
        """Perturbations, for uniform draws in 0..1."""
        return _choose(self._weights("case"), draws)

    def warp(self, case: int, shares: Floats) -> tuple[Floats, Ints]:
        """Uniform places in the box of theta, moved to where errors are; and the bins that they are in."""
        weights = self._weights("theta")[case]
        warped = np.empty_like(shares)
        for k in range(shares.shape[1]):
            ends = np.concatenate([[0.0], np.cumsum(weights[k])])
            warped[:, k] = np.interp(shares[:, k] * ends[-1], ends, np.linspace(0, 1, N_BINS + 1))
        bins: Ints = (warped * N_BINS).astype(np.int64).clip(0, N_BINS - 1)
        return warped, bins

    def expect(self, row: Ints, case: Ints, bins: Ints) -> None:
        """Announce the next fresh inputs, in the order in which they are observed."""
        self._expected = (row, case, bins)

    def observe(self, errors: Tensor) -> None:
        """The error of each fresh input of a batch, 0..1."""
        self._errors.append(errors.detach())

    def fold(self) -> None:
        """Fold what was observed into the errors."""
        if self._expected is None or not self._errors:
            return
        errors = np.concatenate([batch.double().cpu().numpy() for batch in self._errors])
        row, case, bins = (values[: len(errors)] for values in self._expected)
        dimension = np.arange(self.n_dimensions)
        places = {
            "case": (case,),
            "theta": (case[:, None], dimension[None], bins),
            "label": (self.label[row],),
        }
        for name, place in places.items():
            value = errors[:, None] if name == "theta" else errors
            self.wrong[name] *= KEPT_WEIGHT
            self.total[name] *= KEPT_WEIGHT
            np.add.at(self.wrong[name], place, value)
            np.add.at(self.total[name], place, 1.0)
        self._errors = []

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The errors, from which a training resumes."""
        self.fold()
        groups = {"wrong": self.wrong, "total": self.total}
        return {key: {name: torch.from_numpy(a.copy()) for name, a in group.items()} for key, group in groups.items()}

    def restore(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Continue with stored errors."""
        for name in self.wrong:
            self.wrong[name], self.total[name] = (state[key][name].numpy().copy() for key in ("wrong", "total"))

    def _weights(self, name: str) -> Any:
        """Shares of the draws, along the last axis."""
        error = self.wrong[name] / self.total[name]
        n = error.shape[-1]
        share = error / np.maximum(error.sum(-1, keepdims=True), 1e-12)
        return (1 - self.steer) / n + self.steer * share


def _choose(weights: Any, draws: Any) -> Ints:
    """Indices with probabilities in proportion to weights, for uniform draws in 0..1."""
    cumulative = np.cumsum(weights)
    indices: Ints = np.searchsorted(cumulative, draws * cumulative[-1], side="right").clip(max=len(cumulative) - 1)
    return indices
