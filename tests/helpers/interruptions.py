"""Stopping a campaign, and comparing the end of a resumed campaign with that of an uninterrupted one."""

import numpy as np

from themis import Callback


class StopAt(Callback):
    """Ctrl-C after some rounds."""

    def __init__(self, number):
        self.number = number

    def on_round(self, round):
        if round.number == self.number:
            raise KeyboardInterrupt


def assert_same_end(whole, resumed):
    """Everything but the times is equal."""
    first, second = ({**run.summary(), "seconds": 0} for run in (whole, resumed))
    assert first == second
    assert [(r.number, r.tests, r.passes, r.coverage) for r in whole.rounds] == [
        (r.number, r.tests, r.passes, r.coverage) for r in resumed.rounds
    ]
    for name, column in whole.faults.columns.items():
        np.testing.assert_array_equal(column, resumed.faults.columns[name], err_msg=name)
