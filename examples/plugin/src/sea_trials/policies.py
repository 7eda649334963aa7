"""A search policy: the strongest disturbance, for the seeds with the smallest margin first."""

import numpy as np

from themis.search import Policy


class Strongest(Policy):
    """Takes the seeds by their clean margin, in turn, and every theta at its upper bound."""

    def init(self, space):
        self.space, self.state = space, {"order": np.argsort(space.margin, kind="stable")}

    def propose(self, number):
        order = self.state["order"]
        theta = np.tile(self.space.high, (len(number), 1))
        return self.space.tests(number, order[number % len(order)], theta, "strongest")

    def observe(self, tests, results):
        """Nothing that is found changes the order."""
