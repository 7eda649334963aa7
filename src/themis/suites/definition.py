"""What a suite tests: its members, each a perturbation with its range, its weight and the levels it is graded at."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from themis.errors import UsageError, nearest
from themis.perturb import Perturbation, choose_perturbation
from themis.perturb.perturbation import check_fits
from themis.reading import read_yaml
from themis.suites.levels import Level, read_levels

MEMBER_KEYS = ("perturb", "name", "magnitude", "magnitudes", "weight", "max_tests", "levels", "note")
SUITE_KEYS = ("name", "members", "levels")
UNNAMED = "suite"
"""Name of a suite that the user has not named."""
MAX_MEMBERS = 500
EXAMPLE = "members: [fog, {perturb: gaussian, magnitude: 0.2, weight: 2}]"


@dataclass(frozen=True)
class SuiteMember:
    """A perturbation of a suite: it gets a campaign in a folder of its name."""

    name: str
    perturbation: Perturbation
    """With its range at the magnitude."""
    magnitude: float | None = None
    weight: float = 1.0
    """Its part of the budget that is divided before the rest goes where faults and uncertainty are."""
    max_tests: int | None = None
    """The most tests that it may have."""
    levels: tuple[Level, ...] = ()
    note: str = ""
    """What a reader should know, such as how close it is to a published corruption."""

    def plain(self) -> dict[str, Any]:
        """The member as a YAML file has it."""
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
    notes: tuple[str, ...] = field(default=())

    def fitted(self, shape: tuple[int, ...]) -> SuiteDefinition:
        """The suite with ranges of theta for inputs `[...]` of this shape."""
        members = (replace(member, perturbation=member.perturbation.fitted(shape)) for member in self.members)
        return replace(self, members=tuple(members))

    def plain(self) -> dict[str, Any]:
        """The definition as a YAML file has it."""
        return {"name": self.name, "members": [member.plain() for member in self.members]}


def read_suite(source: Any, *, imports: bool = True) -> SuiteDefinition:
    """The suite of a file, a dict as in a file, or a list of perturbations.

    imports: whether modules of the user's own may be imported.
    """
    if isinstance(source, Path):
        return _read_mapping(_read_file(source), str(source), imports=imports)
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


def leave_out_unfitting(suite: SuiteDefinition, shape: tuple[int, ...]) -> SuiteDefinition:
    """A named suite without the members that cannot disturb inputs of this shape; its notes say which."""
    fitting, notes = [], []
    for member in suite.members:
        try:
            check_fits(member.perturbation, shape)
            fitting.append(member)
        except UsageError as error:
            notes.append(f"Left out: {str(error).partition(': ')[0]}.")
    if not fitting:
        raise UsageError(
            f"suite {suite.name!r} must have a perturbation for inputs {list(shape)}, but none of its "
            f"{len(suite.members)} fits: choose another suite, or name perturbations with --perturb"
        )
    return SuiteDefinition(suite.name, tuple(fitting), (*suite.notes, *notes))


def _read_file(path: Path) -> Mapping[str, Any]:
    try:
        content = read_yaml(path)
    except FileNotFoundError:
        raise UsageError(f"the suite must be a name or an existing YAML file, but {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} must be valid YAML: {error}") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} must have members, got a {type(content).__name__}: write {EXAMPLE}")
    return content


def suite_title(name: str) -> str:
    """How a suite is called in a heading."""
    return "Suite" if name == UNNAMED else f"Suite {name}"


def _read_mapping(content: Mapping[Any, Any], place: str, *, imports: bool) -> SuiteDefinition:
    _check_keys(content, SUITE_KEYS, place)
    entries = content.get("members")
    if isinstance(entries, str) or not isinstance(entries, Sequence) or not entries:
        raise UsageError(f"{place} must have a list of members, got {entries!r}: write {EXAMPLE}")
    levels = read_levels(content.get("levels"), f"levels of {place}")
    members: list[SuiteMember] = []
    for k, entry in enumerate(entries):
        members += _read_entry(entry, f"member {k + 1} of {place}", levels, imports=imports)
    if len(members) > MAX_MEMBERS:
        raise UsageError(f"{place} must have at most {MAX_MEMBERS} members, got {len(members):,}: split it")
    name = content.get("name", UNNAMED)
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"name of {place} must be text, got {name!r}: write name: street")
    return SuiteDefinition(name.strip(), tuple(_named_apart(members)))


def _read_entry(entry: Any, place: str, levels: tuple[Level, ...], *, imports: bool) -> list[SuiteMember]:
    """The members of an entry: one for each of its magnitudes."""
    if isinstance(entry, str | Perturbation):
        entry = {"perturb": entry}
    if not isinstance(entry, Mapping):
        raise UsageError(f"{place} must be a perturbation or a dict with one, got {entry!r}: write fog")
    _check_keys(entry, MEMBER_KEYS, place)
    spec = entry.get("perturb")
    if not isinstance(spec, str | Perturbation) or not spec:
        raise UsageError(f"{place} must name its perturbation, got {spec!r}: write perturb: fog")
    weight, max_tests = entry.get("weight", 1.0), entry.get("max_tests")
    if not _is_number(weight) or not 0 < weight < 1e6:
        raise UsageError(f"weight of {place} must be a positive number, got {weight!r}: 1 is the usual weight")
    if max_tests is not None and (not isinstance(max_tests, int) or isinstance(max_tests, bool) or max_tests < 1):
        raise UsageError(f"max_tests of {place} must be a whole number of at least 1, got {max_tests!r}")
    if "levels" in entry:
        levels = read_levels(entry["levels"], f"levels of {place}")
    note = entry.get("note", "")
    if not isinstance(note, str):
        raise UsageError(f"note of {place} must be text, got {note!r}")
    members = []
    for magnitude in _read_magnitudes(entry, place):
        try:
            chosen = choose_perturbation(spec, magnitude, imports=imports)
        except UsageError as error:
            raise UsageError(f"{place}: {error}") from None
        for k, level in enumerate(levels):
            level.check(chosen, f"levels[{k}] of {place}")
        name = entry.get("name") or _short_name(chosen.name, magnitude)
        if not isinstance(name, str):
            raise UsageError(f"name of {place} must be text, got {name!r}")
        members.append(SuiteMember(_folder_name(name), chosen, magnitude, float(weight), max_tests, levels, note))
    return members


def _read_magnitudes(entry: Mapping[str, Any], place: str) -> list[float | None]:
    if "magnitude" in entry and "magnitudes" in entry:
        raise UsageError(f"{place} must have magnitude or magnitudes, got both: keep one")
    values = entry.get("magnitudes", [entry.get("magnitude")])
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UsageError(f"magnitudes of {place} must be a list such as [0.1, 0.2], got {values!r}")
    for value in values:
        if value is not None and (not _is_number(value) or value <= 0):
            raise UsageError(f"magnitude of {place} must be a positive number, got {value!r}")
    return [None if value is None else float(value) for value in values]


def _check_keys(content: Mapping[Any, Any], known: Sequence[str], place: str) -> None:
    for key in content:
        if key not in known:
            raise UsageError(f"{place} must not have {key!r}: {nearest(str(key), known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short_name(name: str, magnitude: float | None) -> str:
    """A name for a folder: that of the perturbation without its ranges, and the magnitude."""
    plain = re.sub(r"\([^()]*\)", "", name)
    return plain if magnitude is None else f"{plain}-{magnitude:g}"


def _folder_name(name: str) -> str:
    """A name that every file system accepts."""
    plain = re.sub(r"[^\w.-]+", "_", name.strip()).strip("._-")[:80]
    return plain.lower() or "member"


def _named_apart(members: list[SuiteMember]) -> list[SuiteMember]:
    """The members with a number after each name that occurs twice."""
    counts = Counter(member.name for member in members)
    used: Counter[str] = Counter()
    taken = set(counts)
    apart = []
    for member in members:
        if counts[member.name] > 1:
            used[member.name] += 1
            name = f"{member.name}-{used[member.name]}"
            while name in taken:
                used[member.name] += 1
                name = f"{member.name}-{used[member.name]}"
            taken.add(name)
            member = replace(member, name=name)
        apart.append(member)
    return apart
