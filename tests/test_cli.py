"""The command line, as a user types it."""

import json
import subprocess
import sys

import pytest
import torch

from themis.cli import main

MODULE = """
import torch
from torch import nn
from themis import Target

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))

def target():
    return Target(net(), bounds=(0, 2))

def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))

def broken():
    raise ZeroDivisionError("no model today")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop("mine", None)
    return tmp_path


BASE = ["run", "--model", "mine:net", "--data", "mine:data", "--perturb", "gaussian", "--max-tests", "300"]


def test_run_prints_progress_a_summary_and_the_stop_reason(here, capsys):
    assert main([*BASE, "--magnitude", "0.3", "--out", "runs/first"]) == 0
    said = capsys.readouterr().out
    assert "19 neurons in 2 layers, 30 of 30 seeds to test" in said
    assert "round 1: coverage" in said
    assert "residual risk" in said
    assert "Stopped because" in said
    assert "Results in runs/first" in said
    summary = json.loads((here / "runs/first/summary.json").read_text())
    assert summary["tests"] == 300
    faults = [json.loads(line) for line in (here / "runs/first/faults.jsonl").read_text().splitlines()]
    assert len(faults) == summary["faults"] > 0
    rounds = [json.loads(line) for line in (here / "runs/first/rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == summary["rounds"]
    assert "magnitude: 0.3" in (here / "runs/first/config.yaml").read_text()
    assert json.loads((here / "runs/first/environment.json").read_text())["threads"] == torch.get_num_threads()


def test_run_can_print_json_alone_or_nothing(here, capsys):
    assert main([*BASE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 300
    assert main([*BASE, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_options_come_from_a_file_and_flags_override_it(here, capsys):
    (here / "campaign.yaml").write_text(
        "model: mine:net\ndata: mine:data\nperturb: gaussian\nmax_tests: 100\npolicy: random\n"
    )
    assert main(["run", "--config", "campaign.yaml", "--max-tests", "200", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["tests"] == 200
    assert set(summary["kinds"]) == {"uniform"}


def test_a_target_and_weights_can_be_given(here, capsys):
    import mine

    torch.save(mine.net().state_dict(), "weights.pt")
    arguments = ["run", "--model", "mine:target", "--weights", "weights.pt", *BASE[3:], "--json"]
    assert main(arguments) == 0
    torch.save({"other": torch.zeros(1)}, "other.pt")
    arguments[4] = "other.pt"
    assert main(arguments) == 3
    assert "must fit the model, missing ['1.weight'" in capsys.readouterr().err


def test_a_preset_never_changes_what_is_said(here, capsys):
    arguments = ["run", *BASE[1:-2], "--preset", "paper", "--json", "--out"]
    assert main([*arguments, "a", "--max-tests", "20000", "--judge", "exact", "--coverage", "0.1"]) == 0
    config = (here / "a/config.yaml").read_text()
    assert "max_tests: 20000" in config
    assert "judge: exact" in config
    assert "policy: paper" in config
    assert main([*arguments, "b", "--coverage", "0.1"]) == 0
    assert "judge: gibbs" in (here / "b/config.yaml").read_text()


def test_a_stored_configuration_can_be_run_again(here, capsys):
    assert main([*BASE, "--quiet", "--out", "a"]) == 0
    again = ["run", "--config", "a/config.yaml", "--model", "mine:net", "--data", "mine:data", "--json"]
    assert main(again) == 0
    first = json.loads((here / "a/summary.json").read_text())
    assert json.loads(capsys.readouterr().out)["faults"] == first["faults"]


def test_one_layer_or_one_mean_needs_no_brackets(here):
    assert main([*BASE, "--quiet", "--layers", "1", "--mean", "0.5", "--std", "0.5"]) == 0


WRONG = {
    "no such module": (["--model", "nowhere:net"], 2, "No module named 'nowhere'"),
    "no factory": (["--model", "mine"], 2, "--model must be module:factory, got 'mine'"),
    "no such factory": (["--model", "mine:nett"], 2, "no attribute 'nett'"),
    "factory raises": (["--model", "mine:broken"], 3, "raised ZeroDivisionError: no model today"),
    "no such perturbation": (["--perturb", "gausian"], 2, "did you mean 'gaussian'"),
    "no such reader": (["--data", "digit"], 2, "did you mean 'digits'"),
    "no such file": (["--data", "npz:nothing.npz"], 3, "nothing.npz does not"),
    "weights missing": (["--weights", "nothing.pt"], 3, "nothing.pt does not"),
    "mean without std": (["--mean", "[0.5]"], 2, "--mean and --std must be given together"),
    "bounds": (["--bounds", "[0.2,0.3]"], 3, "inputs must lie in bounds (0.2, 0.3)"),
    "layers": (["--layers", "[conv9]"], 2, "'conv9' matches none"),
    "device": (["--device", "cuda:77"], 2, "--device must be usable here"),
    "coverage": (["--coverage", "2"], 2, "coverage must lie in (0, 1], got 2.0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_gets_one_line_and_its_exit_code(here, capsys, name):
    arguments, code, message = WRONG[name]
    assert main([*BASE, *arguments]) == code
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1


def test_a_folder_with_a_run_is_never_overwritten(here, capsys):
    assert main([*BASE, "--quiet", "--out", "runs/a"]) == 0
    assert main([*BASE, "--quiet", "--out", "runs/a"]) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_a_value_of_the_wrong_type_is_bad_usage(here):
    with pytest.raises(SystemExit) as stopped:
        main([*BASE, "--max-tests", "many"])
    assert stopped.value.code == 2


def test_the_demo_trains_tests_and_draws(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--max-tests", "1280"]) == 0
    said = capsys.readouterr().out
    assert "LeNet-5 from" in said
    assert "The most telling faults: runs/demo/faults.png" in said
    from matplotlib.image import imread

    picture = imread(tmp_path / "runs/demo/faults.png")
    assert picture.shape[0] > 300
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.1
    assert main(["demo", "--max-tests", "640", "--quiet"]) == 0
    assert (tmp_path / "runs/demo-2/summary.json").exists()


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from themis.cli import main\n"
        "try: main(['run', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'scipy', 'rich', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--max-tests" in done.stdout
