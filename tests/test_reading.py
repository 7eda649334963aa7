"""Files that are no files, data that is too deep, and values of another form are refused with a short reason."""

import math
import os
import re

import pytest
from fuzzing import time_limit

from themis.reading import (
    all_of,
    anything,
    check_form,
    either,
    flag,
    items,
    number,
    one_of,
    open_regular,
    optional,
    parse_json,
    parse_yaml,
    read_regular,
    record,
    text,
    values_of,
    whole,
)


def test_only_regular_files_are_opened(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"content"
    with time_limit(30):
        for name, kind in {"pipe": "a pipe", "device": "a device", "": "a folder"}.items():
            with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
                open_regular(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "nowhere")


def test_files_have_a_largest_size(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert read_regular(tmp_path / "file", 100) == b"x" * 100
    with pytest.raises(OSError, match="it has more than 99 bytes"):
        read_regular(tmp_path / "file", 99)
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_regular(tmp_path / "sparse", 1000)


def test_json_has_limits():
    assert parse_json('{"a": [1, 2.5, null, "é"]}') == {"a": [1, 2.5, None, "é"]}
    assert math.isnan(parse_json("[NaN]", has_nan=True)[0])
    for content, reason in {
        "[" * 100_000: "more than 40 levels",
        "[" * 50 + "]" * 50: "more than 40 levels",
        "[NaN]": "NaN is not a number in JSON",
        "[Infinity]": "Infinity is not a number in JSON",
        '["\\ud800"]': "not valid Unicode",
        '{"\\ud800": 1}': "not valid Unicode",
        "{": "Expecting property name",
        b"\xff\xff\xff\xff": "codec can't decode",
    }.items():
        with pytest.raises(ValueError, match=reason):
            parse_json(content)


def test_yaml_has_no_aliases():
    assert parse_yaml("a: [1, 2]\nb: {c: text}") == {"a": [1, 2], "b": {"c": "text"}}
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 60))
    with time_limit(30):
        for content, reason in {
            bomb: "aliases are not allowed",
            "a: &a [*a]": "aliases are not allowed",
            "max_tests: 5\nmax_tests: 6": "line 2: max_tests is given twice",
            "[" * 50 + "]" * 50: "more than 40 levels",
            "[" * 5000: "more than 40 levels",
            "a: " + "1:" * 400 + "1.5": "a number that is too large",
            "a: 1\nb: c: d": "^line 2: mapping values are not allowed here$",
        }.items():
            with pytest.raises(ValueError, match=reason):
                parse_yaml(content)


@pytest.mark.parametrize(
    ("value", "form", "message"),
    [
        (1.5, whole(), "its content must be a whole number from 0, got 1.5"),
        (True, whole(), "must be a whole number from 0, got True"),
        (-1, whole(), "must be a whole number from 0, got -1"),
        (7, whole(1, 5), "must be a whole number from 1 to 5, got 7"),
        ("1", number(), "must be a finite number, got '1'"),
        (math.nan, number(), "must be a finite number, got nan"),
        (10**400, number(), "must be a finite number, got 1000"),
        (2, number(0, 1), "must be a finite number from 0 to 1, got 2"),
        (3, text(), "must be text, got 3"),
        ("long", text(3), "must be text of at most 3 characters, got 'long'"),
        ("../a", text(9, r"\d+", "digits"), "must be digits, got '../a'"),
        (1, flag, "must be true or false, got 1"),
        ("c", one_of("a", "b"), "must be one of a, b, got 'c'"),
        ({}, one_of("a", "b"), "must be one of a, b, got an object"),
        ({}, items(flag), "must be a list, got an object"),
        ([1], items(whole(), 2), "must be a list of 2, got a list of 1"),
        ([1, "a"], items(whole()), "its content[1] must be a whole number from 0, got 'a'"),
        ([], record({}), "must be an object with names and values, got a list of 0"),
        ({"a": 1}, record({"b": whole()}), "its content must have 'b', which is missing"),
        ({"a": {"b": "x"}}, record({"a": record({"b": whole()})}), "its content.a.b must be a whole number"),
        (
            {"a": 1, "c": 2},
            record({"a": whole()}, is_closed=True),
            "must not have 'c', which this version",
        ),
        ({"a": "x"}, record({}, {"a": optional(whole())}), "its content.a must be a whole number"),
        ({"a": "x"}, values_of(whole()), "its content.a must be a whole number"),
        ([], either(whole(), text()), "must be text, got a list of 0"),
        (11, all_of(whole(), whole(0, 10)), "must be a whole number from 0 to 10, got 11"),
        ("x" * 100, whole(), f"got '{'x' * 56}..."),
    ],
)
def test_a_value_of_another_form_is_refused(value, form, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_form(value, form)


def test_a_value_of_the_form_is_returned():
    form = record({"a": optional(items(number(), 2)), "b": either(flag, text())}, {"c": anything})
    for value in ({"a": None, "b": True}, {"a": [0, 1.5], "b": "x", "c": {"d": [1]}, "e": 0}):
        assert check_form(value, form) is value
