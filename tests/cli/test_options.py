"""Flags, configuration files and their values, as users write them."""

from dataclasses import asdict, dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.cli import configure_parser, run
from themis.cli.options import (
    Parser,
    add_config,
    add_fields,
    add_option,
    as_yaml,
    convert,
    fields_of,
    parse,
)
from themis.errors import UsageError
from themis.options import option
from themis.runs.source import Origin
from themis.settings import Settings

NEEDED = "--model mine:net --data mine:data --perturb gaussian"


def parser_of_run() -> Parser:
    parser = Parser(prog="themis run")
    configure_parser(parser, "run")
    return parser


def read(text: str):
    return parse(parser_of_run(), text.split())


def test_every_option_of_origin_and_settings_has_a_flag_with_its_default():
    text = " ".join(parser_of_run().format_help().split())
    for field in (*fields(Origin), *fields(Settings)):
        if field.name == "permission":  # not an option
            continue
        assert f"--{field.name.replace('_', '-')} " in text
        assert field.metadata["help"] in text
    assert "stop after this many tests; null sets no limit (default: 20000)" in text
    assert "auto takes that of a table (default: 0,1)" in text
    assert "(default: 0.0005)" in text


def test_only_options_that_were_given_are_explicit():
    arguments = read(f"{NEEDED} --max-tests null --layers fc1 --quiet")
    assert arguments.given.keys() == {"model", "data", "perturb", "max_tests", "layers", "quiet"}
    assert arguments.max_tests is None
    assert arguments.quiet is True
    assert arguments.json is False
    assert fields_of(Settings, arguments.given) == {"max_tests": None}
    assert {name: getattr(arguments, name) for name in ("plateau", "bounds")} == {"plateau": 20, "bounds": (0.0, 1.0)}


def test_negative_numbers_are_values():
    assert read(f"{NEEDED} --bounds -1,1 --mean -.5,2").bounds == (-1.0, 1.0)


def test_a_file_has_the_same_names_and_flags_override_it(tmp_path):
    path = tmp_path / "campaign.yaml"
    path.write_text(
        "model: mine:net\ndata: mine:data\nperturb: fgsm\nmax-tests: 1e3\ntolerance: 1e-3\nlayers: [1, fc]\n"
        "json: true\nmean: 0.5\nout: null\n"
    )
    arguments = read(f"--config {path} --perturb gaussian")
    assert arguments.perturb == "gaussian"
    assert (arguments.max_tests, arguments.tolerance, arguments.layers) == (1000, 0.001, ["1", "fc"])
    assert (arguments.mean, arguments.json, arguments.out) == ([0.5], True, None)
    names = {"model", "data", "perturb", "max_tests", "tolerance", "layers", "json", "mean", "out"}
    assert arguments.given.keys() == {*names, "config"}


