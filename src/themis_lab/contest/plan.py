"""The plan of a contest: its options, and the cells that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from themis.errors import UsageError
from themis.options import check_count, check_known, option
from themis.text import split_list
from themis_lab.comparison.plan import as_file_name
from themis_lab.techniques import DIFFERENTIAL, Technique, choose_technique

FREE_IN_CONTEST = ("techniques", "random_seeds")
"""Options that decide which cells there are, but change no cell."""
THEMIS = "themis"
"""The technique that searches with the default policy, and trains as `themis retrain` does."""
FRESH_SHARE = 0.0
"""The default share of inputs that are disturbed again during training: only the chosen inputs count."""


def choose_competitor(name: str) -> Technique:
    """The technique with this name, if it can take part in a contest; criteria guide the fuzzer."""
    if name.strip().lower() == THEMIS:
        return Technique(THEMIS)
    technique = choose_technique(name)
    if technique.name == DIFFERENTIAL:
        raise UsageError(f"techniques to retrain from must need only one model, got {DIFFERENTIAL!r}: leave it out")
    if technique.preset is not None:
        raise UsageError(f"techniques to retrain from must be policies or criteria, got {name!r}: write paper instead")
    return technique


@dataclass(frozen=True)
class ContestPlan:
    """What all techniques have in common."""

    techniques: str = option(
        "themis,nc,kmnc,idc,lsa,random,corners", "techniques that choose inputs: themis, other policies, criteria"
    )
    inputs: int | None = option(
        None, "number of inputs that each technique chooses; by default the distinct faults that themis finds"
    )
    most_inputs: int = option(2_000, "maximum number of inputs if it follows from the faults that themis finds")
    passes: int = option(5_000, "passes per campaign on the search seeds, including those over clean seeds")
    round_size: int = option(160, "tests per round, after which a technique learns from their outcomes")
    random_seeds: int = option(3, "how often each technique searches and trains, each time with its own random seed")
    draws: int = option(5, "uniform tests per judge seed, the same ones for every model")
    judge_passes: int = option(0, "passes of a campaign on the judge seeds against each model; 0 for no campaign")
    random_seed: int = option(0, "the first random seed; the following ones count up from it")

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name in ("judge_passes", "random_seed") else 1
            if field.name == "techniques" or (field.name == "inputs" and value is None):
                continue
            check_count(field.name, value, least)
        if not self.chosen():
            raise UsageError("techniques must name at least one, got none: write themis,random,corners")

    @staticmethod
    def of(**options: Any) -> ContestPlan:
        """A plan from keyword options; techniques may be a list."""
        check_known(ContestPlan, options)
        if not isinstance(options.get("techniques", ""), str):
            options["techniques"] = ",".join(map(str, options["techniques"]))
        return ContestPlan(**options)

    def chosen(self) -> tuple[Technique, ...]:
        """The techniques, without repetitions."""
        return tuple(dict.fromkeys(choose_competitor(name) for name in split_list(self.techniques)))

    def cells(self) -> list[ContestCell]:
        """Every technique with every random seed."""
        return [
            ContestCell(technique, self.random_seed + k)
            for technique in self.chosen()
            for k in range(self.random_seeds)
        ]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ContestCell:
    """One search and training: a technique with a random seed."""

    technique: Technique
    random_seed: int

    @property
    def file(self) -> str:
        return f"{as_file_name(self.technique.name)}-{self.random_seed}.json"

    @property
    def group(self) -> str:
        """A criterion is fitted once for all cells of its technique."""
        return self.technique.name

    def __str__(self) -> str:
        return f"{self.technique.name}, random seed {self.random_seed}"
