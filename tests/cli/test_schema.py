"""Configuration files: what is printed is read again as it was, and the schema allows exactly what is read."""

import json

import pytest
import yaml

from themis.cli import COMMANDS, configure_parser, main
from themis.cli.options import NOT_IN_A_FILE, VALUE_KINDS, Option, Parser, as_yaml, bare_kind, parse, read_config
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
TYPES = {"integer": int, "number": (int, float), "string": str, "boolean": bool, "array": list, "null": type(None)}


def parser_of(command):
    parser = Parser(prog=f"themis {command}")
    configure_parser(parser, command)
    return parser


CONFIGURED = [
    name for name in (*COMMANDS, *added("themis.commands")) if "--config" in parser_of(name)._option_string_actions
]


def schema_of(command, capsys):
    assert main([command, "--print-schema"]) == 0
    return json.loads(capsys.readouterr().out)


def fits(value, rule):
    """Whether a value is one of the types that a property allows."""
    kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
    is_kind = any(
        isinstance(value, TYPES[kind]) and not (isinstance(value, bool) and kind != "boolean") for kind in kinds
    )
    return is_kind and (not isinstance(value, list) or all(fits(item, rule["items"]) for item in value))


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
        before, after = ({k: v for k, v in vars(n).items() if k not in NOT_IN_A_FILE} for n in (given, again))
        assert before == after, flag


@pytest.mark.parametrize("command", CONFIGURED)
def test_what_is_printed_fits_the_schema(command, tmp_path, capsys):
    schema = schema_of(command, capsys)
    assert main([command, "--perturb", "gaussian", "--bounds=-1,1", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert set(printed) == set(schema["properties"]), "every option is in both, and nothing else"
    for name, value in printed.items():
        assert fits(value, schema["properties"][name]), name


@pytest.mark.parametrize("command", CONFIGURED)
def test_the_schema_allows_no_value_that_a_file_may_not_have(command, tmp_path, capsys):
    schema = schema_of(command, capsys)
    actions = {action.dest: action for action in parser_of(command)._actions}
    samples = {"integer": 3, "number": 0.5, "string": None, "boolean": True, "array": None, "null": None}
    for name, rule in schema["properties"].items():
        assert rule["description"]
        for kind in rule["type"] if isinstance(rule["type"], list) else [rule["type"]]:
            if samples[kind] is None and kind != "null":
                continue  # texts and lists have rules that a type cannot express
            (tmp_path / "one.yaml").write_text(yaml.safe_dump({name: samples[kind]}))
            read_config(str(tmp_path / "one.yaml"), actions)
    assert schema["additionalProperties"] is False
    assert len(VALUE_KINDS) == len(WORDS) + 1, "a new kind of option needs a sample here"
