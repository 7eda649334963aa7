"""Reviewing whether faults are valid tests: the reviewers' marks in the run folder, and the rate of valid faults."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from themis.compute import rng
from themis.errors import StoreError, UsageError
from themis.judge.estimate import Estimate, describe_share
from themis.judge.risk import TAIL_PROBABILITY, fault_rate, valid_fault_rate
from themis.reading import check_form, one_of, parse_json, read_regular, record, text, whole
from themis.runs.estimates import read_progress
from themis.runs.fault import MAX_TESTS, Fault
from themis.runs.store.reader import Reader
from themis.runs.store.schema import MAX_JSON
from themis.text import counted, percent

REVIEW_FILE = "reviews.jsonl"
"""The append-only file of marks in a run folder, one line per mark. It is people's work, so no command replaces it."""
VALID, INVALID, UNSURE, UNDONE = MARKS = ("valid", "invalid", "unsure", "undone")
MIN_MARKS = 30
"""Faults that must be marked before a rate is stated; all faults if there are fewer."""
UNSUPPORTED_SETTINGS = ("seed_weights", "decide")
"""Settings with which the interval of the fault rate has another form than the rate of valid faults assumes."""
FOR_REVIEW = 110
NAME_PATTERN = r"[\w][\w .@+-]{0,63}"
MARK_FORM = record(
    {
        "run": text(64),
        "fault": whole(0, MAX_TESTS),
        "noise_seed": whole(None),
        "mark": one_of(*MARKS),
        "by": text(64, NAME_PATTERN, "a name of letters, digits, spaces and .@+-"),
        "at": text(40),
    },
    is_closed=True,
)


@dataclass(frozen=True)
class Agreement:
    """How often two reviewers gave the same mark to a fault that both have marked."""

    reviewers: tuple[str, str]
    faults: int
    share: float
    kappa: float | None
    """Cohen's kappa: the agreement beyond chance, at most 1; None if both always gave the same mark."""

    def __str__(self) -> str:
        kappa = "" if self.kappa is None else f" (kappa {self.kappa:.2f})"
        names, faults = " and ".join(self.reviewers), counted(self.faults, "fault")
        return f"{names} agree on {percent(self.share)} of {faults}{kappa}"


@dataclass(frozen=True)
class Review:
    """A summary of the marks on faults of the uniform stream; a fault with conflicting marks counts as unsure."""

    faults: int
    """Faults of the uniform stream."""
    valid: int
    invalid: int
    unsure: int
    needed: int
    """Faults that must be marked before a rate is stated."""
    fault_rate: Estimate | None
    """The rate of valid faults; None while more marks are needed."""
    reviewers: dict[str, int]
    """The number of faults that each reviewer has marked."""
    agreements: tuple[Agreement, ...]

    @property
    def marked(self) -> int:
        """The number of marked faults."""
        return self.valid + self.invalid + self.unsure

    @property
    def counts(self) -> str:
        """The numbers of marks in words."""
        unsure = f", {self.unsure:,} unsure" if self.unsure else ""
        return f"{self.valid:,} of {counted(self.marked, 'marked fault')} valid, {self.invalid:,} invalid{unsure}"

    @property
    def text(self) -> str:
        """The rate of valid faults in words, or how many marks are needed to state it."""
        if self.fault_rate is None:
            return f"unknown: {self.marked:,} of at least {counted(self.needed, 'fault')} marked"
        return f"{describe_share(self.fault_rate)}; {self.counts}"

    def __str__(self) -> str:
        return "\n".join([f"valid fault rate: {self.text}", *map(str, self.agreements)])

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def uniform_faults(run: Reader) -> list[Fault]:
    """The faults of the uniform stream in a random order that is the same for everybody; the first are a sample."""
    faults = list(run.faults("stream = 'uniform'"))
    ids = np.array([fault.id for fault in faults], dtype=np.int64)
    order = rng.mix(int(run.record["settings"]["random_seed"]), FOR_REVIEW, ids)
    return [faults[k] for k in np.argsort(order, kind="stable").tolist()]


def reviewable_faults(run: Reader) -> list[Fault]:
    """The uniform faults to review; refuses a run for which the rate of valid faults cannot be computed."""
    for name in UNSUPPORTED_SETTINGS:
        if run.record["settings"].get(name) is not None:
            raise UsageError(f"a valid fault rate needs a run without {name}, but {run.path} has it: run it without")
    return uniform_faults(run)


