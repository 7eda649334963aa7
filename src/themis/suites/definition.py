"""The definition of a suite: its members, each a perturbation with a range, a weight and levels for grading.

Suites are chosen by name, or read from a file, a dict or a list.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from themis.compute import rng
from themis.errors import UsageError, nearest
from themis.measure.tests import Floats, Ints
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.names import PERTURBATIONS
from themis.perturb.perturbation import check_fits, check_gradient
from themis.plugins import Extensible
from themis.reading import (
    Form,
    all_of,
    anything,
    check_form,
    either,
    items,
    number,
    optional,
    read_yaml,
    record,
    text,
    values_of,
    whole,
)
from themis.target.target import AnyTarget

MEMBER_KEYS = ("perturb", "name", "magnitude", "weight", "max_tests", "levels", "note")
SUITE_KEYS = ("name", "members", "levels")
DEFAULT_NAME = "suite"
"""The name of a suite without a name."""
MAX_MEMBERS = 500
MEMBERS_EXAMPLE = "members: [fog, {perturb: gaussian, magnitude: 0.2, weight: 2}]"
LEVELS_EXAMPLE = "levels: 5 for five equal steps, or levels: [0.5, {sigma: 0.08, angle: [-45, 45]}]"


FOR_LEVEL = 70
"""The purpose of random numbers that choose the theta of a level."""
Value = float | tuple[float, float]
"""A fixed value of theta, or the ends of the range from which it is drawn."""


@dataclass(frozen=True)
class Level:
    """The theta at which a model is graded, given as a strength or as values of some dimensions.

    strength: every dimension goes this share of the way from its identity to a bound, chosen at random if there are
    two. theta: values, or ranges to draw from; dimensions that are not named are drawn from their whole range.
    """

    strength: float | None = None
    theta: tuple[tuple[str, Value], ...] = ()

    @staticmethod
    def read(value: float | dict[str, Any]) -> Level:
        """Read a level as a user writes it: 0.5, or {sigma: 0.08, angle: [-45, 45]}."""
        if not isinstance(value, dict):
            return Level(strength=float(value))
        return Level(theta=tuple((str(name), _read_value(item)) for name, item in value.items()))

    def check(self, perturbation: Perturbation, place: str) -> None:
        """Refuse a dimension that the perturbation does not have, and a value outside its range."""
        known = {theta.name: theta for theta in perturbation.theta}
        for name, value in self.theta:
            if name not in known:
                raise UsageError(
                    f"{place} must name a theta of {perturbation.name!r}, got {name!r}: {nearest(name, known)}"
                )
            low, high = known[name].low, known[name].high
            ends = value if isinstance(value, tuple) else (value, value)
            if not low <= ends[0] <= ends[1] <= high:
                plain = perturbation.name.partition("(")[0]
                raise UsageError(
                    f"{place}.{name} must lie in {low:g}..{high:g}, the range of {perturbation.name!r}, got "
                    f"{_format(value)}: widen the range with {plain}({name}=LOW:HIGH), or lower the level"
                )

    def draw(self, perturbation: Perturbation, seed_id: Ints, random_seed: int) -> Floats:
        """The theta of one test per seed, `[seeds, dimensions]`, as a function of the seed's id and the random seed."""
        named = dict(self.theta)
        columns = []
        for k, theta in enumerate(perturbation.theta):
            draw = rng.uniform(random_seed, FOR_LEVEL, k, seed_id)
            if self.strength is not None:
                is_up = draw < 0.5
                if theta.identity in (theta.low, theta.high):
                    is_up = np.full(len(draw), theta.low == theta.identity)
                bound = np.where(is_up, theta.high, theta.low)
                columns.append(theta.identity + self.strength * (bound - theta.identity))
                continue
            value = named.get(theta.name, (theta.low, theta.high))
            low, high = value if isinstance(value, tuple) else (value, value)
            columns.append(low + draw * (high - low))
        bounds = np.array([[theta.low, theta.high] for theta in perturbation.theta], dtype=np.float32)
        return np.stack(columns, 1).astype(np.float32).clip(bounds[:, 0], bounds[:, 1])

    def plain(self) -> float | dict[str, Any]:
        """The level as a user writes it."""
        if self.strength is not None:
            return self.strength
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self.theta}

    def __str__(self) -> str:
        if self.strength is not None:
            return f"strength {self.strength:g}"
        return ", ".join(f"{name} {_format(value)}" for name, value in self.theta)


