"""`themis diff`: versions that live in folders of their own, from another place and process."""

import json
import subprocess
import sys
from pathlib import Path

import averaging_nets
import pytest
import torch
from warm_python import warm_python

from themis.cli import main

MODULE = f"{Path(averaging_nets.__file__).read_text()}\n\ndef data():\n    return seeds()\n"
OPTIONS = ["--data", "versioned:data", "--perturb", "brightness", "--max-tests", "400", "--tolerance", "1e-9"]


def limited(limit):
    """The module with another limit."""
    return MODULE.replace("over=0.5", f"over={limit}")


def campaign(folder, *more, out="run"):
    """Run the model of a folder, as a process that was started there would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        sys.modules.pop("versioned", None)
        words = ["run", "--model", "versioned:Mean", *OPTIONS, "--quiet", "--no-report", "--out", out, *more]
        assert main(words) == 0
    sys.modules.pop("versioned", None)
    return folder / out


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two checkouts, each with a module of the same name."""
    home = tmp_path_factory.mktemp("checkouts")
    for name, limit in (("main", 0.5), ("new", 0.43)):
        (home / name).mkdir()
        (home / name / "versioned.py").write_text(limited(limit))
        campaign(home / name)
    campaign(home / "main", "--policy", "random", out="random")
    return home


def refused(capsys, *words):
    code = main(["diff", *map(str, words)])
    [line] = capsys.readouterr().err.splitlines()
    return code, line


def test_two_checkouts_with_modules_of_the_same_name_are_distinguished(home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [word for name in ("d.md", "d.json") for word in ("--out", name)]
    path, modules = list(sys.path), dict(sys.modules)
    assert main(["diff", str(home / "main/run"), str(home / "new/run"), *files]) == 0
    assert {name: sys.modules[name] for name in modules} == modules
    printed = capsys.readouterr().out
    assert "The model after is worse: fault rate " in printed
    assert "fixed: 0 of " in printed
    found = json.loads((tmp_path / "d.json").read_text())
    assert (found["kind"], found["verdict"]) == ("versions", "worse")
    assert found["before"]["model_sha256"] != found["after"]["model_sha256"]
    assert len(found["new"]) > 0
    page = (tmp_path / "d.md").read_text()
    assert page.startswith("<!-- Written by Themis -->\n\n## Two versions of a model")
    assert f"themis replay {home / 'new/run'} " in page
    assert set(path) <= set(sys.path)


def test_another_process_prints_the_same_result_as_json(home):
    words = ["diff", "main/run", "new/run", "--tests", "500", "--json"]
    done = subprocess.run([warm_python(), "-m", "themis", *words], capture_output=True, text=True, cwd=home)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert (found["verdict"], found["paired"]["tests"]) == ("worse", 500)


def test_two_policies_on_one_model_are_techniques(home, capsys):
    assert main(["diff", str(home / "main/random"), str(home / "main/run")]) == 0
    printed = capsys.readouterr().out
    assert "first" in printed.splitlines()[0]
    assert "distinct faults: " in printed
    assert "themis compare repeats campaigns" in printed


def test_a_changed_model_is_rejected_and_its_old_weights_can_be_named(home, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "moving"
    place.mkdir()
    (place / "versioned.py").write_text(limited(0.5))
    old = campaign(place, out="old")
    (place / "versioned.py").write_text(limited(0.43) + "\n")  # with another size, because caches compare sizes
    new = campaign(place, out="new")
    capsys.readouterr()
    code, line = refused(capsys, old, new)
    assert code == 3
    assert "must be the same as in the run" in line
    assert "--weights-a FILE or --model-a MODEL" in line
    torch.save({"over": torch.tensor(0.5)}, tmp_path / "old.pt")
    words = ["diff", str(old), str(new), "--tests", "300"]
    assert main([*words, "--weights-a", "old.pt"]) == 0
    assert "The model after is worse" in capsys.readouterr().out
    assert main([*words, "--model-a", "versioned:Mean(over=0.5)"]) == 0
    assert "The model after is worse" in capsys.readouterr().out


def test_wrong_uses_are_rejected(home, tmp_path, capsys):
    run = home / "main/run"
    assert refused(capsys, run)[0] == 2
    assert refused(capsys, run, tmp_path)[0] == 2
    code, line = refused(capsys, run, run, "--out", tmp_path / "d.html")
    assert (code, "must end in .md or .json" in line) == (2, True)
    assert "create it first" in refused(capsys, run, run, "--out", tmp_path / "no/d.md")[1]
    assert refused(capsys, run, run, "--kind", "other")[0] == 2
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    (spoilt / "run.sqlite").write_bytes(b"no database" * 100)
    code, line = refused(capsys, run, spoilt)
    assert (code, "cannot be read" in line) == (3, True)
