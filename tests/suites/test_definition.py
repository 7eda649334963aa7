"""Suites in YAML, dicts and lists: what they may say, and what is refused in words."""

import pytest

from themis import UsageError
from themis.suites.definition import SUITES, Level, choose_suite, read_suite

WRONG = {
    "an unknown key": ({"membres": ["fog"]}, "did you mean 'members'"),
    "no members": ({"members": []}, "must have a list of members"),
    "an unknown perturbation": ({"members": ["fogg"]}, "did you mean 'fog'"),
    "an unknown key of a member": ({"members": [{"perturb": "fog", "wieght": 2}]}, "did you mean 'weight'"),
    "no perturbation": ({"members": [{"weight": 2}]}, "must have 'perturb', which is missing"),
    "a weight of 0": (
        {"members": [{"perturb": "fog", "weight": 0}]},
        "member 1 .*weight must be a positive number, got 0",
    ),
    "a budget as text": ({"members": [{"perturb": "fog", "max_tests": "many"}]}, "whole number.* got 'many'"),
    "a negative magnitude": ({"members": [{"perturb": "fog", "magnitude": -1}]}, "positive number, got -1"),
    "an unknown theta": ({"members": [{"perturb": "fog", "levels": [{"densty": 1}]}]}, "did you mean 'density'"),
    "a theta out of range": ({"members": [{"perturb": "gaussian", "levels": [{"sigma": 0.5}]}]}, "widen the range"),
    "a strength above 1": (
        {"members": [{"perturb": "fog", "levels": [1.5]}]},
        "must be a finite number from 0 to 1, got 1.5",
    ),
    "a strength of 0": ({"members": [{"perturb": "fog", "levels": [0]}]}, "must be a positive number, got 0"),
    "levels as text": ({"members": [{"perturb": "fog", "levels": "all"}]}, "must be a list, got 'all'; .* levels: 5"),
    "too many levels": ({"members": ["fog"], "levels": 101}, "must be a list, got 101; write for instance levels: 5"),
    "a range that is turned round": (
        {"members": [{"perturb": "fog", "levels": [{"density": [1, 0]}]}]},
        "density must lie in 0..1.8, the range of .fog., got 1 to 0",
    ),
    "a number": (7, "a suite must be a name, a YAML file, a dict or a list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read_is_refused_in_words(name):
    source, message = WRONG[name]
    with pytest.raises(UsageError, match=message):
        read_suite(source)


def test_a_file_says_the_same_as_a_dict(tmp_path):
    file = tmp_path / "street.yaml"
    file.write_text(
        "name: street\nlevels: 2\nmembers:\n- fog\n"
        "- {perturb: gaussian, magnitude: 0.1}\n"
        "- {perturb: gaussian, magnitude: 0.2, weight: 2, max_tests: 50, levels: [{sigma: 0.05}]}\n"
        "- {perturb: 'rain(angle=-5:5)', name: Drizzle}\n"
    )
    suite = choose_suite(str(file), (3, 32, 32))
    assert [member.name for member in suite.members] == ["fog", "gaussian-0.1", "gaussian-0.2", "drizzle"]
    assert [member.weight for member in suite.members] == [1, 1, 2, 1]
    assert suite.members[0].levels == (Level(0.5), Level(1.0))
    assert suite.members[2].perturbation.theta[0].high == 0.2
    assert read_suite(suite.plain()).members == suite.members  # what is printed can be read again


@pytest.mark.parametrize("content", ["members: [fog", "- fog", "7"])
def test_a_file_that_is_no_suite_is_refused(tmp_path, content):
    file = tmp_path / "bad.yaml"
    file.write_text(content)
    with pytest.raises(UsageError, match=r"bad\.yaml (must|is not)"):
        choose_suite(str(file), (3, 32, 32))


def test_names_that_occur_twice_are_told_apart():
    suite = read_suite(["fog", "fog", "gaussian(sigma=0:0.2)", {"perturb": "snow", "name": "fog-1"}])
    assert [member.name for member in suite.members] == ["fog-2", "fog-3", "gaussian", "fog-1"]


@pytest.mark.parametrize("name", [name for name in SUITES if name not in ("signals", "tables")])
@pytest.mark.parametrize("shape", [(3, 224, 224), (1, 28, 28)])
def test_a_named_suite_fits_pictures(name, shape):
    suite = choose_suite(name, shape)
    assert len({member.name for member in suite.members}) == len(suite.members) >= 4
    assert len(suite.members) == 15 or name != "corruptions"


def test_signals_and_tables_have_suites_of_their_own():
    assert len(choose_suite("signals", (1, 400)).members) >= 5
    assert choose_suite("noise", (1, 400)).name == "noise"
    assert [member.name for member in choose_suite("tables", (12,)).members] == ["edit", "edit_worst", "table_noise"]


def test_a_named_suite_leaves_out_what_does_not_fit_and_says_so():
    grey = choose_suite("camera", (1, 28, 28))
    assert "hue" not in [member.name for member in grey.members]
    assert any("'hue'" in note for note in grey.notes)
    with pytest.raises(UsageError, match="none of its 8 fits"):
        choose_suite("weather", (10,))
    with pytest.raises(UsageError, match="did you mean 'corruptions'"):
        choose_suite("corruption", (3, 32, 32))


@pytest.mark.parametrize("shape", [(3, 224, 224), (3, 32, 32)])
def test_corruptions_get_stronger_with_their_severity(shape):
    """The first theta, measured from its identity; elastic and glass change the kind of distortion instead."""
    suite = choose_suite("corruptions", shape)
    assert len(suite.members) == 15
    for member in suite.members:
        assert len(member.levels) == 5
        name, _ = member.levels[0].theta[0]
        [theta] = [theta for theta in member.perturbation.theta if theta.name == name]
        reach = [abs(level.theta[0][1] - theta.identity) for level in member.levels]
        assert reach == sorted(reach) or member.name == "elastic_transform"
        assert theta.identity + reach[-1] in (theta.high, 2 * theta.identity - theta.low) or reach != sorted(reach)
        assert member.note.startswith(("same:", "close:", "substitute:"))
