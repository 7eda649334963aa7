"""The doctor, on this machine and on machines that lack something."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from themis.cli import doctor, main


def test_doctor_lists_what_is_installed_and_runs_a_campaign(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THEMIS_DATA", str(tmp_path / "nowhere"))
    for name in ("THEMIS_CACHE", "THEMIS_STATE"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"torch +{re.escape(torch.__version__)}", printed)
    assert re.search(r"cpu +\d+ cores?, \d+ threads?, [\d.]+ GiB free", printed)
    assert re.search(r"THEMIS_DATA +\S+/nowhere, which does not exist", printed)
    assert re.search(r"THEMIS_CACHE +not set: ", printed)
    assert re.search(r"THEMIS_STATE +not set: the key that signs your runs is in ", printed)
    assert re.search(rf"runs +{tmp_path}/runs, [\d.]+ GiB free", printed)
    assert re.search(r"cpu +640 tests, \d+ faults and one replay in", printed)
    assert list(tmp_path.iterdir()) == []


def test_doctor_can_print_json_and_skip_the_campaign(capsys):
    assert main(["doctor", "--json", "--quick"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["self-check"] == {}
    assert found["problems"] == []
    assert f"{torch.get_num_threads()} thread" in found["devices"]["cpu"]
    assert found["devices"]["C library"].startswith(("in use", "not built"))


def test_a_missing_optional_package_is_named_with_its_extra(monkeypatch, capsys):
    there = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "pymc" else there(name))
    assert main(["doctor", "--quick"]) == 0
    assert re.search(r'pymc +not installed: pip install "themis-dl\[bayes\]"', capsys.readouterr().out)


def test_a_missing_required_package_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "torch" else "1.0")
    assert main(["doctor"]) == 3
    printed = capsys.readouterr()
    assert "not installed: pip install torch" in printed.out
    assert printed.err == "themis doctor: torch is required but not installed: pip install torch\n"


@pytest.mark.parametrize("json_too", [[], ["--json"]])
def test_an_installation_that_does_not_work_is_a_failure(monkeypatch, capsys, json_too):
    def broken(device):
        raise RuntimeError("CUDA error:\nno kernel image")

    monkeypatch.setattr(doctor, "_try_campaign", broken)
    assert main(["doctor", *json_too]) == 3
    printed = capsys.readouterr()
    assert printed.err == "themis doctor: the test campaign failed with RuntimeError: CUDA error: no kernel image\n"
    if json_too:
        assert len(json.loads(printed.out)["problems"]) == 1


def test_doctor_runs_with_only_the_required_packages():
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "mlxtend sklearn pandas PIL pymc shtab pyarrow".split():
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
from themis.cli import main
sys.exit(main(["doctor"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "one replay" in done.stdout


def test_doctor_knows_every_package_of_the_project(capsys):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(doctor.DEVELOPMENT_EXTRAS) < set(extras)
    used = [project["dependencies"], *(extras[name] for name in extras if name not in doctor.DEVELOPMENT_EXTRAS)]
    assert main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["packages"]
    assert set(found) == {re.match(r"[\w-]+", each)[0] for requirements in used for each in requirements}
