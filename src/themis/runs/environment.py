"""What a run depends on, recorded so that it can be repeated, and whether it is the same now.

Weights and data have a hash. The code of a model, of its preprocessing and of a user's own perturbation has none: it is
known by the inputs and outputs of a few tests that the run recorded.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.compute.native import library
from themis.criteria.criterion import Criterion
from themis.data.seeds import Seeds
from themis.errors import ModelError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.inputs import place_others, within_bounds
from themis.oracle import Oracle
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, perturb
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.settings import Settings
from themis.target.blackbox import fresh_answers
from themis.target.fingerprint import hash_file, hash_seeds
from themis.target.repeats import BATCH_TOLERANCE, ROUGH_BATCH_TOLERANCE
from themis.target.target import AnyTarget, Target
from themis.version import __version__

MKL_BRANCHES = ("OFF", "OFF", "AUTO", "COMPATIBLE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2")
"""The first of the settings that `mkl_cbwr_get` returns; the others are branches for AVX-512."""
MKL_STRICT = 0x10000


def mkl_cbwr() -> str | None:
    """The reproducibility mode that MKL is in, in the words of the variable MKL_CBWR; None if torch has no MKL.

    "OFF": its results depend on where arrays lie in memory. MKL reads the variable when it is first used.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    mkl = ctypes.CDLL(str(library))  # it is loaded; this only looks it up
    if not hasattr(mkl, "mkl_serv_cbwr_get"):
        return None
    setting = mkl.mkl_serv_cbwr_get(-1)
    branch = setting & ~MKL_STRICT
    if not 0 <= branch < 64:
        return None
    name = MKL_BRANCHES[branch] if branch < len(MKL_BRANCHES) else "AVX512"
    return f"{name},STRICT" if setting & MKL_STRICT else name


def describe_environment(device: torch.device | None) -> dict[str, Any]:
    """Return versions, device and thread count; each of them changes the kernels, and so the last bits.

    device: None leaves it out, if there are several that are recorded elsewhere.
    """
    where = {}
    if device is not None:
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else platform.processor() or "cpu"
        where = {"device": str(device), "device_name": name}
    return {
        "themis": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        **where,
        "threads": torch.get_num_threads(),
        "compiled_fold": library() is not None,
        "mkl_cbwr": mkl_cbwr(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def describe_tested(target: AnyTarget, seeds: Seeds, origin: Origin | None) -> dict[str, Any]:
    """Return hashes of the model, of the data, and of the weights file if there is one."""
    weights = None if origin is None else origin.weights_path()
    return {
        "model_sha256": target.fingerprint(),
        "data_sha256": hash_seeds(seeds),
        "weights_sha256": None if weights is None else hash_file(weights),
    }


def describe_run(
    settings: Settings, origin: Origin | None, perturbation: Perturbation, environment: dict[str, Any]
) -> dict[str, Any]:
    """Return what a run folder records before the first test."""
    return {
        "settings": {name: as_plain_data(value) for name, value in asdict(settings).items()},
        "origin": None if origin is None else origin.as_dict(),
        "perturbation": perturbation.name,
        "perturbation_code": perturbation.code,
        "theta": [theta.as_dict() for theta in perturbation.theta],
        "environment": environment,
    }


def list_changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a sentence fragment for each difference between two environments."""
    return [
        f"{name} {_short(then[name])} then, {_short(now.get(name))} now" for name in then if then[name] != now.get(name)
    ]


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run with `n` threads, since their number changes the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_plain_data(value: Any) -> Any:
    """Return plain data as it is, and for an object a text that identifies it and cannot be mistaken for a name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_plain_data(item) for item in value]
    return f"<{value!r}>" if isinstance(value, Criterion) else type(value).__name__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) != 64 else f"{text[:12]}..."


FEW = 4
"""Clean inputs that are recorded, each of them also disturbed; and faults that are run again."""
OUTPUT_VALUES, INPUT_VALUES = 64, 256
"""Values that are recorded of an output and of a disturbed input, evenly spaced."""
SAME_INPUTS, SIMILAR_INPUTS = 1e-3, 5e-2
"""Difference of disturbed inputs, as a share of the disturbance, that rounding may cause: where the run was made, and
in another environment."""
SIMILAR_OUTPUTS = 5e-2
"""The same of outputs in another environment, as a share of the largest."""
UNCHANGED = 1e-6
"""Mean difference of inputs, as a share of their range, that is rounding even if the disturbance is as small."""


