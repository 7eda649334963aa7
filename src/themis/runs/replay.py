"""Running a fault again: in its campaign, or from a run folder in another process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.data.seeds import Seeds, read_seeds
from themis.runs.environment import describe_environment, describe_tested, list_changes, threads
from themis.errors import DataError, UsageError
from themis.runs.faults import Fault, Replay
from themis.measure.calculator import Calculator
from themis.measure.tests import Tests
from themis.oracle import Oracle, choose_oracle
from themis.runs.source import Origin
from themis.perturb import Perturbation, choose_perturbation
from themis.runs.parts import read_split
from themis.runs.store.reader import Reader
from themis.runs.store.tensors import Tensors
from themis.target.target import AnyTarget

CLOSE = 1e-5
"""How far outputs may be from the recorded ones on another device."""


def replay_fault(fault: Fault, *, calculator: Calculator, seeds: Seeds, kept: Tensors | None = None) -> Replay:
    """Run a fault again at its row of a chunk of the recorded shape: the same kernels, so the same bits.

    An attack depends on the model's gradient, which other machines round otherwise: its input is the kept one.
    """
    row = int((seeds.seed_id == fault.seed_id).nonzero()[0])
    theta = np.array([list(fault.theta.values())], dtype=np.float32)
    one = Tests(np.array([fault.id]), np.array([row]), theta, np.array([fault.noise_seed]), np.array([fault.kind]))
    with calculator.target.opened(), torch.no_grad():
        made, outputs = calculator.run_chunk(one[np.zeros(fault.chunk, dtype=np.int64)], fault.chunk)
        inputs = made[fault.position].cpu()
        input_gap = None if kept is None else _gap(inputs, kept.inputs[0])
        if kept is not None and input_gap and calculator.perturbation.passes:
            inputs = kept.inputs[0]
            repeated = inputs.to(calculator.device).expand(fault.chunk, *inputs.shape).contiguous()
            outputs = calculator.target.forward(repeated).float()
    at = slice(fault.position, fault.position + 1)
    labels = None if calculator.labels is None else calculator.labels[row : row + 1]
    verdict = calculator.oracle.compare(calculator.clean_outputs[row : row + 1], outputs[at], labels)
    answer, sure = int(verdict.outcome[0]), float(calculator.oracle.confidence(outputs[at])[0])
    value = None if verdict.value is None else float(verdict.value[0])
    output = outputs[fault.position].cpu()
    output_gap = None if kept is None else _gap(output, kept.outputs[0])
    if kept is not None:
        is_close = _is_close(output, kept.outputs[0])
    elif np.isnan(fault.confidence):
        is_close = _is_close(float(verdict.margin[0]), fault.margin)
    else:
        is_close = _is_close(sure, fault.confidence)
    return Replay(
        clean_inputs=seeds.inputs[row],
        inputs=inputs,
        outputs=output,
        answer=answer,
        value=None if value is None or np.isnan(value) else value,
        confidence=sure,
        is_fault=bool(verdict.is_fault[0]),
        is_same=answer == fault.answer and is_close,
        input_gap=input_gap,
        output_gap=output_gap,
        bounds=calculator.target.bounds,
    )


class Replayer:
    """Replays faults of a run folder. The target and the data are made again from what the run remembers.

    target, data, perturbation: to be given where the run does not know how, as one of a model that lives in memory.
    origin: another way to make target and data than the recorded one.
    """

    def __init__(
        self,
        run: Reader,
        target: AnyTarget | None = None,
        data: Any = None,
        perturbation: Perturbation | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.run, self._target, self._data, self._perturbation = run, target, data, perturbation
        self.origin = origin or recorded_origin(run)

    @cached_property
    def target(self) -> AnyTarget:
        return self._target or self._known_origin("target").target()

    @cached_property
    def seeds(self) -> Seeds:
        """The seeds that were tested: of a run that split them, the search part."""
        is_split = self.run.record["settings"].get("split") is not None
        return read_split(self.run).search(self.all_seeds) if is_split else self.all_seeds

    @cached_property
    def all_seeds(self) -> Seeds:
        """The seeds of all parts."""
        data = self._known_origin("data").read() if self._data is None else self._data
        return read_seeds(data, self.run.record["settings"]["max_seeds"])

    @cached_property
    def perturbation(self) -> Perturbation:
        with nullcontext() if self.origin is None else self.origin.at_home():
            return recorded_perturbation(self.run, self._perturbation)

    @cached_property
    def changes(self) -> list[str]:
        """What is no longer as it was when the run began."""
        then = self.run.record["environment"]
        with threads(then["threads"]):
            now = describe_environment(self.target.device) | describe_tested(self.target, self.seeds, self.origin)
        changes = list_changes(then, now)
        if self.perturbation.inputs == "table" and self.seeds.features.sha256 != self.run.record["features_sha256"]:
            changes.append("the table's features are others")
        return changes

    def __call__(self, fault: Fault) -> Replay:
        """Run a fault again."""
        row = (self.seeds.seed_id == fault.seed_id).nonzero()
        if not len(row):
            raise DataError(
                f"the data must hold the fault's seed {fault.seed_id}, it has {len(self.seeds)}: give the run's data"
            )
        seed = self.seeds[row[0]].held()
        kept = self.run.tensors([fault.id]).get(fault.id)
        oracle = recorded_oracle(self.run, self.target.oracle)
        with threads(self.run.record["environment"]["threads"]), self.target.opened(), torch.no_grad():
            calculator = Calculator(self.target, seed, self.perturbation, oracle, chunk=fault.chunk, clean_bytes=0)
            clean = self.target.forward(calculator.inputs[0].expand(fault.chunk, *seed.shape[1:]).contiguous())
            if oracle.spec() != self.run.record["start"]["oracle"]:  # another one than the run's
                calculator.oracle = oracle.settle(clean[:1].float(), calculator.labels)
            calculator.take_clean(clean[:1])
            replayed = replay_fault(fault, calculator=calculator, seeds=seed, kept=kept)
        return replace(replayed, changes=self.changes)

    def _known_origin(self, what: str) -> Origin:
        if self.origin is None:
            raise UsageError(
                f"the run in {self.run.path} does not know how to make its {what}, it was started from Python: pass "
                "target and data, or name them with --model and --data"
            )
        return self.origin


def recorded_origin(run: Reader) -> Origin | None:
    """How a run's target and data were made, if it knows."""
    origin = run.record["origin"]
    return None if origin is None else Origin.of({**origin, "bounds": tuple(origin["bounds"])})