def read_levels(value: Any, place: str) -> tuple[Level, ...]:
    """Read a list of levels, or a number of equally spaced levels: 5 is 0.2, 0.4, 0.6, 0.8 and 1."""
    if value is None:
        return ()
    _check_form(value, _LEVELS, place, LEVELS_EXAMPLE)
    if isinstance(value, int):
        return tuple(Level(strength=(k + 1) / value) for k in range(value))
    return tuple(map(Level.read, value))


def _read_value(value: float | list[float]) -> Value:
    return (float(value[0]), float(value[1])) if isinstance(value, list) else float(value)


def _format(value: Value) -> str:
    return f"{value[0]:g} to {value[1]:g}" if isinstance(value, tuple) else f"{value:g}"


@dataclass(frozen=True)
class SuiteMember:
    """A perturbation of a suite, whose campaign is in a folder of the same name."""

    name: str
    perturbation: Perturbation
    """The perturbation, with its range at the magnitude."""
    magnitude: float | None = None
    weight: float = 1.0
    """The member's weight when the fixed part of the budget is divided."""
    max_tests: int | None = None
    levels: tuple[Level, ...] = ()
    note: str = ""
    """A remark for readers, such as how close the member is to a published corruption."""

    def plain(self) -> dict[str, Any]:
        """The member as it is written in a YAML file."""
        return {
            "name": self.name,
            "perturb": self.perturbation.name,
            "magnitude": self.magnitude,
            "weight": self.weight,
            "max_tests": self.max_tests,
            "levels": [level.plain() for level in self.levels],
            "note": self.note,
        }

    @property
    def range(self) -> str:
        """The range of theta, in words."""
        return ", ".join(f"{theta.name} {theta.low:g} to {theta.high:g}" for theta in self.perturbation.theta)


@dataclass(frozen=True)
class SuiteDefinition:
    """The members of a suite, and notes on what was left out."""

    name: str
    members: tuple[SuiteMember, ...]
    notes: tuple[str, ...] = ()

    def fitted(self, shape: tuple[int, ...]) -> SuiteDefinition:
        """The suite with ranges of theta for inputs `[...]` of this shape."""
        members = (replace(member, perturbation=member.perturbation.fitted(shape)) for member in self.members)
        return replace(self, members=tuple(members))

    def recorded(self) -> list[dict[str, Any]]:
        """The members as they are written in `suite.json`."""
        return [{**member.plain(), "range": member.range} for member in self.members]

    def plain(self) -> dict[str, Any]:
        """The definition as it is written in a YAML file."""
        return {"name": self.name, "members": [member.plain() for member in self.members]}


def read_suite(source: Any, *, imports: bool = True) -> SuiteDefinition:
    """Read a suite from a file, a dict or a list of perturbations; `imports`: whether user modules may be imported."""
    if isinstance(source, Path):
        return _read_mapping(read_yaml(source, "the suite"), str(source), imports=imports)
    if isinstance(source, Mapping):
        return _read_mapping(source, "the suite", imports=imports)
    if isinstance(source, str | Perturbation):
        source = [source]
    if isinstance(source, Sequence):
        return _read_mapping({"members": list(source)}, "the suite", imports=imports)
    raise UsageError(
        f"a suite must be a name, a YAML file, a dict or a list of perturbations, got {type(source).__name__}: write "
        'for instance ["fog", "gaussian"]'
    )


def leave_out_unfitting(suite: SuiteDefinition, shape: tuple[int, ...], target: AnyTarget | None) -> SuiteDefinition:
    """Leave out members of a named suite that do not fit inputs of this shape or the target; its notes name them."""
    fitting, reasons = [], []
    for member in suite.members:
        try:
            check_fits(member.perturbation, shape)
            if target is not None:
                check_gradient(member.perturbation, target)
            fitting.append(member)
        except UsageError as error:
            reasons.append(str(error))
    if not fitting:
        n, reason = len(reasons), reasons[0]
        raise UsageError(f"suite {suite.name!r} must have a perturbation that fits, but none of its {n} fits: {reason}")
    notes = (f"Left out: {reason.partition(': ')[0]}." for reason in reasons)
    return SuiteDefinition(suite.name, tuple(fitting), (*suite.notes, *notes))