@dataclass(frozen=True)
class Again:
    """What runs recorded tests again. The target must be open."""

    target: AnyTarget
    seeds: Seeds
    perturbation: Perturbation
    oracle: Oracle

    def outputs(self, rows: Tensor, inputs: Tensor | None = None) -> Tensor:
        """The outputs for the clean inputs of some seeds, or for disturbed ones; one row per seed, on the CPU."""
        inputs = self.seeds.take(rows) if inputs is None else inputs
        place_others(self.target, self.seeds, rows)
        inside = within_bounds(inputs, self.target.bounds, self.seeds.seed_id[rows])
        return self.target.forward(inside.to(self.target.device)).float().cpu()

    def disturbed(self, rows: Tensor, clean_outputs: Tensor, theta: Tensor, noise_seed: Tensor) -> Tensor | None:
        """The disturbed inputs of some seeds, on the CPU; None if that takes passes: gradients round differently."""
        target, device = self.target, self.target.device
        if self.perturbation.passes or self.perturbation.needs_gradient:
            return None
        inputs = within_bounds(self.seeds.take(rows), target.bounds, self.seeds.seed_id[rows]).to(device)
        labels = None if self.seeds.labels is None else self.seeds.labels[rows].to(device)
        features = self.seeds.features if self.perturbation.inputs == "table" else None
        context = Context.of_task(target, self.oracle, clean_outputs.to(device), labels, features)
        disturbed = perturb(self.perturbation, inputs, theta.to(device), noise_seed.to(device), context)
        return None if context.passes else disturbed.cpu()


def record_samples(calculator: Calculator) -> dict[str, Any]:
    """What a run records of a few tests after its clean sweep; they count neither as tests nor as passes."""
    again = Again(calculator.target, calculator.seeds, calculator.perturbation, calculator.clean.oracle)
    rows = _rows(len(calculator.seeds))
    is_own_module = isinstance(calculator.target, Target)
    with torch.no_grad():
        outputs = again.outputs(rows) if is_own_module else calculator.clean.outputs[rows].cpu()
        disturbed = again.disturbed(rows, outputs, *_sample_tests(again.perturbation, len(rows)))
    return {
        "outputs": _thin(outputs, OUTPUT_VALUES).tolist(),
        "inputs": None if disturbed is None else _thin(disturbed, INPUT_VALUES).tolist(),
    }


def check_same_tests(run: Reader, target: AnyTarget, seeds: Seeds, perturbation: Perturbation, oracle: Oracle) -> None:
    """Refuse a model or a perturbation that is not the run's: recorded tests differ by more than rounding.

    These are the samples that were recorded at the start, which runs of earlier versions do not have, and some faults.
    The data must be the run's.
    """
    again = Again(target, seeds, perturbation, oracle)
    then, now = run.record["environment"], describe_environment(target.device)
    is_same_place = not list_changes({name: then[name] for name in now if name in then}, now)
    with target.opened(), torch.no_grad(), fresh_answers(target):
        outputs, inputs = _compare_samples(run, again)
        of_faults = _compare_faults(run, again)
        tolerance = _output_tolerance(target, is_same_place)
        if oracle.spec().startswith("detection") and not is_same_place:
            tolerance = float("inf")  # boxes near the threshold appear and disappear
        worst = max(_typical(outputs), _typical(of_faults.outputs))
        has_state = isinstance(target, Target) and target.changed_tensors()  # its answers depend on those before
        if worst > tolerance and not has_state and (_typical(outputs) > tolerance or _is_independent(again, of_faults)):
            raise ModelError(
                f"the model must answer the inputs that {run.path} recorded as it did then, but its outputs differ by "
                f"{worst:.1%} of the largest output, although its weights are the same: undo what has changed in its "
                "code or its preprocessing since, or start a new run"
            )
    worst = max(_typical(inputs), _typical(of_faults.inputs))
    if worst > (SAME_INPUTS if is_same_place else SIMILAR_INPUTS):
        raise UsageError(
            f"perturbation {perturbation.name!r} must give the inputs that {run.path} recorded, but they differ by "
            f"{worst:.1%} of the disturbance: undo what has changed in its code since, or start a new run"
        )


@dataclass(frozen=True)
class _FaultGaps:
    """How far faults are from what was recorded, and the rows of their seeds with the disturbed inputs."""

    outputs: list[float]
    inputs: list[float]
    rows: Tensor
    disturbed: Tensor


def _compare_samples(run: Reader, again: Again) -> tuple[list[float], list[float]]:
    """How far the outputs and the disturbed inputs of the samples are from the recorded ones."""
    samples = run.record.get("samples")
    if samples is None:
        return [], []
    rows = _rows(len(again.seeds))
    outputs = again.outputs(rows)
    gaps = _output_gaps(_thin(outputs, OUTPUT_VALUES), torch.tensor(samples["outputs"]))
    disturbed = again.disturbed(rows, outputs, *_sample_tests(again.perturbation, len(rows)))
    if samples["inputs"] is None or disturbed is None:
        return gaps, []
    clean, disturbed = (_thin(each, INPUT_VALUES) for each in (again.seeds.take(rows).cpu(), disturbed))
    return gaps, _input_gaps(disturbed, torch.tensor(samples["inputs"]), clean, again.target.bounds)


