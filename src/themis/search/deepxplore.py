"""DeepXplore's joint optimisation: theta that makes the target differ from other models and covers a new neuron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.measure.fold import Objective
from themis.oracle import are_probabilities
from themis.search.paper import Paper
from themis.search.policy import FOR_PICK, Space
from themis.target.target import AnyTarget

DIFFER, COVER = 1.0, 0.1
"""Weights of the target's own answer and of the neuron: those of DeepXplore's examples."""


class DeepXplore(Paper):
    """Ascent on theta of `sum_j F_j(x)[c] - F(x)[c] + 0.1 f_n(x)`; each seed climbs as under policy `paper`.

    F is the target's probability of its clean answer c, F_j that of each rival, f_n the activation of a neuron that no
    test has covered yet, a different one each time. The original's constraints on pictures (light, occlusion) are
    perturbations here, whose theta has the same gradient. The model that is to deviate is always the target.
    """

    is_guided = True

    def __init__(self, rivals: Sequence[AnyTarget] = (), differ: float = DIFFER, cover: float = COVER) -> None:
        self.rivals, self.differ, self.cover = tuple(rivals), differ, cover

    def init(self, space: Space) -> None:
        super().init(space)
        # Differences of the current chunk count when the next one begins, because a chunk may be tried again.
        self.state |= {name: np.zeros((), dtype=np.int64) for name in ("differences", "differing")}

    def objective(self, answers: Tensor, uncovered: Tensor, is_probability: bool, number: int) -> Objective:
        """The objective of the tests from `number` on; `answers` are the seeds' clean classes."""
        self._count()
        chosen = uncovered[:0]
        if len(uncovered):
            at = int(self.space.uniform(FOR_PICK, number) * len(uncovered))
            chosen = uncovered[at : at + 1]

        def difference(inputs: Tensor, outputs: Tensor, seed: Tensor) -> Tensor:
            own = outputs if is_probability else outputs.softmax(1)
            answer = answers[seed][:, None]
            total, is_other = -self.differ * own.gather(1, answer).sum(), torch.zeros_like(seed, dtype=torch.bool)
            for rival in self.rivals:
                scores = rival.forward(inputs)
                sure = scores.float() if are_probabilities(scores.detach()) else scores.float().softmax(1)
                total = total + sure.gather(1, answer).sum()
                is_other |= scores.argmax(1) != outputs.argmax(1)
            self.state["differing"] = np.array(int(is_other.sum()))
            return total

        return Objective(
            chosen, output_term=difference, n_models=len(self.rivals), is_activation=True, weight=self.cover
        )

    def _count(self) -> None:
        self.state["differences"] = self.state["differences"] + self.state["differing"]
        self.state["differing"] = np.zeros((), dtype=np.int64)

    def report(self) -> dict[str, Any]:
        """How many rivals it had, and on how many tests they answered differently from the target."""
        self._count()
        return {"rivals": len(self.rivals), "differences": int(self.state["differences"])}
