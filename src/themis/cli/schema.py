"""The JSON Schema of a command's configuration file, with which editors complete and check it."""

from __future__ import annotations

import argparse
from typing import Any

from themis.cli.options import NOT_IN_A_FILE, bare_kind, kind_of

TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": ["string", "number"]},
    bool: {"type": "boolean"},
    list[int]: {"type": ["array", "string", "integer"], "items": {"type": "integer"}},
    list[float]: {"type": ["array", "string", "number"], "items": {"type": "number"}},
    list[str]: {"type": ["array", "string", "number"], "items": {"type": ["string", "number"]}},
    tuple[float, float]: {
        "type": ["array", "string"],
        "items": {"type": "number"},
        "minItems": 2,
        "maxItems": 2,
    },
}
"""The values that a file may give for an option of a type; a list may also be written as the text `a,b`."""


def describe_options(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The schema of the options that `--config` reads for the command of a parser."""
    properties = {}
    for action in parser._actions:
        is_kept = not action.option_strings or action.default != argparse.SUPPRESS  # --help and the like are not
        if is_kept and action.dest not in NOT_IN_A_FILE:
            properties[action.dest] = _describe(action)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Options of {parser.prog}",
        "description": f"A YAML file for {parser.prog} --config.",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _describe(action: argparse.Action) -> dict[str, Any]:
    kind, is_optional = bare_kind(kind_of(action))
    described = dict(TYPES[kind])
    if is_optional:
        types = described["type"]
        described["type"] = [*(types if isinstance(types, list) else [types]), "null"]
    described["description"] = str(action.help).replace("%%", "%")
    default = False if kind is bool and action.default is None else action.default
    if default not in (None, argparse.SUPPRESS):
        described["default"] = list(default) if isinstance(default, tuple) else default
    return described
