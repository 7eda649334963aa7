"""How a campaign is run: every option, its default and its rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from themis.errors import UsageError
from themis.options import check_known, check_numbers, check_rules, option


def check_shares(shares: Sequence[float]) -> list[float]:
    """The shares of a split as numbers: three, each more than none, together all."""
    is_list = isinstance(shares, list | tuple) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in shares
    )
    if not is_list or len(shares) != 3:
        raise UsageError(f"split must be three shares, to search, train and judge, as 0.5,0.2,0.3, got {shares!r}")
    if not (all(each > 0 for each in shares) and abs(math.fsum(shares) - 1) <= 1e-6):
        raise UsageError(f"split must be three shares above 0 that sum to 1, as 0.5,0.2,0.3, got {list(shares)}")
    return [float(each) for each in shares]


@dataclass(frozen=True)
class Settings:
    """Options of a campaign. None of a `max_` is no limit."""

    magnitude: float | None = option(None, "reach of the perturbation; of noise and attacks the upper end of theta")
    policy: Any = option("scheduled", "how tests are searched: random, corners, paper, scheduled, fuzz or deepxplore")
    criterion: Any | None = option(
        None, "criterion that guides policy fuzz, the default with it, or watches another: kmnc, 'kmnc(k=100)', nc, ..."
    )
    train_inputs: int | None = option(10_000, "training inputs that the criterion learns from, a random sample")
    preset: str | None = option(None, "paper: policy paper, no uniform stream, point MCSE, gibbs each round, no budget")
    coverage: float | None = option(1.0, "coverage at which to stop; null is none")
    judge: str = option("exact", "how the sampled neurons are judged each round: exact, gibbs or pymc")
    tolerance: float = option(5e-4, "MCSE (at 4,000 draws) under which a neuron has converged")
    alpha: float | None = option(0.95, "confidence of the upper bound on the MCSE; null takes its point value")
    draws: int = option(4000, "draws a neuron, over all chains")
    sample: int = option(1000, "neurons the sampler takes")
    scale: str = option("absolute", "unit of sensitivity: absolute, or relative to the neuron's clean spread")
    uniform_share: float = option(0.2, "share of tests drawn uniformly; claims about the model come from them alone")
    round_size: int | None = option(None, "tests a round; by default 640 or five chunks, under policy paper one a seed")
    batch_size: int | None = option(None, "tests in one pass on an accelerator (256); never changes the result")
    min_ssim: float | None = option(
        None, "drop tests that are less like their seed than this SSIM: 1 is the same picture"
    )
    max_seeds: int | None = option(None, "use a random sample of this many seeds, always the same")
    split: list[float] | None = option(
        None, "shares of the seeds to search, to train on and to judge by, as 0.5,0.2,0.3; the first alone are searched"
    )
    split_seed: int = option(0, "same seed, same split; of the same data whatever the random seed")
    max_tests: int | None = option(20_000, "stop after this many tests; null is no limit")
    max_passes: int | None = option(None, "stop after this many passes (a forward is 1, a backward 2)")
    max_seconds: float | None = option(None, "stop after this many seconds")
    plateau: int | None = option(20, "stop after this many rounds without a new distinct fault or more coverage")
    max_stored: int = option(1000, "faults whose inputs are kept, the most telling; their rows are all kept")
    clean_memory_gib: float = option(4.0, "memory for the seeds' clean activations; others are run with each test")
    random_seed: int = option(0, "same seed, same campaign")

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset != "paper":
            raise UsageError(f"preset must be 'paper' or None, got {self.preset!r}")
        check_numbers(self)
        if self.split is not None:
            object.__setattr__(self, "split", check_shares(self.split))
        rules: dict[str, tuple[bool, str]] = {
            "random_seed": (0 <= self.random_seed < 2**63, "lie in 0..2**63 - 1"),
            "split_seed": (0 <= self.split_seed < 2**63, "lie in 0..2**63 - 1"),
            "coverage": (self.coverage is None or 0 < self.coverage <= 1, "lie in (0, 1], or be None for no goal"),
            "tolerance": (self.tolerance > 0 and math.isfinite(self.tolerance), "be a positive number"),
            "alpha": (self.alpha is None or 0.5 <= self.alpha < 1, "lie in [0.5, 1), or be None for the point value"),
            "draws": (self.draws >= 100 and self.draws % 4 == 0, "be at least 100 and a multiple of the 4 chains"),
            "sample": (self.sample >= 1, "be at least 1"),
            "scale": (self.scale in ("absolute", "relative"), "be 'absolute' or 'relative'"),
            "uniform_share": (0 <= self.uniform_share <= 1, "lie in [0, 1]"),
            "min_ssim": (self.min_ssim is None or 0 < self.min_ssim < 1, "lie in (0, 1), or be None to drop no test"),
            "max_stored": (self.max_stored >= 0, "be 0 or more"),
            "clean_memory_gib": (self.clean_memory_gib >= 0, "be 0 or more"),
        }
        limits = ("train_inputs", "max_seeds", "max_tests", "max_passes", "max_seconds")
        for name in ("round_size", "batch_size", "plateau", *limits):
            value = getattr(self, name)
            rules[name] = (value is None or value > 0, "be positive, or None")
        check_rules(self, rules)

    @staticmethod
    def of(**options: Any) -> Settings:
        """Settings from keyword options; a preset changes the defaults, never what is said explicitly."""
        check_known(Settings, options)
        if options.get("criterion") is not None:
            options.setdefault("policy", "fuzz")
        settings = Settings(**options)
        if settings.preset == "paper":
            paper: dict[str, Any] = {
                "policy": "paper",
                "uniform_share": 0.0,
                "alpha": None,
                "judge": "gibbs",
                "max_tests": None,
            }
            settings = replace(settings, **{name: value for name, value in paper.items() if name not in options})
        return settings
