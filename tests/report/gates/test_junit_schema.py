"""The checker of JUnit files: it accepts files that conform to the schemas and names the rules that others violate."""

import pytest
from junit_schema import complaints

GOOD = """<testsuites><testsuite package="p" id="0" name="n" timestamp="2026-01-02T03:04:05" hostname="h" tests="2"
 failures="1" errors="0" time="1.500"><properties><property name="a" value=""/></properties>
<testcase name="x" classname="c" time="1.5"/>
<testcase name="y" classname="c" time="0"><failure type="T" message="m">text</failure></testcase>
<system-out/><system-err/></testsuite></testsuites>"""


def said(tmp_path, text):
    (tmp_path / "x.xml").write_text(text)
    return complaints(tmp_path / "x.xml")


def test_a_good_file_has_no_complaint(tmp_path):
    assert said(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (' hostname="h"', "", "testsuite lacks hostname"),
        ('tests="2"', 'tests="3"', "tests is 3, there are 2"),
        ('failures="1"', 'failures="0"', "failures is 0, there are 1"),
        ("2026-01-02T03:04:05", "2026-01-02T03:04:05Z", "testsuite has timestamp='2026-01-02T03:04:05Z'"),
        ('time="1.500"', 'time="9.000"', "the cases' times do not add up to 9.000"),
        ('time="1.5"', 'time="1.5e0"', "testcase has time='1.5e0'"),
        ("<system-out/><system-err/>", "<system-err/><system-out/>", "testsuite has the children"),
        ('<failure type="T"', "<failure", "failure lacks type"),
        ('name="y"', 'name="x"', "two cases have one name"),
        ('id="0"', 'id="1"', "suites have the ids ['1']"),
        ("<system-out/>", "<note/><system-out/>", "note is no element of the schemas"),
    ],
)
def test_a_violated_rule_is_named(before, after, complaint, tmp_path):
    assert GOOD.count(before) == 1
    assert any(line.startswith(complaint) for line in said(tmp_path, GOOD.replace(before, after)))
