"""The state of a campaign: everything that changes between two chunks, and how it is saved.

Randomness needs no state: every random number is a function of the random seed and a counter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.campaign.setup import Setup
from themis.criteria import Criterion
from themis.errors import StoreError, first_line
from themis.judge.calibration import N_BINS, N_BLOCKS, Numbers, sum_gaps
from themis.judge.coverage import sample_neurons
from themis.measure.moments import Accumulator, Moments, Panel, Shape
from themis.measure.runner import Measurement
from themis.measure.tests import Ints, Results, Tally, Tests
from themis.runs.estimates import SlicedSeeds, parse_progress
from themis.runs.run import Round
from themis.runs.store.writer import Checkpoint
from themis.search import Policy
from themis.search.policy import Novelty

STREAMS = ("uniform", "search")
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError, OverflowError)
"""What restoring a damaged state raises."""
OTHER_VERSION = (
    "cannot resume: this run was created by another version of Themis, which stores other data; start a new run"
)
PHASES = ("measure", "judge", "search")


class Clock:
    """Seconds per phase and in total, including those before a campaign was interrupted."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self.phases = dict.fromkeys(PHASES, 0.0)

    def elapsed(self) -> float:
        """Seconds since the campaign began."""
        return perf_counter() - self._began

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Count the time that the block takes as time of a phase."""
        began = perf_counter()
        try:
            yield
        finally:
            self.phases[phase] += perf_counter() - began

    def restore(self, state: dict[str, float]) -> None:
        """Add the time of an earlier process to that of this one."""
        self._began -= state["total"]
        self.phases = {phase: self.phases[phase] + state[phase] for phase in PHASES}


@dataclass
class Proposal:
    """Tests of one stream that were proposed, and the results of those that have been run.

    number: that of the first test that was proposed together with them. begins_round: whether that begins a round.
    round_end: the number of tests at the end of the round. open_neurons: those that ascents aim at.
    """

    number: int
    stream: str
    tests: Tests
    begins_round: bool
    round_end: int
    open_neurons: Tensor
    n_run: int = 0
    results: list[Results] = field(default_factory=list)

    @property
    def n_pending(self) -> int:
        """The number of tests that have not been run."""
        return len(self.tests) - self.n_run

    @property
    def pending(self) -> Tests:
        """The tests that have not been run."""
        return self.tests[self.n_run :]

    def state(self) -> dict[str, Any]:
        done = vars(Results.join(self.results)) if self.results else {}
        kinds, kind = np.unique(self.tests.kind, return_inverse=True)
        return {
            **vars(self),
            "tests": {**vars(self.tests), "kind": kind},
            "kinds": kinds.tolist(),
            "results": {name: column for name, column in done.items() if column is not None},
        }

    @staticmethod
    def of(saved: dict[str, Any], device: torch.device) -> Proposal:
        """From a state."""
        saved = {**_as_arrays(saved), "open_neurons": saved["open_neurons"].to(device)}
        kinds, columns, results = np.array(saved.pop("kinds"), dtype=np.str_), saved["tests"], saved["results"]
        saved["tests"] = Tests(**{**columns, "kind": kinds[columns["kind"]]})
        return Proposal(**{**saved, "results": [Results(**{"gradient": None, **results})] if results else []})


@dataclass
class State:
    """All that a campaign has learned. `checkpoint` and `restore` save it; rounds and faults are rows of the store."""

    moments: dict[str, Accumulator]
    """Of the sensitivities, by stream."""
    panel: Panel
    shape: Shape
    tally: Tally
    policy: Policy
    criterion: Criterion | None
    novelty: Novelty
    open_neurons: Tensor
    """Sampled neurons that have not converged: gradient ascent aims at them."""
    passes: int
    chunk: int
    clock: Clock
    sliced: SlicedSeeds
    """It never changes, but is saved for those who read a checkpoint without the data."""
    label: Ints
    """The class of each seed."""
    gaps: Numbers | None
    """Sums for the calibration of the uniform stream; None in tasks without classes or without labels."""
    wide_chunk: int | None = None
    """See `Graphs`."""
    proposals: list[Proposal] = field(default_factory=list)
    """Those that the policy has not learned from, in the order in which they are run."""
    rounds: list[Round] = field(default_factory=list)

    @staticmethod
    def initial(setup: Setup, policy: Policy, clock: Clock) -> State:
        """The state before the first test."""
        calculator = setup.calculator
        policy.init(setup.space)
        n_neurons = calculator.n_neurons
        unmeasured = torch.zeros(n_neurons, dtype=torch.float64, device=calculator.device)
        return State(
            moments={stream: calculator.accumulator() for stream in STREAMS},
            panel=Panel.empty(setup.panel_neurons),
            shape=Shape.empty(len(setup.panel_neurons)),
            tally=Tally(len(setup.calculator.seeds)),
            policy=policy,
            criterion=None if setup.criterion is None else setup.criterion.criterion,
            novelty=Novelty(setup.space),
            open_neurons=sample_neurons(unmeasured, setup.settings.sample).sort().values,
            passes=calculator.passes,
            chunk=calculator.chunk,
            clock=clock,
            sliced=setup.sliced,
            label=setup.facts.label,
            gaps=np.zeros((N_BLOCKS, N_BINS)) if setup.has_calibration else None,
        )

    def add(self, tests: Tests, measurement: Measurement, stream: str, *, is_shape_sample: bool) -> None:
        """Count the tests of one chunk. `is_shape_sample`: whether they show how differences are distributed."""
        self.passes += measurement.passes
        self.chunk, self.wide_chunk = measurement.chunk, measurement.wide_chunk
        results = measurement.results
        self.tally.add(tests, results, stream == "uniform")
        if stream == "uniform" and self.gaps is not None and results.confidence is not None:
            run, label = results.was_run, self.label[tests.seed]
            self.gaps += sum_gaps(tests.seed[run], results.confidence[run], (results.outcome == label)[run])
        if measurement.panel is not None:
            differences, seed = measurement.panel
            self.panel.add(differences, seed)
            if is_shape_sample:
                self.shape.add(differences)

    @property
    def pending(self) -> list[Proposal]:
        """The proposals with tests that have not been run."""
        return [proposal for proposal in self.proposals if proposal.n_pending]

    @property
    def n_pending(self) -> int:
        """The number of tests that were proposed and have not been run."""
        return sum(proposal.n_pending for proposal in self.proposals)

    @property
    def is_round_open(self) -> bool:
        """Whether tests of a round have been run that was not judged."""
        return self.tally.tests > (self.rounds[-1].tests if self.rounds else 0)

    @property
    def round_end(self) -> int:
        """The number of tests at the end of the last round of which tests were proposed."""
        return self.proposals[-1].round_end if self.proposals else self.tally.tests

    @property
    def is_round_complete(self) -> bool:
        """Whether all tests of the open round have been run."""
        if pending := self.pending:
            return self.is_round_open and pending[0].begins_round and pending[0].number == self.tally.tests
        return self.is_round_open and self.round_end <= self.tally.tests

    def limit(self, n: int) -> None:
        """Keep only the first `n` of the tests that have not been run, proposed or not."""
        end = self.tally.tests + n
        for proposal in self.proposals:
            kept, proposal.round_end = min(n, proposal.n_pending), min(proposal.round_end, end)
            proposal.tests, n = proposal.tests[: proposal.n_run + kept], n - kept

    def total_moments(self) -> Moments:
        """The moments of both streams together."""
        return self.moments["uniform"].moments().merge(self.moments["search"].moments())

    def checkpoint(self) -> Checkpoint:
        """The whole state as arrays and plain data; must not be called within a chunk."""
        tree = {
            "moments": {stream: accumulator.state() for stream, accumulator in self.moments.items()},
            "panel": self.panel.state(),
            "shape": self.shape.state(),
            "tally": self.tally.state(),
            "seeds": vars(self.sliced),
            "policy": self.policy.state,
            "criterion": None if self.criterion is None else self.criterion.state,
            "seen": self.novelty.state,
            "open_neurons": self.open_neurons,
            "gaps": self.gaps,
            "proposals": {str(k): proposal.state() for k, proposal in enumerate(self.proposals)},
            "passes": self.passes,
            "chunk": self.chunk,
            "wide_chunk": self.wide_chunk,
            "seconds": {**self.clock.phases, "total": self.clock.elapsed()},
        }
        arrays: dict[str, Tensor] = {}
        values = _split(tree, "", arrays)
        if (device := self.open_neurons.device).type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the copies are complete
        return Checkpoint(self.tally.tests, len(self.rounds), arrays, values)

    def restore(self, checkpoint: Checkpoint, rounds: list[Round], setup: Setup) -> None:
        """Continue from a checkpoint and the rounds up to it."""
        parse_progress(checkpoint)  # raises an error if it is damaged
        try:
            _check_arrays(self.checkpoint().arrays, checkpoint.arrays)
            self._restore(checkpoint, setup)
        except StoreError:
            raise
        except DAMAGE as error:
            raise StoreError(
                f"cannot resume: the checkpoint of this run is damaged ({type(error).__name__}: {first_line(error)}); "
                "restore the run folder from a copy"
            ) from error
        self.rounds = rounds

    def _restore(self, checkpoint: Checkpoint, setup: Setup) -> None:
        tree = _join(checkpoint.values, "", checkpoint.arrays)
        device = setup.calculator.device
        for stream, accumulator in self.moments.items():
            accumulator.restore(tree["moments"][stream])
        self.panel.restore(tree["panel"], device)
        self.shape.restore(tree["shape"], device)
        self.tally.restore(_as_arrays(tree["tally"]))
        if "proposals" not in tree:
            raise StoreError(OTHER_VERSION)
        self.policy.state = _as_arrays(tree["policy"])
        if self.criterion is not None:
            criterion_state = {name: tensor.to(device) for name, tensor in tree["criterion"].items()}
            layout = None if setup.sweep.view is None else setup.sweep.view.layout
            self.criterion.restore(criterion_state, self.tally.tests - self.tally.dropped, layout)
        self.novelty.state = tree["seen"].numpy()
        self.open_neurons = tree["open_neurons"].to(device)
        self.proposals = [Proposal.of(saved, device) for saved in tree["proposals"].values()]
        self.gaps = None if self.gaps is None else tree["gaps"].numpy()
        self.passes = tree["passes"]
        self.wide_chunk = tree["wide_chunk"]
        self.clock.restore(tree["seconds"])


def _check_arrays(initial: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Raise if saved arrays cannot have grown from those of the initial state: only their length grows."""
    for name, before in initial.items():
        after = saved.get(name)
        if after is None:
            raise StoreError(OTHER_VERSION)
        can_shrink = name == "/open_neurons"
        is_grown = after.shape[1:] == before.shape[1:] and (can_shrink or after.shape[:1] >= before.shape[:1])
        if after.dtype != before.dtype or after.ndim != before.ndim or not is_grown:
            raise ValueError(f"its array {name} has the wrong type or shape, {after.dtype} {list(after.shape)}")


_ARRAY = {"array": True}
"""Marks the place of an array in the plain data."""


def _split(value: Any, name: str, arrays: dict[str, Tensor]) -> Any:
    """`value` with its arrays moved to `arrays`, by their path."""
    if isinstance(value, dict):
        return {key: _split(item, f"{name}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, Tensor):
        try:  # a copy on the same device, if there is room; the thread that writes the checkpoint moves it to the host
            arrays[name] = value.detach().clone()
        except torch.OutOfMemoryError:
            arrays[name] = value.detach().cpu()
        return _ARRAY
    if isinstance(value, np.ndarray | np.generic):
        arrays[name] = torch.from_numpy(np.array(value))
        return _ARRAY
    return value


def _join(value: Any, name: str, arrays: dict[str, Tensor]) -> Any:
    if value == _ARRAY:
        return arrays[name].clone()
    if isinstance(value, dict):
        return {key: _join(item, f"{name}/{key}", arrays) for key, item in value.items()}
    return value


def _as_arrays(value: Any) -> Any:
    """Plain data with tensors turned into NumPy arrays."""
    if isinstance(value, dict):
        return {key: _as_arrays(item) for key, item in value.items()}
    return value.numpy() if isinstance(value, Tensor) else value