def identity(run: Reader) -> str:
    """A hash that identifies the tests of a run: its model, data, perturbation and randomness."""
    environment, names = run.record["environment"], ("perturbation", "perturbation_code", "theta")
    parts = [run.record[name] for name in names] + [environment[name] for name in ("model_sha256", "data_sha256")]
    parts += [run.record["settings"]["random_seed"], run.record.get("start", {}).get("oracle")]
    return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def read_marks(run: Reader, faults: list[Fault]) -> dict[str, dict[int, str]]:
    """The last mark on each fault by each reviewer; `faults` are those of the uniform stream."""
    path, mine = run.path / REVIEW_FILE, identity(run)
    known = {fault.id: fault.noise_seed for fault in faults}
    try:
        lines = read_regular(path, MAX_JSON).decode().split("\n")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"{path} must hold marks as lines of JSON, but it does not ({reason}): remove it") from error
    marks: dict[str, dict[int, str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.endswith("}"):  # empty, or incomplete because its writer was killed; names contain no brace
            continue
        try:
            values = check_form(parse_json(line), MARK_FORM, "the line")
        except ValueError as error:
            raise StoreError(f"{path} must hold marks, but line {number} is damaged ({error}): remove it") from error
        if values["run"] != mine or known.get(values["fault"]) != values["noise_seed"]:
            raise StoreError(f"{path}: marks must be of this run, but line {number} is about a fault of another")
        of_reviewer = marks.setdefault(values["by"], {})
        of_reviewer.pop(values["fault"], None)
        if values["mark"] != UNDONE:
            of_reviewer[values["fault"]] = values["mark"]
    return {by: own for by, own in marks.items() if own}


def read_review(run: Reader | str | Path) -> Review | None:
    """The review of a run from the marks in its folder; None without marks."""
    if isinstance(run, str | Path):
        with closing(Reader(run, is_brief=True)) as opened:
            return read_review(opened)
    if not (run.path / REVIEW_FILE).exists():
        return None
    faults = uniform_faults(run)
    marks = read_marks(run, faults)
    return _review(run, faults, marks) if marks else None


def required_review(run: Reader) -> Review:
    """The review of a run; raises an error if too few faults are marked to state the rate of valid faults."""
    faults = reviewable_faults(run)
    review = _review(run, faults, read_marks(run, faults))
    if review.marked < review.needed:
        raise UsageError(
            f"the valid fault rate needs marks on at least {review.needed:,} of the uniform stream's faults, but "
            f"{run.path} has {review.marked:,}: mark {review.needed - review.marked:,} more with themis review "
            f"{run.path}"
        )
    if review.fault_rate is None:
        raise UsageError(f"a valid fault rate needs uniform tests, but {run.path} has none: use --uniform-share 0.2")
    return review


def _review(run: Reader, faults: list[Fault], marks: dict[str, dict[int, str]]) -> Review:
    final = {}
    for id in sorted(set().union(*marks.values())):
        given = {own[id] for own in marks.values() if id in own}
        final[id] = given.pop() if len(given) == 1 else UNSURE
    counts, needed = Counter(final.values()), min(MIN_MARKS, len(faults))
    rate = _rate(run, faults, final) if len(final) >= needed else None
    return Review(
        faults=len(faults),
        valid=counts[VALID],
        invalid=counts[INVALID],
        unsure=counts[UNSURE],
        needed=needed,
        fault_rate=rate,
        reviewers={by: len(own) for by, own in sorted(marks.items())},
        agreements=tuple(found for pair in combinations(sorted(marks), 2) if (found := agree(pair, marks)) is not None),
    )


def _rate(run: Reader, faults: list[Fault], final: dict[int, str]) -> Estimate | None:
    progress = read_progress(run)
    if progress is None or any(run.record["settings"].get(name) is not None for name in UNSUPPORTED_SETTINGS):
        return None
    tests, failed = progress.uniform_tests_by_seed, progress.uniform_faults_by_seed
    if not final:  # there are no faults to mark
        return fault_rate(tests, failed)
    rate = fault_rate(tests, failed, tail=TAIL_PROBABILITY / 2)
    marked = [(fault.seed_id, final[fault.id]) for fault in faults if fault.id in final]
    is_valid, is_unsure = (np.array([value == mark for _, value in marked]) for mark in (VALID, UNSURE))
    return None if rate is None else valid_fault_rate(rate, np.array([seed for seed, _ in marked]), is_valid, is_unsure)


def agree(pair: tuple[str, str], marks: dict[str, dict[int, str]]) -> Agreement | None:
    """The agreement of two reviewers; None if no fault was marked by both."""
    first, second = (marks[by] for by in pair)
    both = first.keys() & second.keys()
    if not both:
        return None
    n = len(both)
    share = sum(first[id] == second[id] for id in both) / n
    often = [Counter(own[id] for id in both) for own in (first, second)]
    chance = sum(often[0][mark] * often[1][mark] for mark in MARKS) / n**2
    return Agreement(pair, n, share, None if chance == 1 else (share - chance) / (1 - chance))
