"""The environment of a run, recorded so that the run can be repeated, and the check that it is the same now.

Weights and data are identified by hashes. The code of a model, of its preprocessing and of a user's own perturbation
has no hash; it is identified by the inputs and outputs of a few tests that the run recorded.
"""

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from themis.compute.native import library
from themis.criteria import Criterion
from themis.data.seeds import Seeds
from themis.errors import ModelError, UsageError
from themis.measure.calculator import Calculator
from themis.measure.clean import place_others, within_bounds
from themis.measure.repeats import BATCH_TOLERANCE, ROUGH_BATCH_TOLERANCE
from themis.oracle import Oracle
from themis.perturb.context import Context
from themis.perturb.perturbation import Perturbation, perturb
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.settings import Settings
from themis.target.against import Against
from themis.target.fingerprint import hash_file, hash_seeds
from themis.target.target import AnyTarget, Target
from themis.version import __version__

MKL_BRANCHES = ("OFF", "OFF", "AUTO", "COMPATIBLE", "SSE2", "SSE3", "SSSE3", "SSE4_1", "SSE4_2", "AVX", "AVX2")
"""The names of the values that `mkl_cbwr_get` returns, in order; larger values are branches for AVX-512."""
MKL_STRICT = 0x10000
"""The bit that strict mode sets in that value."""


