"""The plan of an evaluation: models, perturbations, techniques and budgets, as in a YAML file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from themis.errors import UsageError, nearest
from themis.options import check_count, check_known, check_numbers, check_rules, option
from themis.reading import read_yaml
from themis.runs.source import Origin
from themis.target.fingerprint import hash_text
from themis.text import split_list
from themis_lab.comparison.plan import CampaignCell, ComparisonPlan, as_file_name
from themis_lab.techniques import PRESET, choose_technique

QUESTIONS = ("faults", "done", "theory", "variants", "retraining", "truth")
"""Parts of an evaluation: equal budgets, stopping when done, the theory, time and parameters, accuracy regained, and
known faults."""


class Kind(StrEnum):
    """Kinds of cells, in the order in which they are run."""

    RATES = "rates"
    CAMPAIGNS = "campaigns"
    DONE = "done"
    THEORY = "theory"
    VARIANT = "variants"
    RETRAINING = "retraining"
    MAPS = "maps"
    RECALL = "recall"
    KILLS = "kills"


_SHARED = ("seeds", "judge_seeds", "grid_seeds", "train_inputs", "uniform_share", "neurons", "round_size")
DECISIVE = {
    Kind.RATES: (*_SHARED, "magnitudes"),
    Kind.CAMPAIGNS: (*_SHARED, "passes", "tests"),
    Kind.DONE: (*_SHARED, "done_tests", "plateau"),
    Kind.THEORY: (*_SHARED, "done_tests", "reference_tests", "seed_sets"),
    Kind.VARIANT: (*_SHARED, "variant_tests"),
    Kind.RETRAINING: (*_SHARED, "techniques", "passes", "retrain_inputs", "retrain_seeds", "epochs"),
    Kind.MAPS: (*_SHARED, "mutants", "planted", "map_cells"),
    Kind.RECALL: (*_SHARED, "mutants", "planted", "map_cells", "passes"),
    Kind.KILLS: (*_SHARED, "mutants", "passes"),
}
"""The options that decide the result of a cell, by its kind; others decide only which cells there are."""
LISTS = ("techniques", "magnitudes", "variants", "questions")
"""Options that may be lists in a plan."""


@dataclass(frozen=True)
class PairOptions:
    """The options of one model under one perturbation."""

    techniques: str = option(
        f"{PRESET},scheduled,nc,kmnc,idc,lsa", "as for themis compare; random and corners are always included"
    )
    magnitudes: str = option("paper,grid", "as for themis compare")
    campaigns: int = option(3, "campaigns per technique or variant and magnitude, each with its own random seed")
    passes: int = option(5000, "passes per campaign, the first budget at which techniques are compared")
    tests: int | None = option(1000, "tests per campaign, the second budget; null for none")
    done_magnitudes: str = option("middle", "where techniques run until they are done: all, middle or last")
    done_tests: int = option(20_000, "tests after which a technique that is not done is stopped")
    plateau: int = option(20, "rounds without a new distinct fault or more coverage, after which a technique is done")
    reference_tests: int = option(40_000, "tests of the reference run that the theory is checked against")
    seed_sets: int = option(4, "disjoint sets of seeds on which mean sensitivities are inferred")
    variants: str = option(
        "all", "time and parameters: all, or names of variants such as sample-50,tolerance-0.001,pymc-sample-50"
    )
    variant_tests: int = option(4000, "tests after which a variant is stopped")
    retrain_inputs: int = option(2000, "maximum number of inputs that retraining divides into its three parts")
    retrain_passes: int | None = option(
        None, "passes per technique that searches for inputs to train on; null for as many as passes"
    )
    retrain_seeds: int = option(3, "random seeds of every training")
    epochs: int = option(10, "epochs of every training")
    mutants: int = option(5, "mutants per operator, of which those worth testing with are kept")
    planted: int = option(3, "mutants whose failing theta are all found, to see which of them techniques find")
    map_cells: int = option(400, "cells of theta that are tried on every seed to find all that fail")
    round_size: int = option(160, "tests per round, after which a technique learns from their outcomes")
    seeds: int = option(1000, "maximum number of seeds that techniques use")
    judge_seeds: int = option(1000, "maximum number of separate seeds on which error rates are measured")
    grid_seeds: int = option(500, "maximum number of further seeds on which the grid is chosen")
    train_inputs: int = option(10_000, "training inputs that a criterion is fitted to, a random sample")
    uniform_share: float = option(0.2, "share of tests drawn uniformly, the same ones for every technique")
    neurons: str = option("element", "what counts as a neuron: element or channel")
    device: str | None = option(None, "cpu or cuda (default: the device of the model)")
    questions: str = option(
        ",".join(QUESTIONS[:4]), f"parts of the evaluation: {', '.join(QUESTIONS)}; empty leaves the pair out"
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        retraining, truth = ("retrain_inputs", "retrain_seeds", "epochs"), ("mutants", "planted", "map_cells")
        for name in ("done_tests", "plateau", "reference_tests", "seed_sets", "variant_tests", *retraining, *truth):
            check_count(name, getattr(self, name))
        places = ("all", "middle", "last")
        check_rules(
            self,
            {
                **{
                    name: (value is None or value > 0, "be positive, or null")
                    for name, value in (("tests", self.tests), ("retrain_passes", self.retrain_passes))
                },
                "done_magnitudes": (self.done_magnitudes in places, f"be one of {', '.join(places)}"),
                "neurons": (self.neurons in ("element", "channel"), "be element or channel"),
            },
        )
        for name in split_list(self.questions):
            if name not in QUESTIONS:
                raise UsageError(f"questions must be {', '.join(QUESTIONS)}, got {name!r}: {nearest(name, QUESTIONS)}")
        self.chosen_variants()
        self.comparison()

    def comparison(self, resamples: int = 1000, random_seed: int = 0) -> ComparisonPlan:
        """The options in the form of a comparison."""
        shared = {field.name for field in fields(ComparisonPlan)} & {field.name for field in fields(self)}
        values = {name: getattr(self, name) for name in shared}
        plan = ComparisonPlan(**values, max_passes=self.passes, resamples=resamples, random_seed=random_seed)
        plan.chosen()  # raises for an unknown technique
        return plan

    @property
    def passes_to_retrain(self) -> int:
        """The passes with which techniques search for inputs to train on."""
        return self.passes if self.retrain_passes is None else self.retrain_passes

    def asks(self, question: str) -> bool:
        return question in split_list(self.questions)

    def chosen_variants(self) -> tuple[str, ...]:
        """The names of the variants, without repetitions."""
        names: list[str] = []
        for name in split_list(self.variants):
            if name not in (*VARIANTS, "all"):
                raise UsageError(f"variants must be all or known names, got {name!r}: {nearest(name, VARIANTS)}")
            names += [name] if name != "all" else [other for other in VARIANTS if other not in ONLY_IF_NAMED]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class ModelSource:
    """A model of the evaluation: its name in tables, and where it comes from."""

    name: str
    origin: Origin
    row: str = ""
    """The row of the paper's table that it fills, if its name does not say it."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that determines an evaluation."""

    models: tuple[ModelSource, ...]
    perturbations: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Options of every pair of model and perturbation, by name."""
    exceptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Options that differ, by the name of a perturbation, of a model, or of both with a space between them."""
    resamples: int = 1000
    random_seed: int = 0
    _checked: dict[tuple[str, str], PairOptions] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The options of pairs that have been checked."""

    def __post_init__(self) -> None:
        if not self.models or not self.perturbations:
            raise UsageError("an evaluation needs models and perturbations: name at least one of each in the plan")
        check_count("resamples", self.resamples)
        check_count("random_seed", self.random_seed, 0)
        names = [model.name for model in self.models]
        known = {*names, *self.perturbations, *(f"{model} {other}" for model in names for other in self.perturbations)}
        for name in self.exceptions:
            if name not in known:
                raise UsageError(
                    f"exceptions must be for a model, a perturbation or 'MODEL PERTURBATION', got {name!r}: "
                    f"{nearest(name, known)}"
                )
        self.pairs()  # raises for options that are not valid

    @staticmethod
    def of(content: dict[str, Any]) -> EvaluationPlan:
        """A plan from the content of a YAML file."""
        content = dict(content)
        models = tuple(_model(name, source) for name, source in _named(content.pop("models", []), "models").items())
        perturbations = tuple(_named(content.pop("perturbations", []), "perturbations"))
        exceptions = {
            str(name): _options(values) for name, values in _named(content.pop("exceptions", {}), "exceptions").items()
        }
        whole = {name: content.pop(name) for name in ("resamples", "random_seed") if name in content}
        return EvaluationPlan(models, perturbations, _options(content), exceptions, **whole)

    @staticmethod
    def read(path: str | Path) -> EvaluationPlan:
        """The plan in a YAML file."""
        content = read_yaml(path, "the plan")
        if not isinstance(content, dict):
            raise UsageError(f"{path} must contain names and values, such as passes: 5000: see --print-plan")
        return EvaluationPlan.of({str(name): value for name, value in content.items()})

    def as_dict(self) -> dict[str, Any]:
        """The plan as `of` reads it."""
        default = Origin()
        return {
            "models": {
                model.name: {
                    **{
                        name: value
                        for name, value in model.origin.as_dict().items()
                        if value != getattr(default, name) and name != "bounds"
                    },
                    **({"row": model.row} if model.row else {}),
                }
                for model in self.models
            },
            "perturbations": list(self.perturbations),
            **self.options,
            "exceptions": self.exceptions,
            "resamples": self.resamples,
            "random_seed": self.random_seed,
        }

    def pairs(self) -> list[tuple[str, str]]:
        """Every model with every perturbation, except for pairs without a question."""
        pairs = ((model.name, perturbation) for model in self.models for perturbation in self.perturbations)
        return [pair for pair in pairs if split_list(self.pair(*pair).questions)]

    def pair(self, model: str, perturbation: str) -> PairOptions:
        """The options of one model under one perturbation; options for the pair override those for either."""
        if (model, perturbation) not in self._checked:
            options = dict(self.options)
            for name in (perturbation, model, f"{model} {perturbation}"):
                options |= self.exceptions.get(name, {})
            self._checked[model, perturbation] = PairOptions(**options)
        return self._checked[model, perturbation]

    def cell(self, kind: Kind, model: str, perturbation: str, technique: str = "") -> EvaluationCell:
        """A cell with everything that determines its result except the magnitude; other options make another cell."""
        options = self.pair(model, perturbation)
        if kind == Kind.RETRAINING:
            options = replace(options, passes=options.passes_to_retrain)
        decisive = {name: getattr(options, name) for name in DECISIVE[kind]}
        identity = (decisive, self.origin(model).as_dict(), self.random_seed)
        digest = hash_text(json.dumps(identity, sort_keys=True, default=str))[:8]
        return EvaluationCell(kind, model, perturbation, digest, technique)

    def origin(self, model: str) -> Origin:
        (source,) = (source for source in self.models if source.name == model)
        return source.origin

    def restricted(self, models: list[str], perturbations: list[str]) -> EvaluationPlan:
        """The plan for some of its models and perturbations; empty lists mean all."""
        for subject, chosen, known in (
            ("models", models, [model.name for model in self.models]),
            ("perturbations", perturbations, self.perturbations),
        ):
            for name in chosen:
                if name not in known:
                    raise UsageError(f"{subject} must be those of the plan, got {name!r}: {nearest(name, known)}")
        kept_models = tuple(model for model in self.models if not models or model.name in models)
        kept = tuple(name for name in self.perturbations if not perturbations or name in perturbations)
        names = {model.name for model in kept_models}
        exceptions = {
            name: values
            for name, values in self.exceptions.items()
            if all(word in names or word in kept for word in name.split(" "))
        }
        return replace(self, models=kept_models, perturbations=kept, exceptions=exceptions)


def _named(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, str):
        return dict.fromkeys(split_list(value))
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return dict.fromkeys(value)
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    raise UsageError(f"{name} must be a list of names, or names with their options, got {value!r}")


def _model(name: str, values: Any) -> ModelSource:
    """A model of the zoo, given by name only, or a model given by options as for `themis run`."""
    values = dict(values or {})
    row = str(values.pop("row", ""))
    check_known(Origin, values)
    if not values.get("model"):
        values.setdefault("zoo", name)
    return ModelSource(name, Origin.of(values), row)


def _options(values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UsageError(f"options must be names and values, such as passes: 5000, got {values!r}")
    check_known(PairOptions, values)
    return {name: _join(value) if name in LISTS else value for name, value in values.items()}


def _join(names: Any) -> str:
    return ",".join(map(str, names)) if isinstance(names, list) else str(names)


@cache
def has_criterion(technique: str) -> bool:
    """Whether a technique is guided by a criterion; executors ask this of every cell again and again."""
    return choose_technique(technique).criterion is not None


@dataclass(frozen=True)
class EvaluationCell:
    """One unit of work of an evaluation."""

    kind: Kind
    model: str
    perturbation: str
    digest: str
    """A hash of all that decides its result."""
    technique: str = ""
    """Or the name of a variant."""
    magnitude: float = 0.0
    campaign: int = 0

    @property
    def file(self) -> str:
        pair = f"{self.kind}/{as_file_name(self.model)}/{as_file_name(self.perturbation)}-{self.digest}"
        if self.kind == Kind.RATES:
            return f"{pair}.json"
        technique = f"{as_file_name(self.technique)}/" if self.technique else ""
        return f"{pair}/{technique}{self.magnitude!r}-{self.campaign}.json"

    @property
    def in_comparison(self) -> CampaignCell:
        """The cell's campaign in the form of a comparison."""
        return CampaignCell(self.technique, self.magnitude, self.campaign)

    @property
    def group(self) -> str:
        """A criterion is fitted once for all campaigns of its technique on a model."""
        fits = self.kind in (Kind.CAMPAIGNS, Kind.DONE, Kind.RECALL, Kind.KILLS) and has_criterion(self.technique)
        return f"{self.model} {self.technique}" if fits else self.model

    def __str__(self) -> str:
        parts = [self.model, self.perturbation, self.technique]
        if self.magnitude:
            parts.append(f"{self.magnitude:g}, {self.kind} {self.campaign + 1}")
        else:
            parts.append(self.kind)
        return " ".join(part for part in parts if part)