def suite_title(name: str) -> str:
    """The heading for a suite."""
    return "Suite" if name == DEFAULT_NAME else f"Suite {name}"


def _positive(value: Any, place: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise ValueError(f"{place} must be a positive number, got {value!r}")


def _spec(value: Any, place: str) -> None:
    if not isinstance(value, str | Perturbation) or not value:
        raise ValueError(f"{place} must be the name of a perturbation such as fog, got {value!r}")


_STRENGTH = all_of(number(0, 1), _positive)
_LEVEL = either(values_of(either(items(number(), 2), number())), _STRENGTH)
_LEVELS = either(whole(1, 100), items(_LEVEL))
_SUITE = record({"members": items(anything)}, {"name": text(1000, r".*\S.*", "text such as street")})
_MEMBER = record(
    {"perturb": _spec},
    {
        "weight": _positive,
        "max_tests": optional(whole(1)),
        "note": text(),
        "name": text(),
        "magnitude": optional(_positive),
    },
)


def _read_mapping(content: Mapping[Any, Any], place: str, *, imports: bool) -> SuiteDefinition:
    _check(content, _SUITE, SUITE_KEYS, place)
    entries = content["members"]
    if not entries:
        raise UsageError(f"{place} must have a list of members, got {entries!r}: write {MEMBERS_EXAMPLE}")
    levels = read_levels(content.get("levels"), f"levels of {place}")
    if len(entries) > MAX_MEMBERS:
        raise UsageError(f"{place} must have at most {MAX_MEMBERS} members, got {len(entries):,}: split it")
    places = (f"member {k} of {place}" for k in count(1))
    members = [_read_member(entry, of, levels, imports=imports) for entry, of in zip(entries, places, strict=False)]
    return SuiteDefinition(content.get("name", DEFAULT_NAME).strip(), tuple(_named_apart(members)))


def _read_member(entry: Any, place: str, levels: tuple[Level, ...], *, imports: bool) -> SuiteMember:
    entry = {"perturb": entry} if isinstance(entry, str | Perturbation) else entry
    _check(entry, _MEMBER, MEMBER_KEYS, place)
    if "levels" in entry:
        levels = read_levels(entry["levels"], f"levels of {place}")
    magnitude = None if entry.get("magnitude") is None else float(entry["magnitude"])
    try:
        chosen = choose_perturbation(entry["perturb"], magnitude, imports=imports)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
    for k, level in enumerate(levels):
        level.check(chosen, f"levels[{k}] of {place}")
    ending = "" if magnitude is None else f"-{magnitude:g}"
    name = entry.get("name") or re.sub(r"\([^()]*\)", "", chosen.name) + ending
    name = re.sub(r"[^\w.-]+", "_", name.strip()).strip("._-")[:80].lower() or "member"  # for every file system
    weight, note = float(entry.get("weight", 1)), entry.get("note", "")
    return SuiteMember(name, chosen, magnitude, weight, entry.get("max_tests"), levels, note)


def _check(content: Any, form: Form, known: Sequence[str], place: str) -> None:
    for key in content if isinstance(content, Mapping) else ():
        if key not in known:
            raise UsageError(f"{place} must not have {key!r}: {nearest(str(key), known)}")
    _check_form(content, form, place, MEMBERS_EXAMPLE)


def _check_form(content: Any, form: Form, place: str, example: str) -> None:
    try:
        check_form(content, form, place)
    except ValueError as error:
        raise UsageError(f"{error}; write for instance {example}") from None


def _named_apart(members: list[SuiteMember]) -> list[SuiteMember]:
    """Make the names of members unique by appending numbers to repeated ones."""
    counts = Counter(member.name for member in members)
    taken, apart = set(counts), []
    for member in members:
        name = member.name
        if counts[name] > 1:
            name = next(name for k in count(1) if (name := f"{member.name}-{k}") not in taken)
            taken.add(name)
        apart.append(replace(member, name=name))
    return apart


N_LEVELS = 5
SMALL_SIDE = 64
"""Pictures with a shorter side than this are graded at the severities published for pictures of 32 pixels."""
SLOW_ATTACKS = ("cw", "square", "square_label")
"""Attacks that are left out of the suite because they take 303 and 100 passes per test."""
CORRUPTIONS_FILE = Path(__file__).with_name("corruptions.json")
"""The members of the suite corruptions, for `large` and for `small` pictures.

Levels are severities 1 to 5 as published for ImageNet-C (224 pixels) and CIFAR-10-C (32 pixels). Ranges extend from the
identity to the strongest level; if all levels have the same value of a dimension, its range starts at the default
bound. The first word of a note says how close a member is to the published corruption: same, close or a substitute.
"""


class NamedSuite(NamedTuple):
    """A suite of all perturbations of a family, and its description."""

    family: str
    about: str


SUITES = {
    "corruptions": NamedSuite("", "the 15 common corruptions, graded at severities 1 to 5"),
    "weather": NamedSuite("weather", "rain, snow, fog, frost, glare, shadow and darkness"),
    "camera": NamedSuite("camera", "blur, light, colour, compression and faults of the sensor"),
    "noise": NamedSuite("noise", "noise of photons, of the sensor and of broken pixels"),
    "geometry": NamedSuite("geometry", "rotation, shift, scale, shear, perspective and elastic warps"),
    "signals": NamedSuite("signal", "gain, clipping, filters, dropouts and drift of signals"),
    "tables": NamedSuite("table", "valid changes of some features of a row, and noise"),
    "attacks": NamedSuite("attack", "FGSM, PGD and Auto-PGD; not CW and Square, which are slow"),
}


GRADERS: Extensible[Callable[..., Any]] = Extensible("themis.suites", {})
"""Functions, by NAME, that grade a model on a suite `NAME:PLACE` without campaigns."""


def is_graded_only(source: Any) -> bool:
    """Whether a suite consists of published files, such as `cifar10c:FOLDER`, and has no campaigns."""
    return isinstance(source, str) and ":" in source and source.partition(":")[0] in GRADERS


def grader(source: str) -> Callable[..., Any]:
    """The function that grades a model on a suite of published files and returns a `SuiteRun`."""
    return GRADERS[source.partition(":")[0]]


def choose_suite(source: Any, shape: tuple[int, ...], target: AnyTarget | None = None) -> SuiteDefinition:
    """Choose a suite by name, YAML file, dict or list of perturbations, for inputs `[...]` of this shape.

    A named suite leaves out members that do not fit the inputs or the target; in other suites they are errors.
    """
    if not isinstance(source, str):
        return read_suite(source)
    if source == "corruptions":
        return leave_out_unfitting(_corruptions(shape), shape, target)
    if source in SUITES:
        family = SUITES[source].family
        members = [name for name, of in PERTURBATIONS.items() if of.family == family and name not in SLOW_ATTACKS]
        levels = None if family == "attack" else N_LEVELS
        suite = read_suite({"name": source, "members": members, "levels": levels})
        return leave_out_unfitting(suite, shape, target)
    if source.endswith((".yaml", ".yml")):
        return read_suite(Path(source))
    raise UsageError(
        f"suite must be a known name or a YAML file, got {source!r}: {nearest(source, SUITES)}; to test one "
        f"perturbation, write [{source!r}] or --perturb {source}"
    )


def _corruptions(shape: tuple[int, ...]) -> SuiteDefinition:
    is_small = len(shape) >= 3 and min(shape[-2:]) < SMALL_SIDE
    members = json.loads(CORRUPTIONS_FILE.read_text("utf-8"))["small" if is_small else "large"]
    source = "CIFAR-10-C, as the pictures are small" if is_small else "ImageNet-C"
    suite = read_suite({"name": "corruptions", "members": members})
    return SuiteDefinition(suite.name, suite.members, (f"Severities 1 to 5 are those of {source}.",))
