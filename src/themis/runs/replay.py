"""Replaying the tests of a run, in the process of its campaign or from its folder; opening run folders."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.data.features import Coding
from themis.data.files import check_memory
from themis.data.seeds import Seeds, read_seeds
from themis.errors import DataError, StoreError, UsageError
from themis.measure.calculator import Calculator, Limits
from themis.measure.sweep import clean_outputs
from themis.measure.tests import Ints, Tests
from themis.oracle import Oracle, choose_oracle
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import Theta, is_same_code
from themis.runs.analysis.review import read_review
from themis.runs.display.fault import answered_boxes, stored_boxes
from themis.runs.environment import check_same_tests, describe_environment, describe_tested, list_changes, threads
from themis.runs.estimates import known_figures, read_progress
from themis.runs.fault import Fault, FaultInputs, Replay, Tested
from themis.runs.parts import read_split
from themis.runs.run import Run, Seconds, Start
from themis.runs.source import Origin, recorded_origin
from themis.runs.store.reader import Reader
from themis.runs.store.tensors import Tensors
from themis.runs.trust import Permission, Trusted, names_code, permit, perturbation_code
from themis.settings import Settings, least_similarity
from themis.target.activations import Layer
from themis.target.alignment import align_seeds, align_target, bound, coded, with_datums
from themis.target.blackbox import as_target
from themis.target.fingerprint import hash_seeds
from themis.target.target import AnyTarget

OUTPUT_TOLERANCE = 1e-5
"""Absolute and relative tolerance between replayed outputs and recorded ones."""


def replay_fault(fault: Fault, calculator: Calculator, stored: Tensors | None = None) -> Replay:
    """Run a fault again at its row of a chunk of the recorded shape, so that the same kernels give the same bits.

    Attacks use the model's gradient, which other machines round differently; if an attack gives another input than
    the stored one, the model is given the stored one.
    """
    row = int((calculator.seeds.seed_id == fault.seed_id).nonzero()[0])
    theta = np.array([list(fault.theta.values())], dtype=np.float32)
    test = Tests(np.array([fault.id]), np.array([row]), theta, np.array([fault.noise_seed]), np.array([fault.kind]))
    with calculator.target.opened(), torch.no_grad():
        disturbed, outputs, motion = calculator.run_chunk(test[np.zeros(fault.chunk, dtype=np.int64)], fault.chunk)
        inputs = disturbed[fault.position].cpu()
        input_gap = None if stored is None else _gap(inputs, stored.inputs[0])
        if stored is not None and input_gap and calculator.perturbation.passes:
            inputs = stored.inputs[0]
            repeated = inputs.to(calculator.device).expand(fault.chunk, *inputs.shape).contiguous()
            outputs = calculator.target.forward(repeated).float()
    at = slice(fault.position, fault.position + 1)
    rows = torch.tensor([row], device=calculator.device)
    verdict = calculator.clean.compare(rows, outputs[at], motion and motion[at])
    answer, confidence = int(verdict.outcome[0]), float(calculator.clean.oracle.confidence(outputs[at])[0])
    value = None if verdict.value is None else float(verdict.value[0])
    output = outputs[fault.position].cpu()
    output_gap = None if stored is None else _gap(output, stored.outputs[0])
    if stored is not None:
        is_close = _is_close(output, stored.outputs[0])
    elif np.isnan(fault.confidence):
        is_close = _is_close(float(verdict.margin[0]), fault.margin)
    else:
        is_close = _is_close(confidence, fault.confidence)
    return Replay(
        clean_inputs=calculator.seeds.inputs[row],
        inputs=inputs,
        outputs=output,
        answer=answer,
        value=None if value is None or np.isnan(value) else value,
        confidence=confidence,
        is_fault=bool(verdict.is_fault[0]),
        is_same=answer == fault.answer and is_close,
        input_gap=input_gap,
        output_gap=output_gap,
        bounds=calculator.target.bounds,
        boxes=answered_boxes(calculator.clean.outputs[row].cpu(), output, calculator.clean.oracle.spec()),
    )


@dataclass(frozen=True)
class LiveRun:
    """The handle of a run made by this process; it replays faults on the campaign's own calculator."""

    calculator: Calculator
    random_seed: int
    origin: Origin | None = None

    @property
    def seeds(self) -> Seeds:
        return self.calculator.seeds

    @property
    def target(self) -> AnyTarget:
        return self.calculator.target

    @property
    def perturbation(self) -> Perturbation:
        return self.calculator.perturbation

    @property
    def tested(self) -> Tested:
        return Tested(self.target.fingerprint(), hash_seeds(self.seeds), self.perturbation.code)

    @contextmanager
    def opened(self, seed_id: Ints | None = None, chunk: int | None = None) -> Iterator[Calculator]:
        """The campaign's own calculator, with all seeds and its own number of tests per forward pass."""
        with self.calculator.target.opened(), torch.no_grad():
            yield self.calculator

    def replay(self, fault: Fault, /) -> Replay:
        return replay_fault(fault, self.calculator)

    def show(self, fault: Fault, /) -> FaultInputs | None:
        """The inputs of a fault, recomputed with the model in memory."""
        return self.replay(fault)


