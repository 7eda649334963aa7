"""A criterion: the share of neurons that some test has moved above their highest value on training inputs."""

import torch

from themis_lab.criteria import Criterion, Laws


class Peaks(Criterion):
    name = "peaks"
    laws = Laws(bounded=True, monotone=True, order_free=True, mergeable=True)

    def _learn(self, readings):
        highest = readings.values.amax(0)
        self.learnt["highest"] = torch.maximum(self.learnt.get("highest", highest), highest)

    def _initial_state(self, readings):
        return {"covered": torch.zeros_like(self.learnt["highest"], dtype=torch.bool)}

    def _update(self, readings):
        covered, raised = self.state["covered"], []
        for is_above in readings.values > self.learnt["highest"]:
            raised.append((is_above & ~covered).any())
            covered |= is_above
        return torch.stack(raised)

    def _merge_state(self, other):
        return {"covered": self.state["covered"] | other["covered"]}

    def score(self):
        return float(self.state["covered"].float().mean()) if self.state else 0.0