def recorded_oracle(run: Reader, given: str | Oracle) -> Oracle:
    """The run's oracle as its clean outputs settled it; another one if it was named on purpose."""
    start, oracle = run.record["start"], choose_oracle(given)
    if oracle.spec() not in ("auto", start["oracle_asked"]):
        return oracle
    if oracle.spec() != start["oracle"]:
        oracle = _chosen(start["oracle"])
    is_probability = start["gives_probabilities"]
    return oracle if oracle.is_probability == is_probability else replace(oracle, is_probability=is_probability)


def _chosen(spec: str) -> Oracle:
    try:
        return choose_oracle(spec)
    except UsageError as error:
        raise UsageError(
            f"the run's oracle {spec!r} cannot be made again here: pass a target with it, or name it with --oracle "
            f"module:function ({error})"
        ) from error


def recorded_perturbation(run: Reader, given: str | Perturbation | None) -> Perturbation:
    """The run's perturbation by its name, or the one given if it is the same."""
    name, magnitude = run.record["perturbation"], run.record["settings"]["magnitude"]
    recorded = [(each["name"], each["low"], each["high"]) for each in run.record["theta"]]
    why = "another one has this name"
    try:
        chosen = choose_perturbation(given or name, magnitude)
        found = [(each.name, each.low, each.high) for each in chosen.theta]
        is_same = given is not None or chosen.code == run.record["perturbation_code"]
        if is_same and (chosen.name, found) == (name, recorded):
            return chosen
    except UsageError as error:
        why = str(error)
    if given is None:
        raise UsageError(
            f"the run's perturbation {name!r} has no name that is known here: pass perturbation=... ({why})"
        )
    raise UsageError(
        f"the perturbation must be the run's {name!r} with theta {recorded}, got {chosen.name!r} with {found}"
    )


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 where both are the same to the bit, not-finite values included."""
    if a.shape != b.shape:
        return float("inf")
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    return float((a - b).abs()[differs].nan_to_num(float("inf")).max()) if bool(differs.any()) else 0.0


def _is_close(a: Tensor | float, b: Tensor | float) -> bool:
    return bool(np.allclose(a, b, rtol=CLOSE, atol=CLOSE, equal_nan=True)) if np.shape(a) == np.shape(b) else False