def stored_inputs(tensors: Tensors, start: dict[str, Any]) -> FaultInputs:
    """The stored inputs of one fault; `start` is the recorded start of its run."""
    clean_inputs, inputs, (low, high) = tensors.clean_inputs[0], tensors.inputs[0], start["bounds"]
    boxes = stored_boxes(tensors, start["oracle"])
    return FaultInputs(clean_inputs=clean_inputs, inputs=inputs, bounds=(low, high), boxes=boxes)


class Replayer:
    """The handle of a run folder. Target and data are created from the run's record; a closed reader is reopened.

    target, data, perturbation: required if the run does not record how to create them, such as a model in memory.
    origin: where target and data come from, instead of the recorded origin. trust: whether code that the run folder
    names may run although the folder was not made here by this user; see `themis.runs.trust`.
    """

    def __init__(
        self,
        run: Reader,
        target: AnyTarget | None = None,
        data: Any = None,
        perturbation: Perturbation | None = None,
        origin: Origin | None = None,
        *,
        trust: Trusted = False,
    ) -> None:
        self.run, self._target, self._data, self._perturbation = run, target, data, perturbation
        self._origin, self._trust = origin, trust
        self._is_checked = False

    @cached_property
    def permission(self) -> Permission:
        """Whether the code that the run folder names may run."""
        own = None if self._origin is None else self._origin.permission
        if own is not None and os.path.realpath(own.folder) == os.path.realpath(self.run.path):
            return own
        return permit(self.run.path, self.run.record, self._trust)

    @cached_property
    def origin(self) -> Origin | None:
        """How the target and the data are created; None if that is not recorded."""
        return self._origin or recorded_origin(self.run.record, self.permission)

    @cached_property
    def target(self) -> AnyTarget:
        if "start" not in self.run.record:
            return align_target(self._own_target, self.all_seeds)
        low, high = self.run.record["start"]["bounds"]
        coding = self.run.record.get("coding")
        target = coded(bound(self._own_target, (low, high)), None if coding is None else Coding.recorded(coding))
        return with_datums(target, lambda: self.all_seeds)

    @cached_property
    def _own_target(self) -> AnyTarget:
        """The target before the bounds of the data are applied."""
        return self._target or self._known_origin("target").target()

    @cached_property
    def seeds(self) -> Seeds:
        """The seeds that were tested: all, or the search part if the run split its data."""
        is_split = self.run.record["settings"].get("split") is not None
        return read_split(self.run).search(self.all_seeds) if is_split else self.all_seeds

    @cached_property
    def all_seeds(self) -> Seeds:
        """The seeds of all parts."""
        data = self._known_origin("data").read() if self._data is None else self._data
        return align_seeds(self._own_target, read_seeds(data, self.run.record["settings"]["max_seeds"]))

    @cached_property
    def perturbation(self) -> Perturbation:
        with nullcontext() if self.origin is None else self.origin.in_folder():
            return recorded_perturbation(self.run, self._perturbation, self.permission)

    @property
    def tested(self) -> Tested:
        environment = self.run.record["environment"]
        code: str = self.run.record["perturbation_code"]
        return Tested(environment["model_sha256"], environment["data_sha256"], code)

    @property
    def oracle(self) -> Oracle:
        """The oracle of the target if it names one, otherwise that of the run."""
        with nullcontext() if self.origin is None else self.origin.in_folder():
            return recorded_oracle(self.run, self.target.oracle, self.permission)

    @property
    def _settles(self) -> bool:
        """Whether clean outputs must settle the oracle; those of the campaign have settled the run's own."""
        return bool(self.oracle.spec() != self.run.record["start"]["oracle"])

    @property
    def random_seed(self) -> int:
        return int(self.run.record["settings"]["random_seed"])

    @cached_property
    def changes(self) -> list[str]:
        """What has changed since the run began."""
        then = self.run.record["environment"]
        with threads(then["threads"]):
            now = describe_environment(self.target.device) | describe_tested(self.target, self.seeds, self.origin)
        changes = list_changes(then, now)
        if self.perturbation.inputs == "table" and self.seeds.features.sha256 != self.run.record["features_sha256"]:
            changes.append("the table's features have changed")
        return changes

    def check_same_tests(self) -> None:
        """Refuse code of the model or the perturbation that has changed since the run; see `runs/environment.py`."""
        environment = self.run.record["environment"]
        if "start" not in self.run.record or self.target.fingerprint() != environment["model_sha256"]:
            return
        with threads(environment["threads"]), self.run.reopened() as run:
            check_same_tests(run, self.target, self.seeds, self.perturbation, self.oracle)

    @contextmanager
    def opened(self, seed_id: Ints | None = None, chunk: int | None = None) -> Iterator[Calculator]:
        """A calculator for these seeds, by default all, with clean outputs and the recorded chunk and threads."""
        record, seeds = self.run.record, self.seeds
        self._check_once()
        if seed_id is not None:
            is_requested = torch.isin(seeds.seed_id, torch.from_numpy(np.unique(seed_id)))
            if not bool(is_requested.any()):
                raise DataError(missing_seed(seed_id[0], len(seeds)))
            seeds = seeds[is_requested.nonzero()[:, 0]].in_memory()
        size = chunk or record["start"]["chunk"]
        self._check_memory(size, seeds.shape[1:])
        limits = Limits(chunk=size, least=least_similarity(record["settings"]))
        with threads(record["environment"]["threads"]), self.target.opened(), torch.no_grad():
            calculator = Calculator.trace(self.target, seeds, self.perturbation, self.oracle, limits)
            calculator.take_clean(clean_outputs(self.target, seeds, calculator.chunk), settles=self._settles)
            yield calculator

    def replay(self, fault: Fault, /) -> Replay:
        """Run a fault again."""
        row = (self.seeds.seed_id == fault.seed_id).nonzero()
        if not len(row):
            raise DataError(missing_seed(fault.seed_id, len(self.seeds)))
        seed = self.seeds[row[0]].in_memory()
        stored = self._stored(fault)
        self._check_memory(fault.chunk, seed.shape[1:])
        with threads(self.run.record["environment"]["threads"]), self.target.opened(), torch.no_grad():
            limits = Limits(chunk=fault.chunk)
            calculator = Calculator.trace(self.target, seed, self.perturbation, self.oracle, limits)
            clean = self.target.forward(calculator.inputs[0].expand(fault.chunk, *seed.shape[1:]).contiguous())
            calculator.take_clean(clean[:1], settles=self._settles)
            replayed = replay_fault(fault, calculator, stored)
        return replace(replayed, changes=self.changes)

    def show(self, fault: Fault, /) -> FaultInputs | None:
        """The stored inputs of a fault, if they were stored; nothing is run to show a run folder."""
        stored = self._stored(fault)
        return None if stored is None else stored_inputs(stored, self.run.record["start"])

    def _stored(self, fault: Fault) -> Tensors | None:
        with self.run.reopened() as run:
            return run.tensors([fault.id]).get(fault.id)

    def _check_once(self) -> None:
        """Refuse the recorded model if its code has changed; a model that the user passed or named may differ."""
        is_own = self._target is not None or "model" in self.permission.own
        if not self._is_checked and not is_own:
            self.check_same_tests()
        self._is_checked = True

    def _check_memory(self, chunk: int, shape: Sequence[int]) -> None:
        """Refuse a recorded chunk whose inputs do not fit into memory."""
        check_memory(4 * chunk * math.prod(shape), f"a forward pass of {chunk:,} tests, as {self.run.path} records it,")

    def _known_origin(self, subject: str) -> Origin:
        if self.origin is None:
            raise UsageError(
                f"the run in {self.run.path} does not record how to create its {subject}, because it was started from "
                "Python: pass target and data, or name them with --model and --data"
            )
        return self.origin


