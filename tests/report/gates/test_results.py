"""The gates on the page: recorded in the run folder by the commands that check them, and read by the report."""

import json

import pytest
from user_module import SMALL, go_to

import themis
from themis.cli import main
from themis.errors import StoreError
from themis.report.page import read_view
from themis.report.suite import read_suite_view

RUN = ["run", "--model", "mine:net", "--data", "mine:data", "--perturb", "gaussian", "--magnitude", "0.3", "-q"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    return go_to(tmp_path, monkeypatch, SMALL)


def test_the_gates_of_a_run_are_on_its_page_failures_first(here):
    assert main([*RUN, "--max-tests", "300", "--max-fault-rate", "0.001", "--out", "one"]) == 1
    gates = read_view("one").gates
    assert gates["sentence"] == "1 of 2 gates failed: max_fault_rate."
    found = [(row["gate"], row["has_passed"]) for row in gates["rows"]]
    assert found == [("max_fault_rate", False), ("campaign", True)]
    assert "over the limit of 0.1%" in gates["rows"][0]["text"]
    assert gates["sentence"] in (here / "one/report.html").read_text()


def test_a_gate_that_is_checked_later_renews_the_page(here):
    assert main([*RUN, "--max-tests", "300", "--out", "one"]) == 0
    assert read_view("one").gates is None
    assert main(["gate", "one", "--max-fault-rate", "1", "-q"]) == 0
    assert "All 2 gates passed." in (here / "one/report.html").read_text()
    assert main(["resume", "one", "--max-tests", "400", "-q"]) == 0
    assert read_view("one").gates is None  # they were about fewer tests


def test_a_file_of_others_is_neither_replaced_nor_shown(here, capsys):
    assert main([*RUN, "--max-tests", "300", "--out", "one"]) == 0
    (here / "one/gates.json").write_text('{"mine": 1}')
    assert main(["gate", "one", "--max-fault-rate", "1"]) == 0
    assert "could not record the gates in one" in capsys.readouterr().err
    assert json.loads((here / "one/gates.json").read_text()) == {"mine": 1}
    with pytest.raises(StoreError, match="is damaged"):
        read_view("one")


def test_the_verdict_on_a_suite_is_that_of_its_gates(here):
    members = ["--perturb", "gaussian(sigma=0:0.3)", "--perturb", "brightness(shift=0:0.001)"]
    words = ["suite", *members, "--model", "mine:net", "--data", "mine:data", "--max-tests", "400", "--out", "s", "-q"]
    assert main(words) == 0
    assert read_suite_view(themis.open_suite("s"))["gates"] is None
    assert main(["gate", "s", "--max-fault-rate", "0.3", "-q"]) == 1
    view = read_suite_view(themis.open_suite("s"))
    over = [row["name"] for row in view["members"] if row["fault_rate"]["high"] > 0.3]
    assert view["tone"] == "broken"
    assert view["gates"]["sentence"] == "Gates failed under 1 of 2 perturbations: gaussian."
    assert [row["member"] for row in view["gates"]["rows"] if not row["has_passed"]] == over == ["gaussian"]
    assert read_view("s/gaussian").gates["sentence"].startswith("1 of 2 gates failed")
    assert main(["gate", "s", "--max-fault-rate", "1", "-q"]) == 0
    view = read_suite_view(themis.open_suite("s"))
    assert view["tone"] == ""
    assert view["gates"]["sentence"] == "All gates passed under all 2 perturbations."


def test_the_next_step_is_a_command_that_runs(here):
    assert main([*RUN, "--max-tests", "300", "--out", "one"]) == 0
    command = read_view("one").next.command
    assert command.split()[:2] in (["themis", "resume"], ["themis", "shrink"])
    assert main([*command.split()[1:], *(["-q"] if "resume" in command else ["--json"])]) == 0