UNVARIED = "paper"
"""The variant that changes nothing."""
ALL_NEURONS = 1 << 30
"""A sample size that includes every neuron."""
VARIED_OPTIONS: dict[str, dict[str, Any]] = {
    "sample": {"sample-50": 50, "sample-100": 100, "sample-200": 200, "sample-500": 500, "sample-2000": 2000},
    "tolerance": {f"tolerance-{value:g}": value for value in (2.5e-4, 1e-3, 2e-3, 5e-3)},
    "draws": {"draws-1000": 1000, "draws-16000": 16_000},
    "scale": {"scale-relative": "relative"},
    "policy": {"policy-random": "random", "policy-corners": "corners", "policy-scheduled": "scheduled"},
    "judge": {"judge-exact": "exact"},
}
"""Values of an option of `run`, by the name of their variant."""
VARIANTS: dict[str, dict[str, Any]] = {
    UNVARIED: {},
    **{name: {option: value} for option, values in VARIED_OPTIONS.items() for name, value in values.items()},
    "sample-all": {"sample": ALL_NEURONS},
    "exact-sample-all": {"judge": "exact", "sample": ALL_NEURONS},
    "neurons-channel": {"neurons": "channel"},
    "pymc-sample-50": {"judge": "pymc", "sample": 50},
}
"""Options that differ from those of the preset, by variant; `neurons` is that of the target.

`sample-all` is the method without its sampler. `judge-exact` judges by the closed form instead of Markov chains.
`pymc-sample-50` is `sample-50` with the sampler of PyMC.
"""
ONLY_IF_NAMED = ("pymc-sample-50",)
"""Variants that `all` leaves out: PyMC is an extra, and takes minutes."""