RunHandle = LiveRun | Replayer
"""Gives access to the model and the seeds of a run, so that its tests can be run again."""
RUN_FIGURES = ("score", "raised", "faults_selected", "distinct_faults_selected")
"""Figures in the summary of a criterion that come from the run, not from the criterion itself."""


def open_run(
    path: str | Path,
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    *,
    perturbation: Perturbation | None = None,
    trust: Trusted = False,
) -> Run:
    """Open a run folder and return the run as `themis.run` returned it, or as far as it got if it has not ended.

    Figures that are computed at the end of a campaign are None before it ends.

    Args:
        path: The run folder.
        target: Needed to replay faults if the run does not record how to create its model, for example because the
            model lives in memory.
        data: Needed if the run does not record how to read its data.
        perturbation: Needed if the perturbation is not known by its name.
        trust: Opening and showing a run never runs code that its folder names. Replaying faults does, and only if the
            folder was made on this machine by this user, or with True. Files to unpickle can be listed too.
    """
    with closing(Reader(path)) as run:
        return read_run(Replayer(run, None if target is None else as_target(target), data, perturbation, trust=trust))


def read_run(handle: Replayer) -> Run:
    """The run in an open folder, with this handle to replay its faults."""
    run = handle.run
    summary, rounds, progress = run.summary(), run.rounds(), read_progress(run)
    if not rounds:
        raise UsageError(f"a run must have finished a round, but {run.path} has none yet: wait for the first one")
    state = run.state(summary)
    ended, known = summary or {}, known_figures(run.record, summary, progress, rounds)
    criterion = ended.get("criterion") or {}
    of_run = {*RUN_FIGURES, *(run.record["start"].get("criterion") or {})}
    return Run(
        stop=run.stop_sentence(summary, state),
        stop_reason=ended.get("stop_reason") or state,
        faults=run.faults(handle=handle),
        rounds=rounds,
        start=_start(run.record),
        **{**known, "seconds": known["seconds"] or Seconds(0.0, 0.0, 0.0, 0.0)},
        near_ties=[] if progress is None else progress.near_ties,
        raised=(criterion or ({} if progress is None else progress.counts)).get("raised", 0),
        policy={name: value for name, value in ended.get("policy", {}).items() if name != "name"},
        of_criterion={name: value for name, value in criterion.items() if name not in of_run},
        environment=run.record["environment"],
        review=read_review(run),
        folder=run.path,
    )