def test_an_empty_file_sets_no_options(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read(f"{NEEDED} --config {tmp_path / 'empty.yaml'}").given.keys() == {"model", "data", "perturb", "config"}


@pytest.mark.parametrize("words", ["", NEEDED, f"{NEEDED} --preset paper --max-tests 50 --layers 1,2 --bounds -1,1"])
def test_a_printed_configuration_reads_back_unchanged(words, tmp_path, capsys):
    path = tmp_path / "printed.yaml"
    printed = []
    for text in (words, f"--config {path}"):
        arguments = read(f"{text} --print-config")
        assert run.execute(arguments) == 0
        printed.append(capsys.readouterr().out)
        path.write_text(printed[-1])
    assert printed[0] == printed[1]
    if words:
        first, again = (Settings.of(**fields_of(Settings, read(text).given)) for text in (words, f"--config {path}"))
        assert asdict(first) == asdict(again)


text = st.text(min_size=1).filter(lambda written: written.isprintable() and written.lower() not in ("null", "none"))
number = st.floats(allow_nan=False, allow_infinity=False)


@dataclass(frozen=True)
class Everything:
    """A field of each type."""

    count: int | None = option(None, "a count")
    share: float = option(0.5, "a share, 50% by default")
    name: str = option("a", "a name")
    means: list[float] | None = option(None, "some numbers")
    names: list[str] | None = option(None, "some names")
    bounds: tuple[float, float] = option((0.0, 1.0), "two numbers")


@given(
    st.builds(
        Everything,
        count=st.none() | st.integers(),
        share=number,
        name=text,
        means=st.none() | st.lists(number, min_size=1),
        names=st.none() | st.lists(text, min_size=1),
        bounds=st.tuples(number, number),
    )
)
def test_whatever_is_written_as_yaml_reads_back(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "everything.yaml"
    path.write_text(as_yaml(asdict(value)), encoding="utf-8")
    parser = Parser(prog="themis any")
    add_config(parser)
    add_fields(parser, Everything)
    arguments = parse(parser, ["--config", str(path)])
    assert Everything(**fields_of(Everything, arguments.given)) == value


def test_another_command_can_take_some_of_the_options(capsys):
    parser = Parser(prog="themis other")
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--limit", type=int, default=20, help="rows")
    add_fields(parser.add_argument_group("when to stop"), Settings, only=("max_tests",), shows_default=False)
    add_option(parser, "share", float, 0.5, "50% of it")
    parser.describe_usage()
    arguments = parse(parser, ["runs/a", "--max-tests", "5", "--limit", "3"])
    values = {name: getattr(arguments, name) for name in ("run", "limit", "max_tests", "share")}
    assert values == {"run": "runs/a", "limit": 3, "max_tests": 5, "share": 0.5}
    assert arguments.given.keys() == {"run", "limit", "max_tests"}
    assert parse(parser, ["runs/a"]).limit == 20
    help = parser.format_help()
    assert help.startswith("usage: themis other RUN [options]\n")
    assert "50% of it (default: 0.5)" in help
    assert "default: 20000" not in help


def test_abbreviations_are_rejected():
    with pytest.raises(UsageError, match=r"^unknown option --max-t: did you mean --max-tests\?$"):
        read(f"{NEEDED} --max-t 5")


@pytest.mark.parametrize("value", [None, float("inf"), float("nan"), 100.5, True, "many"])
def test_a_count_must_be_a_whole_number(value):
    with pytest.raises(UsageError, match=r"^draws must be a (whole )?number, got "):
        Settings.of(draws=value)


VALUES = [
    (int, "20_000", 20_000),
    (int, "1e4", 10_000),
    (int, 1e4, 10_000),
    (int, str(2**63 - 1), 2**63 - 1),
    (int, "-3", -3),
    (int | None, "null", None),
    (int | None, "None", None),
    (int | None, None, None),
    (float, "1e-3", 0.001),
    (float, 2, 2.0),
    (float | None, "none", None),
    (str, "gaussian", "gaussian"),
    (str, 5, "5"),
    (str | None, "null", None),
    (bool, "true", True),
    (bool, False, False),
    (list[float] | None, "0.4,0.5,0.4", [0.4, 0.5, 0.4]),
    (list[float] | None, "[0.4, 0.5]", [0.4, 0.5]),
    (list[float] | None, [1, "2"], [1.0, 2.0]),
    (list[float] | None, 0.5, [0.5]),
    (list[float] | None, "null", None),
    (list[str] | None, "conv*,fc1", ["conv*", "fc1"]),
    (list[str] | None, "['conv1', \"fc1\"]", ["conv1", "fc1"]),
    (list[str] | None, [1, 3], ["1", "3"]),
    (tuple[float, float], "0,255", (0.0, 255.0)),
    (tuple[float, float], "[-1, 1]", (-1.0, 1.0)),
    (tuple[float, float], [0, 1], (0.0, 1.0)),
]


@pytest.mark.parametrize(("kind", "written", "value"), VALUES)
def test_a_value_is_read_as_a_user_would_write_it(kind, written, value):
    converted = convert("name", written, kind)
    assert converted == value
    assert type(converted) is type(value)


WRONG_VALUES = [
    (int, "abc", "a whole number"),
    (int, "1.5", "a whole number"),
    (int, True, "a whole number"),
    (int, [1], "a whole number"),
    (int | None, "", "a whole number or null"),
    (int, None, "a whole number"),
    (float, "inf", "a number"),
    (float, True, "a number"),
    (str, True, "text"),
    (str, {"a": 1}, "text"),
    (bool, "yes", "true or false"),
    (list[float], "0.4,,0.5", "numbers such as 0.4,0.5,0.4"),
    (list[float], [], "numbers such as 0.4,0.5,0.4"),
    (list[str] | None, "[]", "names such as conv1,fc* or null"),
    (list[str], [["a"]], "names such as conv1,fc*"),
    (tuple[float, float], "1", "two numbers such as 0,255"),
    (tuple[float, float], [0, 1, 2], "two numbers such as 0,255"),
]


@pytest.mark.parametrize(("kind", "written", "rule"), WRONG_VALUES)
def test_the_error_for_a_wrong_value_states_the_rule(kind, written, rule):
    with pytest.raises(UsageError) as raised:
        convert("name", written, kind)
    assert str(raised.value) == f"name must be {rule}, got {written!r}"


def test_a_percentage_is_answered_with_the_share_to_write():
    with pytest.raises(UsageError, match=r"max_fault_rate must be a number or null, got '5%': write 0\.05 for 5%$"):
        convert("max_fault_rate", "5%", float | None)
