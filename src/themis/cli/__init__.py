"""The command line. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

DONE, BAD_USAGE, RUN_FAILED, INTERRUPTED = 0, 2, 3, 130
"""Exit codes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from jsonargparse import ArgumentParser

    from themis.cli import demo, run
    from themis.errors import ThemisError, UsageError
    from themis.version import __version__

    parser = ArgumentParser(
        prog="themis",
        description="Tests deep-learning models: finds the inputs that break them, and says how much was covered.",
        version=f"themis {__version__}",
    )
    commands = parser.add_subcommands(required=True, metavar="COMMAND")
    modules: dict[str, Any] = {"demo": demo, "run": run}
    for name, module in modules.items():
        commands.add_subcommand(name, module.make_parser(), help=module.HELP)
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(words)
    name = arguments.subcommand
    said = set(parser.parse_args(words, defaults=False)[name].keys())  # what a preset must not change
    try:
        return int(modules[name].execute(arguments[name], said))
    except ThemisError as error:
        print(f"themis {name}: {error}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, UsageError) else RUN_FAILED
    except KeyboardInterrupt:
        print(f"themis {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