AnyRun = Run | str | Path
"""A run as `themis.run` or `themis.open_run` returned it, or its folder."""


def as_run(run: AnyRun, trust: Trusted = False) -> Run:
    """The run itself, opened if it is given as a folder."""
    return run if isinstance(run, Run) else open_run(run, trust=trust)


def live_handle(run: Run) -> LiveRun:
    """The handle of a run made by this process; refuses a run that was opened from a folder."""
    if not isinstance(run.faults.handle, LiveRun):
        raise UsageError("the run must have been made by this process, but it was not: pass its folder")
    return run.faults.handle


def missing_seed(seed_id: int, n_seeds: int) -> str:
    """The message for data that does not have the seed of a fault."""
    return f"the data must hold the fault's seed {seed_id}, but it has {n_seeds} other seeds: pass the run's data"


def recorded_oracle(run: Reader, requested: str | Oracle, permission: Permission) -> Oracle:
    """The explicitly requested oracle, or else that of the run as its clean outputs settled it."""
    start, oracle = run.record["start"], choose_oracle(requested)
    if start["oracle"] == "against" != oracle.spec():
        raise UsageError(
            f"the run in {run.path} tested a model against a reference: pass both, as themis.Against(model, reference)"
        )
    if oracle.spec() not in ("auto", start["oracle_asked"]):
        return oracle
    if oracle.spec() != start["oracle"]:
        permission.require(names_code("oracle", start["oracle"]))
        try:
            oracle = choose_oracle(start["oracle"])
        except UsageError as error:
            raise UsageError(
                f"the run's oracle {start['oracle']!r} cannot be created here: pass a target that has it, or name it "
                f"with --oracle module:function ({error})"
            ) from error
    is_probability = start["gives_probabilities"]
    return oracle if oracle.is_probability == is_probability else replace(oracle, is_probability=is_probability)


