"""`themis retrain`: from a run folder, with what it prints, writes and refuses."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from themis.cli import COMMANDS, main
from themis.retraining.recipe import OPTIMISERS, SCHEDULES
from themis_integrations.completion import NAMES

pytestmark = pytest.mark.xdist_group("retrain_command")

MODULE = """
import torch
from torch import nn

def net():
    made = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    with torch.no_grad():
        made[1].weight.zero_()
        made[1].bias.zero_()
        made[1].weight[0, :6], made[1].weight[1, 30:] = 1.0, 1.0
    return made
"""
QUICK = ["--random-seeds", "1", "--epochs", "3", "--draws", "3", "--passes", "300", "--learning-rate", "5e-3"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, its data and others, a run that was split and one that was not."""
    home, before = tmp_path_factory.mktemp("home"), os.getcwd()
    (home / "striping.py").write_text(MODULE)
    os.chdir(home)
    rng = torch.Generator().manual_seed(3)
    inputs, labels = 0.4 + 0.2 * torch.rand(450, 1, 6, 6, generator=rng), torch.arange(450) % 2
    inputs[labels == 0, :, :3] += 0.15
    inputs[labels == 1, :, 3:] += 0.15
    np.savez("data.npz", inputs=inputs[:350], labels=labels[:350])
    np.savez("others.npz", inputs=inputs[350:], labels=labels[350:])
    sys.path.insert(0, str(home))
    options = ["--perturb", "gaussian", "--magnitude", "0.6", "--max-tests", "300", "--quiet"]
    run = ["run", "--model", "striping:net", "--data", "npz:data.npz", *options]
    assert main([*run, "--split", "0.4,0.3,0.3", "--out", "run"]) == 0
    assert main([*run, "--out", "whole"]) == 0
    yield home
    os.chdir(before)
    sys.path.remove(str(home))


def test_patients_stay_together_and_the_advice_tests_all_of_other_data(home, capsys):
    (home / "patients.txt").write_text("".join(f"{k // 7}\n" for k in range(350)))
    run = ["run", "--model", "striping:net", "--data", "npz:data.npz", "--perturb", "gaussian", "--max-tests", "300"]
    assert main([*run, "--split", "0.4,0.3,0.3", "--split-by", "patients.txt", "--quiet", "--out", "patients"]) == 0
    capsys.readouterr()
    assert main(["retrain", "patients", "--out", "healed", *QUICK]) == 0
    advice = capsys.readouterr().out.split("not seen: themis ")[1].replace("DATA", "npz:others.npz").split()
    assert main([*advice, "--max-tests", "200", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds_given"] == 100


def test_it_prints_a_table_and_writes_weights_that_load(home, capsys):
    assert main(["retrain", "run", "--out", "better", *QUICK, "--also", "gaussian:0.3"]) == 0
    printed = capsys.readouterr().out
    for words in ("gaussian:0.3", "disturbed score", "judge seeds, which no model", "Results in better"):
        assert words in printed
    assert printed.count("a new campaign finds") == 2  # once per perturbation
    kept = json.loads((home / "better/retrain.json").read_text())
    assert kept["command"].startswith("themis ")
    weights = ["--weights", "better/weights.safetensors", "--max-tests", "50", "--quiet", "--out", "none"]
    again = ["run", "--model", "striping:net", "--data", "npz:others.npz", "--perturb", "gaussian", *weights]
    assert main(again) == 0
    capsys.readouterr()
    assert main(["retrain", "run", "--out", "better", *QUICK, "--also", "gaussian:0.3"]) == 0
    assert "2 examinations, 2 already finished" in capsys.readouterr().out
    assert main(["retrain", "run", "--out", "better", *QUICK]) == 2
    said = capsys.readouterr().err
    assert "better holds another retraining (" in said
    assert "also gaussian:0.3 then" in said


def test_only_the_layers_named_are_trained(home, capsys):
    assert main(["retrain", "run", "--out", "part", *QUICK, "--layers", "fc*"]) == 2
    assert "layers must match the names of parameters, but 'fc*' matches none" in capsys.readouterr().err
    assert not (home / "part").exists()  # refused before the first step
    assert main(["retrain", "run", "--out", "part", *QUICK, "--layers", "1.w*", "--share", "1", "--epochs", "12"]) == 0
    import striping

    before, after = striping.net().state_dict(), load_file("part/weights.safetensors")
    assert torch.equal(after["1.bias"], before["1.bias"])
    assert not torch.equal(after["1.weight"], before["1.weight"])


def test_gates(home, capsys):
    assert main(["retrain", "run", "--out", "gate", *QUICK, "--fail-under", "0.9"]) == 1
    assert "is below --fail-under, 90.00 points" in capsys.readouterr().out
    assert main(["retrain", "run", "--out", "gate", *QUICK, "--fail-under", "-1", "--tolerance", "0.5"]) == 0
    assert main(["retrain", "run", "--out", "gate", *QUICK, "--fail-under", "0.9", "--json"]) in (0, 1)
    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("{") :])["failed"] is True


