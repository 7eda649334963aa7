"""The table of criteria, and criteria in words: `kmnc`, `kmnc(k=100, variant=mindarmour)`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from inspect import signature
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from themis.criteria.boundary import NBC, SNAC
from themis.criteria.cc import CC
from themis.criteria.criterion import Common, Criterion
from themis.criteria.dsa import DSA
from themis.criteria.idc import IDC
from themis.criteria.kmnc import KMNC
from themis.criteria.lsa import LSA
from themis.criteria.mcdc import MCDC
from themis.criteria.mdsa import MDSA
from themis.criteria.nc import NC
from themis.criteria.nlc import NLC
from themis.criteria.npc import NPC
from themis.criteria.scc import SCC
from themis.criteria.topk import TKNC, TKNP
from themis.criteria.tway import TWay
from themis.errors import UsageError, nearest

KINDS: tuple[type[Criterion], ...] = (
    *(NC, KMNC, NBC, SNAC, TKNC, TKNP),
    *(IDC, LSA, DSA, MDSA),
    *(NLC, CC, SCC),
    *(NPC, MCDC, TWay),
)
CRITERIA: dict[str, type[Criterion]] = {each.name: each for each in KINDS}

ALIASES = {"lsc": "lsa", "dsc": "dsa"}
"""Other names of some, by which they are known too."""
PAPER = {"nc": "nc(threshold=0.5)", "kmnc": "kmnc(k=1000)", "idc": "idc(m=12)", "lsa": "lsa(upper=2000)"}
"""The baselines of the paper at its settings."""
COMMA = re.compile(r",(?![^\[]*\])")
"""One that stands in no list."""
WORDS = re.compile(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", re.DOTALL)


def choose_criterion(criterion: str | Criterion) -> Criterion:
    """A criterion in words, not yet fitted, or as it is."""
    if isinstance(criterion, Criterion):
        return criterion
    match = WORDS.fullmatch(criterion) if isinstance(criterion, str) else None
    if match is None:
        raise UsageError(
            f"criterion must be a name with its options in brackets if need be, got {criterion!r}: write for instance "
            "kmnc(k=100)"
        )
    name = ALIASES.get(match[1].lower(), match[1].lower())
    if name not in CRITERIA:
        raise UsageError(f"criterion must be a known name, got {match[1]!r}: {nearest(name, CRITERIA)}")
    kind, options = CRITERIA[name], _read_options(match[2] or "", name)
    hints = get_type_hints(kind.__init__) | get_type_hints(Common)
    known = [each for each in signature(kind).parameters if each not in ("common", "relevance")]
    known += list(Common.__annotations__)
    for option, value in options.items():
        if option not in known:
            raise UsageError(f"{name}: unknown option {option!r}: {nearest(option, known)}")
        options[option] = _as_asked(f"{name}: {option}", value, hints[option])
    return kind(**options)


def _read_options(text: str, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(str.strip, COMMA.split(text)):
        option, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise UsageError(f"{name}: options must be NAME=VALUE, got {part.strip()!r}")
        if option.strip() in options:
            raise UsageError(f"{name}: each option must be given once, got {option.strip()!r} twice")
        options[option.strip()] = _read_value(value.strip())
    return options


def _as_asked(what: str, value: Any, hint: Any) -> Any:
    """A value as the type hint of its option asks."""
    kinds = get_args(hint) or (hint,)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None and NoneType in kinds:
        return None
    if int in kinds:
        if is_number and value == int(value):
            return int(value)
        raise UsageError(f"{what} must be a whole number, got {value!r}")
    if float in kinds:
        if is_number:
            return float(value)
        raise UsageError(f"{what} must be a number, got {value!r}")
    if isinstance(value, list) and not any(get_origin(each) is Sequence for each in kinds):
        raise UsageError(f"{what} must be a word, got a list")
    return value if isinstance(value, list) else str(value)


def _read_value(text: str) -> Any:
    """A literal, a list of these, or the text itself."""
    if text[0] == "[" and text[-1] == "]":
        return [_read_value(each.strip()) for each in text[1:-1].split(",") if each.strip()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
