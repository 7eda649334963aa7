"""Two techniques on one model, and what a difference looks like as text."""

import json

import pytest
from averaging_nets import Mean, seeds

import themis
from themis.errors import DataError
from themis.runs.analysis.diff import code, escape, table


def campaign(policy, out=None, data=None, **options):
    options = {"max_tests": 300, "tolerance": 1e-9, **options}
    return themis.run(Mean(), data or seeds(200), "brightness", policy=policy, out=out, **options)


def test_the_overlap_of_two_techniques(tmp_path):
    random, corners = campaign("random"), campaign("corners")
    found = themis.diff(random, corners)
    assert (found.kind, found.verdict) == ("techniques", "more")
    first, second = ({fault.seed_id for fault in run.faults} for run in (random, corners))
    overlap = found.overlap
    assert (overlap.seeds_both, overlap.seeds_first, overlap.seeds_second) == (
        len(first & second),
        len(first - second),
        len(second - first),
    )
    assert overlap.faults_both + overlap.faults_first == found.before["distinct_faults"]
    assert overlap.faults_both + overlap.faults_second == found.after["distinct_faults"]
    assert overlap.p_value < 0.05
    assert "the second broke more (McNemar p = " in found.sentence
    assert themis.diff(corners, random).verdict == "fewer"
    even = themis.diff(random, random)
    assert even.verdict == "even"
    assert even.sentence.endswith("can show (McNemar p = 1, and a difference takes less than 0.02).")
    assert repr(found) == f"<Diff: {found.sentence}>"
    page = found._repr_markdown_()
    assert page.startswith("## Two techniques on one model")
    assert "themis compare repeats campaigns" in page
    plain = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (plain["paired"], plain["overlap"]["seeds_both"]) == (None, overlap.seeds_both)


def test_folders_need_no_model_and_unequal_budgets_are_noted(tmp_path):
    campaign("random", tmp_path / "a")
    campaign("random", tmp_path / "b", max_tests=600)
    found = themis.diff(tmp_path / "a", tmp_path / "b")
    assert found.kind == "techniques"
    assert "the budgets differ: more passes find more faults" in found.notes


def test_unequal_budgets_of_suites_are_noted_once(tmp_path):
    suites = [
        themis.run_suite(Mean(), seeds(60), ["brightness", "contrast"], out=tmp_path / name, max_tests=tests)
        for name, tests in (("a", 200), ("b", 400))
    ]
    assert themis.diff(*suites).lines() == ["brightness, contrast: the budgets differ: more passes find more faults."]


def test_other_data_is_refused():
    with pytest.raises(DataError, match="need the same data"):
        themis.diff(campaign("random"), campaign("random", data=seeds(100)))


def test_markup_in_names_is_shown_as_text():
    assert escape("<script>|`x`|</script>\n# **b**") == r"\<script\>\|\`x\`\|\</script\> \# \*\*b\*\*"
    assert code("a`b") == "``a`b``"
    assert code("`a`") == "`` `a` ``"
    assert table(("a", "b"), [("x|y", "z")]) == ["| a | b |", "|---|---|", r"| x\|y | z |"]
