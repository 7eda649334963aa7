"""`themis init`: the files that it writes work as they are, and none is ever replaced."""

import re
import shlex
import subprocess

import pytest
import yaml
from user_module import SMALL, go_to
from warm_python import warm_python

from themis.cli import main
from themis_integrations.project.init import project_files

CASES = {
    "nothing": (None, None, "gaussian"),
    "functions": ("mine:net", "mine:data", "gaussian"),
    "functions of two modules": ("mine:net", "other.place:data", "rain(angle=-10:10) + fog"),
    "a file": ("net.onnx", "images:photos?size=8", "gaussian"),
    "arguments": ("mine:net(width=3)", "mine:data", "gaussian"),
}


def test_a_new_project_can_be_checked_run_and_tested(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Wrote themis.yaml, test_robustness.py and model_under_test.py\n")
    commands = [line.partition("#")[0].split() for line in printed.splitlines() if line.startswith("  ")]
    assert [words[0] for words in commands] == ["themis", "themis", "pytest"]
    check, run, test = commands
    assert main(check[1:]) == 0
    assert main(run[1:]) == 0
    done = subprocess.run([warm_python(), "-m", *test], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert [path.name for path in (tmp_path / "runs").iterdir()], "the run has its folder"


def test_a_project_with_its_own_functions_needs_no_model_of_ours(tmp_path, monkeypatch, capsys):
    go_to(tmp_path, monkeypatch, SMALL)
    assert main(["init", "--model", "mine:net", "--data", "mine:data"]) == 0
    assert "Wrote themis.yaml and test_robustness.py\n" in capsys.readouterr().out
    assert main(["run", "--config", "themis.yaml", "--max-fault-rate", "1", "--max-tests", "100", "--json"]) == 0


def test_a_project_in_a_folder_of_its_own_is_run_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my project"]) == 0
    printed = capsys.readouterr().out
    cd, check, *_ = [shlex.split(line, comments=True) for line in printed.splitlines() if line.startswith("  ")]
    assert cd == ["cd", "my project"]
    monkeypatch.chdir(cd[1])
    assert main(check[1:]) == 0


@pytest.mark.parametrize("taken", ["themis.yaml", "test_robustness.py", "model_under_test.py"])
def test_nothing_is_overwritten(taken, tmp_path, capsys):
    (tmp_path / taken).write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert f"nothing is overwritten, but {taken} exists in {tmp_path}: choose another" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "mine"


def test_a_model_without_data_is_refused(tmp_path, capsys):
    assert main(["init", str(tmp_path), "--model", "mine:net"]) == 2
    assert "must be given together, but --data is missing" in capsys.readouterr().err


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_option_of_the_configuration_is_valid_even_those_in_comments(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    files = project_files(*case)
    lines = files["themis.yaml"].splitlines()
    uncommented = [re.sub(r"^# (?=\w+: )", "", line) for line in lines]
    options = [line for line in uncommented if not line.startswith("#")]
    (tmp_path / "all.yaml").write_text("\n".join(options))
    assert sum(":" in line for line in options) >= 13
    for command in ("run", "check"):
        assert main([command, "--config", "all.yaml", "--print-config"]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["perturb"] == case[2]
        assert printed["model"] == (case[0] or "model_under_test:make_model")
    compile(files["test_robustness.py"], "test_robustness.py", "exec")
