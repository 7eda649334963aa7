"""Values, as users write them and as they must not."""

import pytest

from themis.cli.values import convert
from themis.errors import UsageError

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
    found = convert("name", written, kind)
    assert found == value
    assert type(found) is type(value)


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
    (list[float], "0.4,,0.5", "numbers as 0.4,0.5,0.4"),
    (list[float], [], "numbers as 0.4,0.5,0.4"),
    (list[str] | None, "[]", "names as conv1,fc* or null"),
    (list[str], [["a"]], "names as conv1,fc*"),
    (tuple[float, float], "1", "two numbers as 0,255"),
    (tuple[float, float], [0, 1, 2], "two numbers as 0,255"),
]


@pytest.mark.parametrize(("kind", "written", "rule"), WRONG_VALUES)
def test_a_wrong_value_is_named_with_its_rule(kind, written, rule):
    with pytest.raises(UsageError) as raised:
        convert("name", written, kind)
    assert str(raised.value) == f"name must be {rule}, got {written!r}"