def mkl_cbwr() -> str | None:
    """The reproducibility mode of MKL, as the environment variable MKL_CBWR spells it; None if torch has no MKL.

    In mode "OFF", results depend on the addresses of arrays. MKL reads the variable when it is first used.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    if not library.exists():
        return None
    mkl = ctypes.CDLL(str(library))  # already loaded by torch
    if not hasattr(mkl, "mkl_serv_cbwr_get"):
        return None
    setting = mkl.mkl_serv_cbwr_get(-1)
    branch = setting & ~MKL_STRICT
    if not 0 <= branch < 64:
        return None
    name = MKL_BRANCHES[branch] if branch < len(MKL_BRANCHES) else "AVX512"
    return f"{name},STRICT" if setting & MKL_STRICT else name


def describe_environment(device: torch.device | None) -> dict[str, Any]:
    """Return versions, device and thread count, all of which change the kernels and with them the last bits.

    device: None leaves it out, for callers that record several devices elsewhere.
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
    """Return the hashes of the model, the data and, if there are any, the reference and the weights file."""
    weights = None if origin is None else origin.weights_path()
    reference = {"reference_sha256": target.reference.fingerprint()} if isinstance(target, Against) else {}
    return {
        "model_sha256": target.fingerprint(),
        **reference,
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
    """Return plain data unchanged, and for an object a text that identifies it and cannot be mistaken for a name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [as_plain_data(item) for item in value]
    return f"<{value!r}>" if isinstance(value, Criterion) else type(value).__name__


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) != 64 else f"{text[:12]}..."


N_SAMPLES = 4
"""Number of clean inputs that are recorded, each also in a disturbed version."""
N_OUTPUT_VALUES, N_INPUT_VALUES = 64, 256
"""Number of evenly spaced values that are recorded of an output and of an input."""
INPUT_TOLERANCE, PORTABLE_INPUT_TOLERANCE = 1e-3, 5e-2
"""Largest difference of disturbed inputs that rounding may cause, as a share of the disturbance: in the environment of
the run, and in another one."""
PORTABLE_OUTPUT_TOLERANCE = 5e-2
"""Largest difference of outputs that another environment may cause, as a share of the largest output."""
ROUNDING_SHARE = 1e-6
"""Mean difference of inputs, as a share of their range, that counts as rounding however small the disturbance is."""


class Samples(NamedTuple):
    """Some values of a few clean inputs, of the same inputs disturbed, and of their outputs; one row per seed.

    The outputs for disturbed inputs follow those for clean ones; they are missing if running the model costs requests.
    """

    clean: Tensor
    outputs: Tensor
    inputs: Tensor | None
    """The disturbed inputs; None for attacks, whose gradients other machines round differently."""


def _run_samples(
    target: AnyTarget, seeds: Seeds, perturbation: Perturbation, oracle: Oracle, known_outputs: Tensor | None = None
) -> Samples:
    """Run evenly spaced seeds, clean and disturbed; the target must be open.

    known_outputs: outputs for all clean inputs, to be used instead of running the model.
    """
    rows = torch.linspace(0, len(seeds) - 1, min(N_SAMPLES, len(seeds))).round().long()
    clean, device = seeds.take(rows), target.device
    inside = within_bounds(clean, target.bounds, seeds.seed_id[rows]).to(device)
    if known_outputs is None:
        place_others(target, seeds, rows)
        outputs = target.forward(inside).float()
    else:
        outputs = known_outputs[rows].float()
    disturbed = None
    if not (perturbation.passes or perturbation.needs_gradient):
        labels = None if seeds.labels is None else seeds.labels[rows].to(device)
        features = seeds.features if perturbation.inputs == "table" else None
        context = Context.of_task(target, oracle, outputs, labels, features)
        share = (torch.arange(len(rows)) + 1) / len(rows)  # how far theta goes into its range, up to its end
        theta = torch.stack([each.low + (each.high - each.low) * share for each in perturbation.theta], 1)
        disturbed = perturb(perturbation, inside, theta.to(device), torch.arange(len(rows)).to(device), context)
        if not context.passes and known_outputs is None:
            outputs = torch.cat([outputs, target.forward(disturbed).float()])
        disturbed = None if context.passes else _thin(disturbed, N_INPUT_VALUES)
    return Samples(_thin(clean, N_INPUT_VALUES), _thin(outputs, N_OUTPUT_VALUES), disturbed)


def record_samples(calculator: Calculator) -> dict[str, Any]:
    """Samples that a run records after its clean sweep; they count neither as tests nor as passes."""
    clean = calculator.clean
    known = None if isinstance(calculator.target, Target) else clean.outputs
    with torch.no_grad():
        samples = _run_samples(calculator.target, calculator.seeds, calculator.perturbation, clean.oracle, known)
    return {"outputs": samples.outputs.tolist(), "inputs": None if samples.inputs is None else samples.inputs.tolist()}


def check_same_tests(run: Reader, target: AnyTarget, seeds: Seeds, perturbation: Perturbation, oracle: Oracle) -> None:
    """Refuse a model or a perturbation whose samples differ from the recorded ones by more than rounding.

    The data must be the run's. The median over the samples decides, because rounding may change one near-tie a lot.
    """
    recorded = run.record.get("samples")
    if recorded is None:
        return
    then, now = run.record["environment"], describe_environment(target.device)
    is_same_place = not list_changes({name: then[name] for name in now if name in then}, now)
    with target.opened(), torch.no_grad():
        samples = _run_samples(target, seeds, perturbation, oracle)
        has_state = isinstance(target, Target) and target.changed_tensors()  # answers depend on earlier inputs
    has_few_bits = target.dtype.itemsize <= 2 or getattr(target, "autocast", None) is not None
    tolerance = ROUGH_BATCH_TOLERANCE if has_few_bits or target.device.type != "cpu" else BATCH_TOLERANCE
    if not is_same_place:  # boxes near the threshold appear and disappear
        tolerance = float("inf") if oracle.spec().startswith("detection") else PORTABLE_OUTPUT_TOLERANCE
    if samples.inputs is not None and recorded["inputs"] is not None:
        gap = median_high(_input_gaps(samples.inputs, torch.tensor(recorded["inputs"]), samples.clean, target.bounds))
        if gap > (INPUT_TOLERANCE if is_same_place else PORTABLE_INPUT_TOLERANCE):
            raise UsageError(
                f"perturbation {perturbation.name!r} must give the inputs that {run.path} recorded, but they differ by "
                f"{gap:.1%} of the disturbance: undo what has changed in its code since, or start a new run"
            )
    outputs = torch.tensor(recorded["outputs"])
    gaps, n = _output_gaps(samples.outputs[: len(outputs)], outputs), len(samples.clean)
    gap = max(median_high(gaps[first : first + n]) for first in range(0, len(gaps), n))  # clean ones, disturbed ones
    if gap > tolerance and not has_state:
        raise ModelError(
            f"the model must answer the inputs that {run.path} recorded as it did then, but its outputs differ by "
            f"{gap:.1%} of the largest output, although its weights are the same: undo what has changed in its code or "
            "its preprocessing since, or start a new run"
        )


def _output_gaps(now: Tensor, then: Tensor) -> list[float]:
    """The largest difference of each output, as a share of the largest recorded one."""
    if now.shape != then.shape:
        return [float("inf")] * len(then)
    now, then = (each[:, None].double().nan_to_num().flatten(1) for each in (now, then))
    scale = then.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    return [float(gap) for gap in (now - then).abs().amax(1) / scale]


def _input_gaps(now: Tensor, then: Tensor, clean: Tensor, bounds: tuple[float, float]) -> list[float]:
    """The mean difference of each disturbed input, as a share of the mean disturbance."""
    if not now.shape == then.shape == clean.shape:
        return [float("inf")] * len(then)
    now, then, clean = (each.double().flatten(1) for each in (now, then, clean))
    gap, disturbance = (now - then).abs().mean(1), (then - clean).abs().mean(1)
    gap = (gap - ROUNDING_SHARE * (bounds[1] - bounds[0])).clamp(min=0)
    return [float(share) for share in torch.where(gap > 0, gap / disturbance, 0.0)]


def _thin(rows: Tensor, most: int) -> Tensor:
    """At most `most` evenly spaced values of each row, on the CPU."""
    rows = rows.cpu()
    flat = rows.flatten(1) if rows.ndim > 1 else rows[:, None]
    return flat[:, torch.linspace(0, flat.shape[1] - 1, min(most, flat.shape[1])).round().long()].nan_to_num()
