"""Arguments that benchmarks share: how much they run, and which rows."""

from __future__ import annotations

import argparse
from typing import Any


def row_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with the shared options."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    add_quick(parser)
    parser.add_argument("--rows", nargs="+", help="glob patterns of the names of rows")
    parser.add_argument("--workers", type=int, default=1, help="number of processes")
    parser.add_argument("--pack", metavar="FILE")
    parser.add_argument("--packed", metavar="FILE")
    return parser


def add_quick(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action=argparse.BooleanOptionalAction, help="a first look in less than a minute; by default on a CPU"
    )


def complete(arguments: argparse.Namespace, quick: dict[str, Any], full: dict[str, Any]) -> argparse.Namespace:
    """Fill in missing options with those of a quick or a full run."""
    is_quick = getattr(arguments, "device", "cpu") == "cpu" if arguments.quick is None else arguments.quick
    if is_quick:
        print("a quick run, too small for reliable figures; --no-quick runs all of it", flush=True)
    for name, value in (quick if is_quick else full).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments
