"""The check before a campaign: what Themis sees of a model and its data, suspected mistakes, and the cost."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from themis.campaign.api import run
from themis.data.seeds import read_seeds
from themis.errors import DataError
from themis.measure.calculator import Limits
from themis.measure.clean import place_others
from themis.perturb import Perturbation
from themis.progress import step
from themis.runs.run import Start
from themis.settings import Settings
from themis.target.alignment import align_seeds, align_target
from themis.target.diagnose import Suspicion, is_near_chance, suspect
from themis.target.target import AnyTarget
from themis.target.traits import refuse_tokens

N_SEEDS, N_TESTS = 256, 512


@dataclass(frozen=True)
class Check:
    """The findings of a check."""

    model: str
    n_parameters: int | None
    """None for a model whose parameters cannot be seen."""
    device: str
    dtype: str
    input_shape: tuple[int, ...]
    least: float
    most: float
    bounds: tuple[float, float]
    n_seeds: int
    n_examined: int
    n_classes: int | None
    """Distinct labels among the seeds that were examined; None without labels."""
    output_shape: tuple[int, ...]
    accuracy: float | None
    is_near_chance: bool
    suspicions: list[Suspicion]
    warnings: list[str]
    """Warnings at the start of a campaign on this model and data."""
    problem: str | None
    """Why no campaign can run; None if one can."""
    start: Start | None
    """The start of a campaign; None if none can run."""
    n_faults: int
    n_tests: int
    seconds_per_test: float | None
    clean_gib: float | None
    """Memory that the clean activations of all seeds need."""
    clean_fits: bool | None
    """Whether these fit into the memory that they may take."""


def check(target: AnyTarget, data: Any, perturbation: str | Perturbation = "gaussian", **options: Any) -> Check:
    """Run the model on a few inputs, and a campaign of a few hundred tests; options are those of `themis.run`."""
    settings = Settings.of(**options)
    everything = align_seeds(target, read_seeds(data, settings.max_seeds))
    target = align_target(target, everything)
    seeds = read_seeds(everything, N_SEEDS)
    module = getattr(target, "module", None)
    inputs, labels = seeds.take(torch.arange(len(seeds))), seeds.labels
    place_others(target, seeds, torch.arange(len(seeds)))
    with target.opened(), torch.no_grad():
        refuse_tokens(target, inputs[0])
        with step("running the model on the first inputs"):
            outputs = target.forward(inputs.to(target.device)).float().cpu()
        right = _n_right(outputs, labels)
        chance = right is not None and is_near_chance(right, len(seeds), outputs.shape[1])
        is_odd = right is not None and right < len(seeds) / 2
        suspicions = suspect(target, inputs, labels) if is_odd and labels is not None else []
    start, problem, n_faults, n_tests, seconds = None, None, 0, 0, None
    warned: list[str] = []
    try:
        size = {"decide": None, "max_seeds": None, "split": None, "max_tests": N_TESTS, "round_size": N_TESTS // 2}
        few = {**options, **size, "tolerance": 1e-12}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", RuntimeWarning)
            result = run(target, seeds, perturbation, **few)
        warned = list(dict.fromkeys(str(warning.message) for warning in caught))
        first, last = result.rounds[0], result.rounds[-1]
        start, n_faults, n_tests = result.start, len(result.faults), last.tests
        seconds = (last.seconds - first.seconds) / (last.tests - first.tests)  # the first round warms up
    except DataError as error:
        problem = str(error)
    clean_bytes = None if start is None else len(everything) * start.n_neurons * 4
    return Check(
        model=_name_of(target),
        n_parameters=None if module is None else sum(parameter.numel() for parameter in module.parameters()),
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        input_shape=tuple(inputs.shape[1:]),
        least=float(inputs.min()),
        most=float(inputs.max()),
        bounds=target.bounds,
        n_seeds=len(everything),
        n_examined=len(seeds),
        n_classes=None if labels is None or labels.ndim != 1 else len(set(labels.tolist())),
        output_shape=tuple(outputs.shape[1:]),
        accuracy=None if right is None else right / len(seeds),
        is_near_chance=chance,
        suspicions=suspicions,
        warnings=warned,
        problem=problem,
        start=start,
        n_faults=n_faults,
        n_tests=n_tests,
        seconds_per_test=seconds,
        clean_gib=None if clean_bytes is None else clean_bytes / 2**30,
        clean_fits=None if clean_bytes is None else clean_bytes <= Limits.of(settings, target.device).clean_bytes,
    )


def _name_of(target: AnyTarget) -> str:
    """The class of a module or an estimator, or the name of a function."""
    tested = getattr(target, "module", None) or getattr(target, "predict", None)
    model = getattr(tested, "model", tested)  # the estimator inside a predict function
    if model is None or isinstance(model, FunctionType | BuiltinFunctionType):
        return str(getattr(model, "__name__", type(target).__name__))
    return type(model).__name__


def _n_right(outputs: Tensor, labels: Tensor | None) -> int | None:
    """The number of correct answers; None unless answers are classes."""
    if labels is None or labels.ndim != 1 or labels.is_floating_point() or outputs.ndim != 2 or outputs.shape[1] < 2:
        return None
    return int((outputs.argmax(1) == labels).sum())
