"""A campaign's whole state between two chunks, as arrays and plain data. Randomness needs none: it is by counter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from themis.errors import StoreError
from themis.measure.tests import Results, Tests
from themis.runs.store.writer import Checkpoint

if TYPE_CHECKING:
    from themis.campaign.loop import Campaign


@dataclass
class UnderWay:
    """The round being measured: what was proposed to each stream, and what came of it so far.

    left_to_propose: tests of the search that the policy has not been asked for yet; it is, a portion at a time.
    """

    tests: dict[str, Tests]
    left_to_propose: int = 0
    results: dict[str, list[Results]] = field(default_factory=dict)

    def propose(self, tests: Tests) -> None:
        """Give the search its next portion; the one before has been run."""
        self.tests["search"] = tests
        self.left_to_propose -= len(tests)
        self.results.pop("search", None)

    def stream(self) -> str | None:
        """The stream that is measured now; None when all are done."""
        return next((name for name, tests in self.tests.items() if self.n_done(name) < len(tests)), None)

    def n_done(self, stream: str) -> int:
        return sum(map(len, self.results.get(stream, ())))

    def left(self, stream: str) -> Tests:
        """The tests of a stream that have not run."""
        return self.tests[stream][self.n_done(stream) :]

    def keep(self, stream: str, n: int) -> None:
        """Of the tests of a stream that have not run, keep the first `n`."""
        self.tests[stream] = self.tests[stream][: self.n_done(stream) + n]

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"left_to_propose": self.left_to_propose}
        for name, tests in self.tests.items():
            done = self.results.get(name)
            results = {} if not done else {k: v for k, v in vars(Results.join(done)).items() if v is not None}
            kinds, kind = np.unique(tests.kind, return_inverse=True)
            state[name] = {"tests": {**vars(tests), "kind": kind}, "kinds": kinds.tolist(), "results": results}
        return state

    @staticmethod
    def of(state: dict[str, Any]) -> UnderWay:
        """From a state."""
        round = UnderWay({}, state.pop("left_to_propose"))
        for name, each in state.items():
            kinds, columns = np.array(each["kinds"], dtype=np.str_), each["tests"]
            round.tests[name] = Tests(**{**columns, "kind": kinds[columns["kind"]]})
            if each["results"]:
                round.results[name] = [Results(**{"gradient": None, **each["results"]})]
        return round


def save(campaign: Campaign) -> Checkpoint:
    """The state of a campaign that is not within a chunk."""
    tree = {
        "moments": {stream: each.state() for stream, each in campaign.moments.items()},
        "panel": campaign.panel.state(),
        "shape": campaign.shape.state(),
        "tally": campaign.tally.state(),
        "policy": campaign.policy.state,
        "criterion": None if campaign.guide is None else campaign.guide.criterion.state,
        "seen": np.fromiter(campaign.novelty.seen, dtype=np.int64),
        "open_neurons": campaign.open_neurons,
        "under_way": None if campaign.under_way is None else campaign.under_way.state(),
        "passes": campaign.calculator.passes,
        "chunk": campaign.calculator.chunk,
        "seconds": {**campaign.seconds, "total": campaign.elapsed()},
    }
    arrays: dict[str, Tensor] = {}
    values = _split(tree, "", arrays)
    return Checkpoint(campaign.tally.tests, len(campaign.rounds), arrays, values)


def load(campaign: Campaign, checkpoint: Checkpoint) -> None:
    """Put a campaign that has swept its seeds where the checkpoint was taken; rounds and faults are not its part."""
    tree = _join(checkpoint.values, "", checkpoint.arrays)
    device = campaign.calculator.device
    for stream, each in campaign.moments.items():
        each.restore(tree["moments"][stream])
    campaign.panel.restore(tree["panel"], device)
    campaign.shape.restore(tree["shape"], device)
    campaign.tally.restore(_arrays(tree["tally"]))
    state = _arrays(tree["policy"])
    if campaign.policy.state.keys() - state.keys():
        raise StoreError(
            "a run must be gone on with by the version of Themis that began it, this one searches otherwise"
        )
    campaign.policy.state = state
    if campaign.guide is not None:
        state = {name: each.to(device) for name, each in tree["criterion"].items()}
        view = campaign.calculator.view
        layout = None if view is None else view.layout
        campaign.guide.criterion.restore(state, campaign.tally.tests - campaign.tally.dropped, layout)
    campaign.novelty.seen = set(tree["seen"].tolist())
    campaign.open_neurons = tree["open_neurons"].to(device)
    campaign.under_way = None if tree["under_way"] is None else UnderWay.of(_arrays(tree["under_way"]))
    campaign.calculator.passes = tree["passes"]
    seconds = tree["seconds"]
    campaign.began -= seconds.pop("total")
    campaign.seconds = {phase: campaign.seconds[phase] + spent for phase, spent in seconds.items()}


_ARRAY = {"array": True}
"""Stands in the plain data where an array belongs."""


def _split(value: Any, name: str, arrays: dict[str, Tensor]) -> Any:
    """`value` with its arrays moved to `arrays`, by their path."""
    if isinstance(value, dict):
        return {key: _split(each, f"{name}/{key}", arrays) for key, each in value.items()}
    if isinstance(value, Tensor | np.ndarray | np.generic):
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
        arrays[name] = tensor.detach().cpu().clone()
        return _ARRAY
    return value


def _join(value: Any, name: str, arrays: dict[str, Tensor]) -> Any:
    if value == _ARRAY:
        return arrays[name].clone()
    if isinstance(value, dict):
        return {key: _join(each, f"{name}/{key}", arrays) for key, each in value.items()}
    return value


def _arrays(value: Any) -> Any:
    """Plain data with tensors turned into arrays."""
    if isinstance(value, dict):
        return {key: _arrays(each) for key, each in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value