def test_other_data_judges_a_run_that_was_not_split(home, capsys):
    assert main(["retrain", "whole", "--out", "w", *QUICK]) == 2
    assert "--split" in capsys.readouterr().err
    assert not (home / "w").exists()
    assert main(["retrain", "whole", "--out", "w", *QUICK, "--judge", "npz:data.npz"]) == 3
    assert "not trained on" in capsys.readouterr().err
    assert main(["retrain", "whole", "--out", "w", *QUICK, "--judge", "npz:others.npz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"]["judge"] == 100
    assert main(["retrain", "run", "--out", "t", *QUICK, "--train", "npz:data.npz"]) == 3
    assert "train must share no seed with the judge seeds" in capsys.readouterr().err


def test_several_runs_are_retrained_on_together_and_graded_one_by_one(home, capsys):
    run = ["run", "--model", "striping:net", "--data", "npz:data.npz", "--max-tests", "200", "--quiet"]
    assert main([*run, "--perturb", "brightness", "--split", "0.4,0.3,0.3", "--out", "light"]) == 0
    assert main(["retrain", "run", "light", "--out", "both", *QUICK]) == 0
    printed = capsys.readouterr().out
    assert "mCE, relative to the original" in printed
    assert "withstood a campaign" not in printed  # the tables by perturbation are in the file
    kept = json.loads((home / "both/retrain.json").read_text())
    assert [each["name"] for each in kept["outcomes"]] == ["gaussian:0.6", "brightness"]
    assert set(kept["models"][0]["frontier"][0]["by_perturbation"]) == {"gaussian:0.6", "brightness"}
    assert [each["perturbation"] for each in kept["source"]["further"]] == ["brightness"]
    for words, why in (
        (["run", "run"], "runs must differ in their perturbation or magnitude, but 2 of them have gaussian:0.6"),
        (["run", "whole"], "--split"),
    ):
        assert main(["retrain", *words, "--out", "refused", *QUICK]) == 2
        assert why in capsys.readouterr().err


def test_techniques_are_compared(home, capsys):
    command = [
        "contest",
        "run",
        "--techniques",
        "themis,random",
        "--out",
        "contest",
        "--random-seeds",
        "2",
        "--epochs",
        "1",
    ]
    assert main([*command, "--epochs", "1", "--inputs", "20", "--draws", "2"]) == 0
    assert "Results in contest" in capsys.readouterr().out
    kept = json.loads((home / "contest/contest.json").read_text())
    assert {each["technique"] for each in kept["standings"]} == {"themis", "random"}
    assert main([*command, "--epochs", "1", "--inputs", "20", "--draws", "2"]) == 0
    assert "4 trainings, 4 already finished" in capsys.readouterr().out


def test_an_interrupt_says_how_to_resume(home, capsys, monkeypatch):
    from themis.report.progress import ShowCells

    def stop(self, end):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ShowCells, "on_cell_end", stop)
        assert main(["retrain", "run", "--out", "cut short", *QUICK]) == 130
    assert "To resume, use the same command with --out 'cut short'" in capsys.readouterr().out
    assert main(["retrain", "run", "--out", "cut short", *QUICK]) == 0
    assert "1 examination, 1 already finished" in capsys.readouterr().out


def test_bad_options_are_one_line(home, capsys):
    for words, why in (
        (["retrain", "run", "--mix", "2"], "mix must lie in [0, 1], got 2"),
        (["retrain", "nowhere"], "a run must be a folder with run.sqlite, but nowhere is not one"),
        (["retrain"], "RUN must be given"),
    ):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert why in said
        assert len(said.splitlines()) == 1
    assert "retrain" in COMMANDS
    assert tuple(NAMES["optimiser"]) == OPTIMISERS
    assert tuple(NAMES["schedule"]) == SCHEDULES
