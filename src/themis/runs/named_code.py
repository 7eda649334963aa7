"""What in the record of a run names code: modules that would be imported, and files that would be unpickled.

Built-in perturbations, oracles and models of the zoo, and the readers of plain files, are not such code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def names_code(option: str, value: Any) -> list[str]:
    """The code that the value of an option of `Origin` names, in words; a list may name several."""
    values = [value] if isinstance(value, str) else value or ()
    return [f"{option} {text!r}" for text in map(str, values) if _IS_CODE[option](text)]


def pickled_files(trust: Iterable[str]) -> list[str]:
    """The files that would be unpickled, in words."""
    from themis.target.loaders.trust import MARK

    return [f"the pickled file {str(file).partition(MARK)[0]!r}" for file in trust]


def recorded_code(record: dict[str, Any]) -> list[str]:
    """All the code that the record of a run names, in words."""
    origin, start = record.get("origin") or {}, record.get("start") or {}
    is_zoo = origin.get("zoo") is not None
    options = [name for name in CODE_OPTIONS if not (is_zoo and name == "model")]
    code = [phrase for name in options for phrase in names_code(name, origin.get(name))]
    code += pickled_files(origin.get("trust") or ())
    code += perturbation_code(str(record.get("perturbation")))
    code += [phrase for name in ("oracle_asked", "oracle") for phrase in names_code("oracle", start.get(name))]
    return list(dict.fromkeys(code))


def perturbation_code(spec: str) -> list[str]:
    """The code that the specification of a perturbation names, in words."""
    from themis.perturb import own_perturbations

    return [f"perturbation {name!r}" for name in own_perturbations(spec)]


def _is_model_code(spec: str) -> bool:
    """Whether a model is made by code that its name chooses: a factory, or a package that downloads what it names."""
    from themis.target.loaders import PACKAGES, is_file

    kind = spec.partition(":")[0]
    if kind in PACKAGES:
        return kind != "keras"
    if ":" in spec:
        return True
    from themis.target.loaders import collection

    return not is_file(spec) and spec not in collection().names


def _is_data_code(spec: str) -> bool:
    """Whether data is made by code that its name chooses, or downloaded."""
    from themis.data.readers import OWN_READERS

    name, _, rest = spec.partition(":")
    return name == "hf" if name in OWN_READERS else bool(rest)


def _is_oracle_code(spec: str) -> bool:
    from themis.oracle import is_own_oracle

    return is_own_oracle(spec)


_IS_CODE: dict[str, Callable[[str], bool]] = {
    "model": _is_model_code,
    "data": _is_data_code,
    "train": _is_data_code,
    "rivals": _is_model_code,
    "oracle": _is_oracle_code,
}
CODE_OPTIONS = tuple(_IS_CODE)
"""Options of `Origin` that may name code."""
