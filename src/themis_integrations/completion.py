"""Print a script that completes options in the shell. It completes commands, file names and known names as well. Load
it from the start-up file of your shell.

echo 'eval "$(themis completion bash)"' >> ~/.bashrc
themis completion zsh > ~/.zsh/_themis    (a folder in fpath)
"""

import json
from importlib.resources import files
from typing import Any

from themis.cli import DONE, configure_parser, summaries
from themis.cli.options import CommandLine, Parser
from themis.errors import UsageError, nearest, needs_extra
from themis.plugins import added
from themis.text import print_text

NAMES: dict[str, list[str]] = json.loads((files("themis_integrations") / "completion.json").read_text("utf-8"))
"""The names that an option accepts. They are in a file because importing their tables would load torch."""
NAMES["policy"] += added("themis.policies")
FILES, FOLDERS = ("FILE",), ("FOLDER", "RUN", "RUN_A", "RUN_B", "SUITE")
"""Placeholders in the help for paths."""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("shell", metavar="SHELL", help="bash, zsh or tcsh")


def execute(arguments: CommandLine) -> int:
    with needs_extra("completion", "completion needs shtab"):
        import shtab
    if arguments.shell not in shtab.SUPPORTED_SHELLS:
        known = nearest(arguments.shell, shtab.SUPPORTED_SHELLS)
        raise UsageError(f"unknown shell {arguments.shell!r}: {known}")
    print_text(shtab.complete(_parser_of_all_commands(shtab), arguments.shell))
    return DONE


def _parser_of_all_commands(shtab: Any) -> Parser:
    """A parser of every command, whose options know how they are completed."""
    parser = Parser(prog="themis")
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers()
    for name, text in summaries().items():
        command = commands.add_parser(name, help=text)
        configure_parser(command, name)
        for action in command._actions:
            _set_completion(action, shtab)
    return parser


def _set_completion(action: Any, shtab: Any) -> None:
    if action.metavar in FILES:
        action.complete = shtab.FILE
    elif action.metavar in FOLDERS:
        action.complete = shtab.DIRECTORY
    elif action.metavar == "SHELL":
        action.choices = shtab.SUPPORTED_SHELLS
    elif action.dest in NAMES:
        action.choices = NAMES[action.dest]
