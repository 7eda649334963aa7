"""What a fault is: a task's oracle compares a test's output with its seed's, or with the label."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from themis.errors import UsageError, nearest
from themis.oracle.auto import Auto
from themis.oracle.binary import Threshold
from themis.oracle.classes import Changed, Top, Wrong, are_probabilities, confidence
from themis.oracle.compare import Compare
from themis.oracle.multilabel import Multilabel
from themis.oracle.oracle import KEPT, NOT_FINITE, Oracle, Verdict, refuse_argument
from themis.oracle.regression import Regression
from themis.oracle.segmentation import Segmentation

__all__ = [
    "KEPT",
    "NOT_FINITE",
    "ORACLES",
    "Changed",
    "Compare",
    "Multilabel",
    "Oracle",
    "Regression",
    "Segmentation",
    "Threshold",
    "Top",
    "Verdict",
    "Wrong",
    "are_probabilities",
    "choose_oracle",
    "confidence",
]


def _plain(name: str, make: Callable[[], Oracle], text: str) -> Oracle:
    refuse_argument(text, name)
    return make()


ORACLES: dict[str, Callable[[str], Oracle]] = {
    "changed": partial(_plain, "changed", Changed),
    "wrong": partial(_plain, "wrong", Wrong),
    "top5": partial(_plain, "top5", Top),
    "threshold": Threshold.parse,
    "multilabel": Multilabel.parse,
    "regression": Regression.parse,
    "off": Regression.parse_off,
    "segmentation": Segmentation.parse,
}
"""Oracles by name; each is made from what follows the colon, nothing or a number."""


def choose_oracle(oracle: str | Oracle) -> Oracle:
    """The oracle by name: `NAME`, `NAME:NUMBER`, `topK`, `auto` or, for a function of the user's, `module:function`."""
    if isinstance(oracle, Oracle):
        return oracle
    if not isinstance(oracle, str):
        raise UsageError(
            f"oracle must be a name or an Oracle, got {type(oracle).__name__}: wrap a function as Compare(function)"
        )
    name, colon, text = oracle.partition(":")
    if name == "auto":
        return _plain("auto", Auto, text)
    if top := re.fullmatch(r"top([1-9]\d*)", name):
        return _plain(name, partial(Top, int(top[1])), text)
    if name in ORACLES:
        return ORACLES[name](text)
    if colon and all(each.isidentifier() for each in (*name.split("."), *text.split("."))):
        return _imported(name, text)
    known = nearest(name, ["auto", *ORACLES])
    raise UsageError(f"oracle must be a known name or module:function, got {oracle!r}: {known}")


def _imported(name: str, text: str) -> Oracle:
    """A function or an oracle of the user's own."""
    spec = f"{name}:{text}"
    try:
        found: Any = importlib.import_module(name)
        for each in text.split("."):
            found = getattr(found, each)
    except ModuleNotFoundError as error:
        raise UsageError(f"oracle {spec!r}: {error}; {nearest(name, ['auto', *ORACLES])}") from error
    except AttributeError as error:
        module = sys.modules.get(name)
        known = [each for each in vars(module) if not each.startswith("_")] if module else []
        raise UsageError(f"oracle {spec!r}: {error}: {nearest(text, known)}") from error
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is imported
        raise UsageError(
            f"oracle {spec!r}: importing it raised {type(error).__name__}: {(str(error).splitlines() or ['?'])[0]}"
        ) from error
    if isinstance(found, Compare):
        return replace(found, name=spec)
    return found if isinstance(found, Oracle) else Compare(found, spec)
