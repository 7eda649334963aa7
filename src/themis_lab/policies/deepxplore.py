"""DeepXplore's joint optimisation: theta that makes the target differ from other models and covers a new neuron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.criteria import Criterion
from themis.data.seeds import Seeds
from themis.errors import ModelError, ThemisError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.fold import Objective
from themis.oracle import are_probabilities
from themis.search.policy import FOR_PICK, Space
from themis.target.target import AnyTarget, Target
from themis_lab.criteria.nc import NC
from themis_lab.policies.paper import Paper

ANSWER_WEIGHT, NEURON_WEIGHT = 1.0, 0.1
"""Weights of the target's own answer and of the neuron: those of DeepXplore's examples."""


class DeepXplore(Paper):
    """Ascent on theta of `sum_j F_j(x)[c] - F(x)[c] + 0.1 f_n(x)`; each seed climbs as under policy `paper`.

    F is the target's probability of its clean answer c, F_j that of each rival, f_n the activation of a neuron that no
    test has covered yet, a different one each time. The original's constraints on pictures (light, occlusion) are
    perturbations here, whose theta has the same gradient. The model that is to deviate is always the target.
    """

    is_guided = takes_rivals = True

    def __init__(
        self, rivals: Sequence[AnyTarget] = (), differ: float = ANSWER_WEIGHT, cover: float = NEURON_WEIGHT
    ) -> None:
        self.rivals, self.differ, self.cover = tuple(rivals), differ, cover

    def init(self, space: Space) -> None:
        super().init(space)
        # Differences of the current chunk count when the next one begins, because a chunk may be tried again.
        self.state |= {name: np.zeros((), dtype=np.int64) for name in ("differences", "differing")}

    def own_criterion(self, target: AnyTarget, seeds: Seeds, chosen: Criterion | None) -> Criterion:
        """The neuron coverage to raise, that of the tested neurons."""
        if not self.rivals:
            raise UsageError("policy 'deepxplore' compares the target with other models, got none: pass rivals=[...]")
        if not isinstance(target, Target):
            raise UsageError("policy 'deepxplore' needs gradients, but this target has none: use policy 'fuzz'")
        self._check_rivals(target, seeds)
        if chosen is None:
            return NC(neurons=target.neurons)
        if not isinstance(chosen, NC) or chosen.neurons != target.neurons or chosen.requested_layers is not None:
            raise UsageError(
                f"policy 'deepxplore' requires nc over all layers and the target's neurons, got {chosen!r}: write "
                f"nc(threshold=0.5, neurons={target.neurons})"
            )
        return chosen.fresh()

    def _check_rivals(self, target: AnyTarget, seeds: Seeds) -> None:
        inputs = seeds.take(torch.arange(min(2, len(seeds)))).to(target.device)
        with torch.no_grad():
            expected = list(target.forward(inputs).shape[1:])
            for k, rival in enumerate(self.rivals):
                try:
                    shape = list(rival.forward(inputs).shape[1:])
                except ThemisError as error:
                    raise ModelError(f"rival {k + 1} must accept the target's inputs: {error}") from error
                if shape != expected:
                    raise UsageError(
                        f"rival {k + 1} must give scores of the target's shape {expected}, got {shape}: pass models of "
                        "the same task"
                    )

    def objective(self, criterion: Criterion, calculator: Calculator, number: int) -> Objective:
        """The joint objective of the tests from `number` on, with a neuron that is not covered yet."""
        outputs = calculator.clean.outputs
        if outputs.ndim != 2 or outputs.shape[1] < 2:
            raise UsageError(
                f"policy 'deepxplore' needs class scores, but this model's output has shape {list(outputs.shape[1:])}: "
                "use policy 'fuzz' with a criterion"
            )
        covered = criterion.state.get("covered")
        if covered is None:
            uncovered = torch.arange(calculator.n_neurons, device=calculator.device)
        else:
            uncovered = (~covered).nonzero().squeeze(1)
        return self.joint_objective(outputs.argmax(1), uncovered, calculator.clean.oracle.is_probability, number)

    def joint_objective(self, answers: Tensor, uncovered: Tensor, is_probability: bool, number: int) -> Objective:
        """The same, given the clean classes of the seeds and the neurons to choose from."""
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
        """The number of rivals, and of tests on which they answered differently from the target."""
        self._count()
        return {"rivals": len(self.rivals), "differences": int(self.state["differences"])}
