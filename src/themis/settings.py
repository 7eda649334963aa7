"""The settings of a campaign: every option with its default and its rule."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from themis.errors import UsageError
from themis.options import check_known, check_numbers, check_rules, option


def check_shares(shares: Sequence[float]) -> list[float]:
    """The three shares of a split as numbers; they must be positive and sum to 1."""
    is_kept = isinstance(shares, list | tuple) and len(shares) == 3
    is_kept = is_kept and all(isinstance(share, int | float) and share > 0 for share in shares)
    if not is_kept or abs(math.fsum(shares) - 1) > 1e-6:
        raise UsageError(
            "split must be three shares above 0 that sum to 1, for search, training and judging, such as 0.5,0.2,0.3, "
            f"got {shares!r}"
        )
    return [float(share) for share in shares]


def _check_groups(groups: object) -> str:
    """A number of consecutive seeds, at least 2, or the absolute path of a file."""
    is_number = isinstance(groups, int) and not isinstance(groups, bool)
    text = str(groups) if is_number or isinstance(groups, str | os.PathLike) else ""
    is_count = re.fullmatch("[+-]?[0-9]{1,18}", text) is not None
    if not text or (is_count and int(text) < 2):
        raise UsageError(
            "split_by must be a number of consecutive seeds that stay together, at least 2, or a text file with the "
            f"group of each seed, got {groups!r}"
        )
    return str(int(text)) if is_count else os.path.abspath(text)


HOLDS, FAILS, UNDECIDED = VERDICTS = "holds", "does not hold", "undecided"
"""The verdicts on a claim."""
_CLAIM = re.compile(r"((?:fault_rate|mean_error|mce)<=|recall>=)(\d*\.?\d+(?:e-?\d+)?)")


def read_claim(claim: object) -> tuple[str, float]:
    """The figure of a claim such as fault_rate<=0.02 and its limit, which is 0 if it is no claim."""
    found = _CLAIM.fullmatch(claim.replace(" ", "")) if isinstance(claim, str) else None
    return ("", 0.0) if found is None else (found[1][:-2], float(found[2]))


def least_similarity(settings: Mapping[str, Any]) -> dict[str, float]:
    """How similar tests must be to their seeds, by measure; empty if no test is dropped."""
    return {name: least for name in ("ssim", "vif") if (least := settings.get(f"min_{name}")) is not None}


def _check_slices(text: object) -> str:
    """Columns with the absolute paths of their files."""
    if not isinstance(text, str):
        raise UsageError(f"slice_by must be text such as class,scenes.csv:weather, got {text!r}")
    parts = (part.strip().rpartition(":") for part in text.split(","))
    return ",".join(f"{os.path.abspath(path)}:{name}" if path else name for path, _, name in parts)


MAX_RISK = 0.01
"""Little is left to find only if the upper limit of the residual risk is at most this. In a campaign without any fault,
that takes 367 uniform tests."""


@dataclass(frozen=True)
class Settings:
    """Options of a campaign. A limit (`max_...`) of None is no limit."""

    magnitude: float | None = option(
        None, "largest strength of the perturbation; for noise and attacks, the upper end of theta"
    )
    policy: Any = option(
        "scheduled",
        "how tests are chosen: random, corners, paper, scheduled, boundary (only --against, where it is the default), "
        "or a policy that a package adds, such as fuzz",
    )
    criterion: Any | None = option(
        None,
        "criterion that guides policy fuzz, which is then the default, or observes another policy: kmnc, "
        "'kmnc(k=100)', nc, ...",
    )
    train_inputs: int | None = option(
        10_000, "number of training inputs that the criterion learns from, drawn at random"
    )
    preset: str | None = option(
        None,
        "preset paper: policy paper, no uniform stream, point value of the MCSE, gibbs in every round, no budget and "
        "no plateau: it runs until coverage, or a limit that you set",
    )
    coverage: float | None = option(1.0, "stop at this coverage, if little is left to find; null sets no goal")
    recall: float | None = option(
        0.9,
        "share of the distinct faults that four times the tests would find; at the coverage goal, stop only if it was "
        "found and the residual risk is at most 1%; null stops at the coverage goal in any case",
    )
    judge: str = option("exact", "how the sampled neurons are judged in each round: exact, gibbs or pymc")
    tolerance: float = option(5e-4, "a neuron has converged if its MCSE (at 4,000 draws) is below this")
    alpha: float | None = option(0.95, "confidence of the upper bound on the MCSE; null uses the point value")
    draws: int = option(4000, "draws per neuron, over all chains")
    sample: int = option(1000, "number of neurons that are sampled")
    scale: str = option(
        "absolute",
        "unit of sensitivity: absolute, as in the paper, or relative to the spread of each neuron on clean inputs, for "
        "models with small activations, which the absolute tolerance calls covered after a few tests",
    )
    uniform_share: float = option(0.2, "share of tests drawn uniformly; claims about the model are based only on them")
    round_size: int | None = option(
        None, "tests per round (default: 640 or five chunks; with policy paper, one per seed)"
    )
    batch_size: int | None = option(
        None,
        "tests per forward pass on an accelerator (default: 256), inputs per call of a black box; does not change the "
        "result",
    )
    min_ssim: float | None = option(
        None, "drop tests whose similarity (SSIM) to their seed is below this; 1 means identical"
    )
    min_vif: float | None = option(
        None,
        "drop tests that keep less than this share of the visual information (VIF) of their seed; it predicts better "
        "than SSIM what people recognise, and needs pictures of at least 41 pixels per side; people name most pictures "
        "above 0.1",
    )
    max_seeds: int | None = option(None, "use a random sample of this many seeds; it is always the same")
    split: list[float] | None = option(
        None, "shares of the seeds for search, training and judging, such as 0.5,0.2,0.3; only the first part is tested"
    )
    split_seed: int = option(0, "the same seed gives the same split of the same data, whatever the random seed")
    split_by: str | None = option(
        None,
        "groups of seeds that stay together: a number of consecutive seeds, such as 100 frames of a video, or a text "
        "file with the group of each seed, one per line, such as the patient",
    )
    seed_weights: str | None = option(
        None,
        "how often inputs like each seed occur in operation: FILE:COLUMN of a CSV file with a row per input of the "
        "data, FILE:COLUMN=VALUE:SHARE,..., or class=NAME:SHARE,...; the uniform stream follows them",
    )
    decide: str | None = option(
        None,
        "stop as soon as a claim is certain at 95%, however often it looks: fault_rate<=0.02 (all tests are uniform, "
        "each of another seed) or recall>=0.9, the share of random faults found before (half of them are uniform); "
        "exit code 0, 1 or 4 (undecided)",
    )
    slice_by: str | None = option(
        None,
        "columns to give the fault rate by: class, FILE:COLUMN of a CSV file with a row per input of the data, or "
        "several, separated by commas; --max-fault-rate then holds for each slice too",
    )
    max_tests: int | None = option(20_000, "stop after this many tests; null sets no limit")
    max_passes: int | None = option(None, "stop after this many passes (a forward pass is 1, a backward pass is 2)")
    max_seconds: float | None = option(None, "stop after this many seconds")
    plateau: int | None = option(20, "stop after this many rounds without a new distinct fault or more coverage")
    max_stored: int = option(
        1000, "number of faults whose inputs are stored, the most telling first; the rows of all faults are stored"
    )
    clean_memory_gib: float | None = option(
        None,
        "memory in GiB for the clean activations of the seeds (default: half of what is free on a GPU, a quarter on a "
        "CPU); those that do not fit are computed again when tests need them, with the same results",
    )
    random_seed: int = option(0, "the same seed gives the same campaign")

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset != "paper":
            raise UsageError(f"preset must be 'paper' or None, got {self.preset!r}")
        check_numbers(self)
        if self.split is not None:
            object.__setattr__(self, "split", check_shares(self.split))
        if self.split_by is not None:
            object.__setattr__(self, "split_by", _check_groups(self.split_by))
        if isinstance(self.decide, str):
            object.__setattr__(self, "decide", self.decide.replace(" ", ""))
        if self.slice_by is not None:
            object.__setattr__(self, "slice_by", _check_slices(self.slice_by))
        rules: dict[str, tuple[bool, str]] = {
            "random_seed": (0 <= self.random_seed < 2**63, "lie in 0..2**63 - 1"),
            "split_seed": (0 <= self.split_seed < 2**63, "lie in 0..2**63 - 1"),
            "coverage": (self.coverage is None or 0 < self.coverage <= 1, "lie in (0, 1], or be None for no goal"),
            "recall": (self.recall is None or 0 < self.recall < 1, "lie in (0, 1), or be None for coverage alone"),
            "tolerance": (self.tolerance > 0 and math.isfinite(self.tolerance), "be a positive number"),
            "alpha": (self.alpha is None or 0.5 <= self.alpha < 1, "lie in [0.5, 1), or be None for the point value"),
            "draws": (self.draws >= 100 and self.draws % 4 == 0, "be at least 100 and a multiple of the 4 chains"),
            "sample": (self.sample >= 1, "be at least 1"),
            "scale": (self.scale in ("absolute", "relative"), "be 'absolute' or 'relative'"),
            "uniform_share": (0 <= self.uniform_share <= 1, "lie in [0, 1]"),
            **{
                f"min_{name}": (0 < least < 1, "lie in (0, 1), or be None to drop no test")
                for name, least in least_similarity(vars(self)).items()
            },
            "max_stored": (self.max_stored >= 0, "be 0 or more"),
            "clean_memory_gib": (self.clean_memory_gib is None or self.clean_memory_gib >= 0, "be 0 or more, or None"),
        }
        if self.decide is not None:
            figure, limit = read_claim(self.decide)
            rules["decide"] = (
                figure in ("fault_rate", "recall") and 0 < limit < 1,
                "be fault_rate<=X or recall>=X with X between 0 and 1, such as fault_rate<=0.02; suites decide mce and "
                "mean_error",
            )
            rules["uniform_share"] = (0 < self.uniform_share <= 1, "lie above 0 and up to 1 with decide")
            rules["preset"] = (self.preset is None, "be left out with decide, which needs a uniform stream")
        if self.tests_each_seed_once:
            alike = "be left out with decide, whose answer is certain only if all seeds and disturbances count the same"
            rules["slice_by"] = (self.slice_by is None, "be left out with decide, which stops before slices are known")
            rules |= {name: (getattr(self, name) is None, alike) for name in ("seed_weights", "min_ssim", "min_vif")}
        limits = ("train_inputs", "max_seeds", "max_tests", "max_passes", "max_seconds")
        for name in ("round_size", "batch_size", "plateau", *limits):
            value = getattr(self, name)
            rules[name] = (value is None or value > 0, "be positive, or None")
        check_rules(self, rules)

    @property
    def tests_each_seed_once(self) -> bool:
        """Whether the uniform stream never repeats a seed, to decide a claim about the fault rate."""
        return read_claim(self.decide)[0] == "fault_rate"

    @staticmethod
    def of(**options: Any) -> Settings:
        """Settings from keyword options; a preset changes defaults, but never an option that is given explicitly."""
        check_known(Settings, options)
        if options.get("criterion") is not None:
            options.setdefault("policy", "fuzz")
        if options.get("decide") is not None:  # nothing else but a budget should end it
            share = 0.5 if read_claim(options["decide"])[0] == "recall" else 1.0
            options = {"uniform_share": share, "coverage": None, "plateau": None, **options}
        settings = Settings(**options)
        if settings.preset == "paper":
            paper: dict[str, Any] = {
                "policy": "paper",
                "recall": None,
                "uniform_share": 0.0,
                "alpha": None,
                "judge": "gibbs",
                "max_tests": None,
                "plateau": None,
            }
            settings = replace(settings, **{name: value for name, value in paper.items() if name not in options})
        return settings


def policy_name(policy: Any) -> str:
    """The name of a policy, or that of its class."""
    return policy if isinstance(policy, str) else type(policy).__name__
