"""Configuration files: what is printed is read again as it was."""

import pytest

from themis.cli import COMMANDS, configure_parser
from themis.cli.options import NOT_CONFIG_OPTIONS, VALUE_KINDS, Option, Parser, as_yaml, bare_kind, parse
from themis.plugins import added

WORDS = {
    int: "7",
    float: "0.25",
    str: "some: text # with signs",
    list[int]: "2,0,1",
    list[float]: "0.5,0.2,0.3",
    list[str]: "one,2",
    tuple[float, float]: "-1,1",
}
"""A value of each type as a flag gives it; null and quotes are in the nature of YAML."""
OWN = {"policy": "random", "judge": "gibbs", "scale": "relative", "preset": "paper", "uniform_share": "0.5"}


def parser_of(command):
    parser = Parser(prog=f"themis {command}")
    configure_parser(parser, command)
    return parser


CONFIGURED = [
    name for name in (*COMMANDS, *added("themis.commands")) if "--config" in parser_of(name)._option_string_actions
]


def options_of(command):
    return [action for action in parser_of(command)._actions if isinstance(action, Option)]


def test_the_commands_with_a_file_are_known():
    assert set(CONFIGURED) >= {"run", "check", "compare"}


@pytest.mark.parametrize("command", CONFIGURED)
def test_every_option_survives_being_printed_and_read(command, tmp_path, capsys):
    for action in options_of(command):
        kind, _ = bare_kind(action.kind)
        flag, value = action.option_strings[0], OWN.get(action.dest, WORDS[kind])
        given = parse(parser_of(command), [flag, value, "--print-config"])
        (tmp_path / "printed.yaml").write_text(as_yaml(vars(given)))
        again = parse(parser_of(command), ["--config", str(tmp_path / "printed.yaml"), "--print-config"])
        before, after = ({k: v for k, v in vars(n).items() if k not in NOT_CONFIG_OPTIONS} for n in (given, again))
        assert before == after, flag


def test_every_kind_of_option_has_a_sample():
    assert len(VALUE_KINDS) == len(WORDS) + 1  # a flag that can only be switched on takes no value