def recorded_perturbation(run: Reader, requested: str | Perturbation | None, permission: Permission) -> Perturbation:
    """The run's perturbation, chosen by its name; a requested one must be the same."""
    name, magnitude = run.record["perturbation"], run.record["settings"]["magnitude"]
    if requested is None:
        permission.require(perturbation_code(name))
    try:
        imports = requested is not None or permission.is_granted
        chosen = choose_perturbation(requested or name, magnitude, imports=imports)
        has_default = not isinstance(requested, Perturbation) or any(theta.small for theta in chosen.theta)
        if has_default and chosen.family != "own":
            chosen = chosen.within(run.ranges)  # defaults depend on the pictures, and on the version of Themis
        ranges = [(theta.name, theta.low, theta.high) for theta in chosen.theta]
        distributions = [theta.as_dict().get("distribution") for theta in chosen.theta]
        if distributions != [theta.get("distribution") for theta in run.record["theta"]]:
            raise UsageError(f"its theta must occur as often as in the run, got {distributions}")
        is_same = requested is not None or is_same_code(chosen.code, run.record["perturbation_code"])
        if is_same and (chosen.name, ranges) == (name, run.ranges):
            return chosen
        reason = f"got {chosen.name!r} with {ranges}" if requested else "the name now belongs to another perturbation"
    except UsageError as error:
        reason = str(error)
    if requested is None:
        raise UsageError(f"the run's perturbation {name!r} is not known by name here: pass perturbation=... ({reason})")
    raise UsageError(f"the run's perturbation is {name!r} with theta {run.ranges}, {reason}")


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; 0 if both are equal to the bit, with equal values that are not finite."""
    if a.shape != b.shape:
        return float("inf")
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    return float((a - b).abs()[differs].nan_to_num(float("inf")).max()) if bool(differs.any()) else 0.0


def _is_close(a: Tensor | float, b: Tensor | float) -> bool:
    tolerance: Any = {"rtol": OUTPUT_TOLERANCE, "atol": OUTPUT_TOLERANCE}
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, **tolerance, equal_nan=True))


def _start(record: dict[str, Any]) -> Start:
    plain = record["start"]
    classes = plain.get("classes")
    values = {
        "bounds": tuple(plain["bounds"]),
        "theta": tuple(_theta(theta) for theta in record["theta"]),
        "settings": Settings(**record["settings"]),
        "layers": tuple(Layer(**{**layer, "shape": tuple(layer["shape"])}) for layer in plain["layers"]),
        "classes": None if classes is None else tuple(classes),
    }
    return Start(**{**plain, **values})


def _theta(plain: dict[str, Any]) -> Theta:
    low, high = plain["limits"]  # JSON has no infinity: None stands for no limit
    limits = (-math.inf if low is None else low, math.inf if high is None else high)
    try:
        return Theta(**{**plain, "limits": limits})
    except UsageError as error:
        raise StoreError(f"the theta of a run must be valid, but {error}; restore the run from a copy") from error