def _compare_faults(run: Reader, again: Again) -> _FaultGaps:
    """How far the outputs for the stored inputs of some faults, and these inputs, are from those made now."""
    faults = run.faults("tensors IS NOT NULL", limit=FEW)
    stored = run.tensors([fault.id for fault in faults])
    row_of = {int(seed): row for row, seed in enumerate(again.seeds.seed_id)}
    known = [fault for fault in faults if fault.id in stored and fault.seed_id in row_of]
    none = torch.zeros(0, dtype=torch.int64)
    if not known:
        return _FaultGaps([], [], none, none)
    rows = torch.tensor([row_of[fault.seed_id] for fault in known])
    theta = torch.tensor([list(fault.theta.values()) for fault in known], dtype=torch.float32)
    clean, inputs, recorded = (
        torch.cat([getattr(stored[fault.id], name) for fault in known])
        for name in ("clean_inputs", "inputs", "outputs")
    )
    outputs = _output_gaps(again.outputs(rows, inputs), recorded)
    noise_seed = torch.tensor([fault.noise_seed for fault in known])
    disturbed = again.disturbed(rows, again.outputs(rows), theta, noise_seed)
    gaps = [] if disturbed is None else _input_gaps(disturbed, inputs, clean, again.target.bounds)
    return _FaultGaps(outputs, gaps, rows, inputs)


def _is_independent(again: Again, faults: _FaultGaps) -> bool:
    """Whether an answer does not depend on the other inputs of its batch, which are not those of the campaign."""
    twice = [torch.tensor([k, k]) for k in range(len(faults.rows))]
    alone = [again.outputs(faults.rows[pair], faults.disturbed[pair])[:1] for pair in twice]
    together = again.outputs(faults.rows, faults.disturbed)
    return _typical(_output_gaps(torch.cat(alone), together)) <= ROUGH_BATCH_TOLERANCE


def _output_tolerance(target: AnyTarget, is_same_place: bool) -> float:
    has_few_bits = target.dtype.itemsize <= 2 or getattr(target, "autocast", None) is not None
    if not is_same_place:
        return SIMILAR_OUTPUTS
    return ROUGH_BATCH_TOLERANCE if has_few_bits or target.device.type != "cpu" else BATCH_TOLERANCE


def _typical(gaps: list[float]) -> float:
    """The gap that half of the tests reach: in a near-tie, rounding may change a single test by a lot."""
    return sorted(gaps)[len(gaps) // 2] if gaps else 0.0


def _output_gaps(now: Tensor, then: Tensor) -> list[float]:
    """The largest difference of each output, as a share of the largest recorded one."""
    if now.shape != then.shape:
        return [float("inf")] * len(then)
    now, then = (each[:, None].double().nan_to_num().flatten(1) for each in (now, then))
    scale = then.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    gaps: list[float] = ((now - then).abs().amax(1) / scale).tolist()
    return gaps


def _input_gaps(now: Tensor, then: Tensor, clean: Tensor, bounds: tuple[float, float]) -> list[float]:
    """The mean difference of each disturbed input, as a share of the mean disturbance."""
    if not now.shape == then.shape == clean.shape:
        return [float("inf")] * len(then)
    now, then, clean = (each.double().flatten(1) for each in (now, then, clean))
    gap, disturbance = (now - then).abs().mean(1), (then - clean).abs().mean(1)
    gap = (gap - UNCHANGED * (bounds[1] - bounds[0])).clamp(min=0)
    shares: list[float] = torch.where(gap > 0, gap / disturbance, 0.0).tolist()
    return shares


def _rows(n_seeds: int) -> Tensor:
    """The seeds of the samples, evenly spaced."""
    return torch.linspace(0, n_seeds - 1, min(FEW, n_seeds)).round().long()


def _sample_tests(perturbation: Perturbation, n: int) -> tuple[Tensor, Tensor]:
    """Theta from a part of the range up to its end, and noise seeds."""
    share = (torch.arange(n) + 1) / n
    theta = [each.low + (each.high - each.low) * share for each in perturbation.theta]
    return torch.stack(theta, 1), torch.arange(n)


def _thin(rows: Tensor, most: int) -> Tensor:
    """At most so many values of each row, evenly spaced."""
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    return flat[:, torch.linspace(0, flat.shape[1] - 1, min(most, flat.shape[1])).round().long()].nan_to_num()
