"""Flags and files from dataclasses: what a user may write, and what becomes of it."""

from dataclasses import asdict, dataclass, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from themis.cli import fill, run
from themis.cli.options import Parser, add_config, add_fields, add_option, as_yaml, chosen, parse
from themis.errors import UsageError
from themis.options import option
from themis.runs.source import Origin
from themis.settings import Settings

NEEDED = "--model mine:net --data mine:data --perturb gaussian"


def parser_of_run() -> Parser:
    parser = Parser(prog="themis run")
    fill(parser, "run")
    return parser


def read(text: str):
    return parse(parser_of_run(), text.split())


def test_every_option_of_origin_and_settings_has_a_flag_that_shows_its_default():
    text = " ".join(parser_of_run().format_help().split())
    for each in (*fields(Origin), *fields(Settings)):
        assert f"--{each.name.replace('_', '-')} " in text
        assert each.metadata["help"] in text
    assert "stop after this many tests; null is no limit (default: 20000)" in text
    assert "range of a raw input, as 0,255 (default: 0,1)" in text
    assert "(default: 0.0005)" in text


def test_only_what_is_given_is_said():
    arguments, said = read(f"{NEEDED} --max-tests null --layers fc1 --quiet")
    assert said == {"model", "data", "perturb", "max_tests", "layers", "quiet"}
    assert arguments.max_tests is None
    assert arguments.quiet is True
    assert arguments.json is False
    assert chosen(arguments, Settings, said) == {"max_tests": None}
    assert {name: getattr(arguments, name) for name in ("plateau", "bounds")} == {"plateau": 20, "bounds": (0.0, 1.0)}


def test_negative_numbers_are_values():
    assert read(f"{NEEDED} --bounds -1,1 --mean -.5,2")[0].bounds == (-1.0, 1.0)


def test_a_file_says_the_same_names_and_flags_override_it(tmp_path):
    path = tmp_path / "campaign.yaml"
    path.write_text(
        "model: mine:net\ndata: mine:data\nperturb: fgsm\nmax-tests: 1e3\ntolerance: 1e-3\nlayers: [1, fc]\n"
        "json: true\nmean: 0.5\nout: null\n"
    )
    arguments, said = read(f"--config {path} --perturb gaussian")
    assert arguments.perturb == "gaussian"
    assert (arguments.max_tests, arguments.tolerance, arguments.layers) == (1000, 0.001, ["1", "fc"])
    assert (arguments.mean, arguments.json, arguments.out) == ([0.5], True, None)
    names = {"model", "data", "perturb", "max_tests", "tolerance", "layers", "json", "mean", "out"}
    assert said == {*names, "config"}


def test_an_empty_file_says_nothing(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read(f"{NEEDED} --config {tmp_path / 'empty.yaml'}")[1] == {"model", "data", "perturb", "config"}


@pytest.mark.parametrize("words", ["", NEEDED, f"{NEEDED} --preset paper --max-tests 50 --layers 1,2 --bounds -1,1"])
def test_the_printed_configuration_reads_back_as_it_was(words, tmp_path, capsys):
    path = tmp_path / "printed.yaml"
    printed = []
    for text in (words, f"--config {path}"):
        arguments, said = read(f"{text} --print-config")
        assert run.execute(arguments, said) == 0
        printed.append(capsys.readouterr().out)
        path.write_text(printed[-1])
    assert printed[0] == printed[1]
    if words:
        first, again = (Settings.of(**chosen(*_swap(read(text)))) for text in (words, f"--config {path}"))
        assert asdict(first) == asdict(again)


def _swap(parsed):
    arguments, said = parsed
    return arguments, Settings, said


text = st.text(min_size=1).filter(lambda each: each.isprintable() and each.lower() not in ("null", "none"))
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
    arguments, said = parse(parser, ["--config", str(path)])
    assert Everything(**chosen(arguments, Everything, said)) == value


def test_another_command_takes_some_of_the_options_in_a_few_lines(capsys):
    parser = Parser(prog="themis other")
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--limit", type=int, default=20, help="rows")
    add_fields(parser.add_argument_group("when to stop"), Settings, only=("max_tests",), shows_default=False)
    add_option(parser, "share", float, 0.5, "50% of it", is_needed=False)
    parser.describe_usage()
    arguments, said = parse(parser, ["runs/a", "--max-tests", "5", "--limit", "3"])
    assert vars(arguments) == {"run": "runs/a", "limit": 3, "max_tests": 5, "share": 0.5}
    assert said == {"run", "limit", "max_tests"}
    assert parse(parser, ["runs/a"])[0].limit == 20
    help = parser.format_help()
    assert help.startswith("usage: themis other RUN [options]\n")
    assert "50% of it (default: 0.5)" in help
    assert "default: 20000" not in help


def test_abbreviations_are_not_taken():
    with pytest.raises(UsageError, match=r"^unknown option --max-t: did you mean --max-tests\?$"):
        read(f"{NEEDED} --max-t 5")


@pytest.mark.parametrize("value", [None, float("inf"), float("nan"), 100.5, True, "many"])
def test_a_count_must_be_a_whole_number(value):
    with pytest.raises(UsageError, match=r"^draws must be a (whole )?number, got "):
        Settings.of(draws=value)
