"""Criteria of neurons that leave bounds of their own."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from themis.criteria.covering import Covering
from themis.criteria.readings import Readings
from themis.criteria.sections import chunks


class Crossing(Covering):
    """Neurons that some test has driven above an upper bound, or below a lower one where there is one.

    Items are few, one or two a neuron, so that a boolean of each is kept.
    """

    def n_items(self) -> int:
        return 0 if self.layout is None else self.layout.n_neurons * self.n_sides()

    def n_sides(self) -> int:
        """1, or 2 where crossing the lower bound is one item and crossing the upper one another."""
        return 1

    @abstractmethod
    def bounds(self, values: Tensor) -> tuple[Tensor | None, Tensor]:
        """Those of `values [tests, neurons]`: lower ones, if there are any, and upper ones `[neurons]`."""

    def is_met(self) -> bool:
        """Whether a value on its bound has crossed it."""
        return False

    def hits(self, readings: Readings) -> Tensor:
        """Which items each test hits, bool `[tests, items]`."""
        return torch.cat(self._crossed(readings.values, *self.bounds(readings.values)), 1)

    def items(self, readings: Readings) -> Tensor:
        hits = self.hits(readings)
        return torch.where(hits, torch.arange(hits.shape[1], device=hits.device), -1)

    def n_covered(self) -> int:
        return int(self.state["covered"].sum()) if self.state else 0

    def _begin(self, readings: Readings) -> dict[str, Tensor]:
        return {"covered": torch.zeros(self.n_items(), dtype=torch.bool, device=readings.values.device)}

    def _merge(self, other: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"covered": self.state["covered"] | other["covered"]}

    def _crossed(self, values: Tensor, low: Tensor | None, high: Tensor) -> list[Tensor]:
        """Which values cross, bool `[tests, neurons]`: one of each side."""
        above = (values >= high if self.is_met() else values > high) & (values < torch.inf)
        if low is None:
            return [above]
        below = (values <= low if self.is_met() else values < low) & (values > -torch.inf)
        return [below | above] if self.n_sides() == 1 else [below, above]

    def _take(self, readings: Readings) -> Tensor:
        values = readings.values
        low, high = self.bounds(values)
        covered = self.state["covered"].view(self.n_sides(), -1)
        if values.device.type == "cuda" and values.dtype == high.dtype == torch.float32:
            from themis.criteria.crossing_cuda import cross_on

            if (cross := cross_on(values.device)) is not None:
                return cross(values.contiguous(), low, high, covered, self.is_met())
        raised = torch.zeros(len(values), dtype=torch.bool, device=values.device)
        for part in chunks(*values.shape):
            self._take_part(values[:, part], None if low is None else low[part], high[part], covered[:, part], raised)
        return raised

    def _take_part(self, values: Tensor, low: Tensor | None, high: Tensor, covered: Tensor, raised: Tensor) -> None:
        """Take in the values of some neurons: into `covered [sides, neurons]` and `raised [tests]`."""
        # Few neurons are ever in question: those whose extremes are beyond, or hidden by a NaN.
        most = values.amax(0)
        is_asked = ~((most < high if self.is_met() else most <= high) | covered[-1])
        if low is not None:
            least = values.amin(0)
            is_asked |= ~((least > low if self.is_met() else least >= low) | covered[0])
        asked = is_asked.nonzero()[:, 0]
        crossed = self._crossed(values[:, asked], None if low is None else low[asked], high[asked])
        countdown = torch.arange(len(values), 0, -1, dtype=torch.int32, device=values.device)[:, None]
        for mine, hits in zip(covered, crossed, strict=True):
            earliest = torch.where(hits, countdown, 0).amax(0)
            is_fresh = (earliest > 0) & ~mine[asked]
            mine[asked[is_fresh]] = True
            raised[len(values) - earliest[is_fresh]] = True
