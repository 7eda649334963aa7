"""`themis replay`: faults run again from the run folder, in other processes and on other models and data."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from signing import change_record, read_record

import themis
from themis.cli import main
from themis.runs.replay import Replayer
from themis.runs.source import Origin
from themis.runs.store.reader import Reader

MODULE = '''
import torch
from torch import nn

class Net(nn.Module):
    """The last bits of a long sum depend on the number of threads, and so do those of the outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8 * 64, 3)
        self.register_buffer("many", torch.rand(300_000) - 0.5)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x - 0.5)).flatten(1)) + self.many.sum() / 100

def other():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU())

def broken():
    raise ZeroDivisionError("no model today")
'''
OPTIONS = ["--magnitude", "0.2", "--max-tests", "640", "--max-stored", "20", "--tolerance", "1e-9", "--quiet"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a model, its weights, its data, and runs with noise and with an attack."""
    home, before = tmp_path_factory.mktemp("home"), os.getcwd()
    (home / "wobbling.py").write_text(MODULE)
    os.chdir(home)
    sys.path.insert(0, str(home))
    import wobbling

    net = wobbling.Net()
    torch.save(net.state_dict(), "net.pt")
    inputs = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    np.savez("data.npz", inputs=inputs, labels=net(inputs).argmax(1))
    source = ["--model", "wobbling:Net", "--weights", "net.pt", "--data", "npz:data.npz"]
    assert main(["run", *source, "--perturb", "gaussian", *OPTIONS, "--out", "noise"]) == 0
    assert main(["run", *source, "--perturb", "fgsm", *OPTIONS, "--out", "attack"]) == 0
    yield home
    os.chdir(before)
    sys.path.remove(str(home))


@pytest.fixture
def moved(home, tmp_path, monkeypatch):
    """A copy of that folder, whose runs record the copy; tests may change it."""
    place = tmp_path / "home"
    shutil.copytree(home, place)
    for run in ("noise", "attack"):
        origin = read_record(place / run)["origin"]
        change_record(place / run, signed=True, origin={**origin, "folder": str(place)})
    monkeypatch.chdir(tmp_path)
    return place


def some(run, n=2, where="tensors IS NOT NULL"):
    """Numbers of a few faults."""
    return [str(id) for (id,) in Reader(run).select("id", where, limit=n)]


def replayed(capsys, *arguments):
    """Exit code and JSON."""
    code = main(["replay", *map(str, arguments), "--json"])
    printed = capsys.readouterr()
    assert printed.err == ""
    return code, json.loads(printed.out)


def refused(capsys, *arguments):
    """Exit code and error message, which must be one line."""
    code = main(["replay", *map(str, arguments)])
    [line] = capsys.readouterr().err.splitlines()
    return code, line


def test_faults_are_reproduced_bit_for_bit(home, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    ids = some(home / "noise", 3)
    assert main(["replay", str(home / "noise"), *ids]) == 0
    printed = capsys.readouterr().out
    fault = next(iter(Reader(home / "noise").faults("id = ?", (ids[0],))))
    sure = f"{fault.answer} ({fault.confidence:.1%})"
    assert printed.splitlines()[:4] == [
        f"fault {fault.id}: seed {fault.seed_id}, gaussian with sigma {fault.theta['sigma']:.4g}",
        f"  answer  clean {fault.clean_answer}, recorded {sure}, now {sure}: the same",
        "  input   identical, bit for bit",
        "  output  identical, bit for bit",
    ]
    assert printed.count("\nfault ") == 2
    assert printed.endswith("3 of 3 reproduced; model, data and environment are the same as at the start of the run\n")


def test_every_kept_fault_of_both_runs_is_reproduced_bit_for_bit(home, capsys):
    for run in (home / "noise", home / "attack"):
        code, result = replayed(capsys, run, *some(run, -1))
        assert code == 0
        assert len(result["faults"]) == 20
        assert result["changes"] == []
        for each in result["faults"]:
            assert each["is_same"]
            assert each["is_fault"]
            assert each["now"] == each["recorded"]
            assert each["input"] == each["output"] == {"is_kept": True, "gap": 0}


def test_the_options_of_the_target_override_the_recorded_ones(home, capsys):
    (id,) = some(home / "noise", 1)
    code, line = refused(capsys, home / "noise", id, "--mean", "0.5")
    assert (code, "--mean and --std must be given together" in line) == (2, True)
    code, result = replayed(capsys, home / "noise", id, "--mean", "5", "--std", "0.01")
    assert (code, result["faults"][0]["output"]["gap"] > 1) == (1, True)


def test_a_fault_whose_input_was_not_kept_is_computed_again(home, capsys):
    ids = some(home / "noise", 5, "tensors IS NULL")
    code, result = replayed(capsys, home / "noise", *ids)
    assert code == 0
    for each in result["faults"]:
        assert each["now"] == each["recorded"]
        assert each["input"] == {"is_kept": False, "gap": None}
    assert main(["replay", str(home / "noise"), ids[0]]) == 0
    assert "input   not kept\n  output  not kept\n" in capsys.readouterr().out


def test_faults_are_replayed_in_the_order_given_and_once(home, capsys):
    one, two = some(home / "noise")
    _, result = replayed(capsys, home / "noise", two, one, two)
    assert [each["id"] for each in result["faults"]] == [int(two), int(one)]


def test_another_process_with_more_threads_and_another_folder_replays_while_the_campaign_runs(home, tmp_path):
    torch.set_num_threads(1)
    origin = Origin(model="wobbling:Net", weights="net.pt", data="npz:data.npz", folder=str(home))
    answers = []

    class Look(themis.Callback):
        def on_round(self, done):
            if not answers:
                command = [sys.executable, "-m", "themis", "replay", str(tmp_path / "run"), *some(tmp_path / "run", 4)]
                environment = {**os.environ, "OMP_NUM_THREADS": "2"}
                done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
                answers.append(done)

    options = {"magnitude": 0.2, "max_tests": 600, "round_size": 300, "tolerance": 1e-9}
    target = origin.target()
    run = themis.run(
        target, origin.read(), "gaussian", out=tmp_path / "run", origin=origin, callbacks=[Look()], **options
    )
    assert len(run.rounds) == 2
    imported = f"themis replay: imported wobbling from {home / 'wobbling.py'}\n"
    assert (answers[0].returncode, answers[0].stderr) == (0, imported)
    assert answers[0].stdout.count("input   identical, bit for bit\n  output  identical, bit for bit\n") == 4
    assert "environment are the same as at the start of the run" in answers[0].stdout, "it uses the recorded threads"


def test_changed_weights_are_named_with_their_effect(moved, capsys):
    ids = some(moved / "noise", -1)
    net = torch.load(moved / "net.pt")
    torch.save({**net, "fc.bias": net["fc.bias"] + 1e-6}, moved / "net.pt")
    code, result = replayed(capsys, moved / "noise", *ids)
    assert code == 0, "the outcome is the same"
    assert any(0 < each["output"]["gap"] < 1e-5 for each in result["faults"])
    assert [each.split()[0] for each in result["changes"]] == ["model_sha256", "weights_sha256"]
    label, answers = result["faults"][0]["label"], {each["recorded"]["answer"] for each in result["faults"]}
    net["fc.bias"][label] += 100
    torch.save(net, moved / "net.pt")
    assert main(["replay", str(moved / "noise"), *ids]) == 1
    printed = capsys.readouterr().out
    assert f"now {label} (100.0%): no longer a fault" in printed
    assert ("the same answer, but a different output" in printed) == (label in answers)
    assert re.search(r"output  differs by up to \d", printed)
    assert re.search(r"^\d+ of 20 reproduced; changed since the start of the run:$", printed, re.M)
    assert len(re.findall(r"^  model_sha256 \w{12}\.\.\. then, \w{12}\.\.\. now$", printed, re.M)) == 1
    assert len(re.findall(r"^  weights_sha256 \w{12}\.\.\. then, \w{12}\.\.\. now$", printed, re.M)) == 1


def test_changed_data_is_named(moved, capsys):
    ids = some(moved / "noise", 3)
    data = dict(np.load(moved / "data.npz"))
    np.savez(moved / "data.npz", inputs=1 - data["inputs"], labels=data["labels"])
    code, result = replayed(capsys, moved / "noise", *ids)
    assert code == 1
    assert [each.split()[0] for each in result["changes"]] == ["data_sha256"]
    assert all(each["input"]["gap"] > 0.1 for each in result["faults"])
    np.savez(moved / "data.npz", inputs=data["inputs"][:1], labels=data["labels"][:1])
    code, line = refused(capsys, moved / "noise", *ids)
    assert code in (2, 3)
    assert "the data must hold the fault's seed" in line


def test_the_input_of_an_attack_on_other_weights_is_the_stored_one(moved, capsys):
    ids = some(moved / "attack", -1)
    net = torch.load(moved / "net.pt")
    net["conv.weight"] *= 1 + 3e-2 * torch.randn(net["conv.weight"].shape, generator=torch.Generator().manual_seed(1))
    torch.save(net, moved / "net.pt")
    main(["replay", str(moved / "attack"), *ids])
    printed = capsys.readouterr().out
    assert re.search(r"input   differs by up to [\d.]+; the model was given the recorded one", printed)
    reader = Reader(moved / "attack")
    kept = reader.tensors([int(id) for id in ids])
    for fault in reader.faults("tensors IS NOT NULL", handle=Replayer(reader)):
        np.testing.assert_array_equal(fault.replay().inputs, kept[fault.id].inputs[0])


def test_other_weights_and_data_can_be_given(moved, tmp_path, capsys):
    ids = some(moved / "noise")
    for name in ("net.pt", "data.npz"):
        shutil.move(moved / name, tmp_path / f"my_{name}")
    assert refused(capsys, moved / "noise", *ids)[0] == 3
    there = ["--weights", "my_net.pt", "--data", "npz:my_data.npz"]
    code, result = replayed(capsys, moved / "noise", *ids, *there)
    assert (code, result["changes"]) == (0, [])


def test_replaying_a_run_from_python_says_what_it_needs(home, tmp_path, capsys, monkeypatch):
    import wobbling

    monkeypatch.chdir(home)
    data = dict(np.load("data.npz"))
    inputs, labels = torch.from_numpy(data["inputs"]), torch.from_numpy(data["labels"])
    target = themis.Target(wobbling.Net())
    out = tmp_path / "run"
    run = themis.run(target, (inputs, labels), "gaussian", magnitude=0.2, max_tests=300, out=out)
    ids = some(out)
    code, line = refused(capsys, out, *ids)
    assert code == 2
    assert "it was started from Python: pass target and data, or name them with --model and --data" in line
    assert refused(capsys, out, *ids, "--model", "wobbling:Net")[0] == 2
    source = ["--model", "wobbling:Net", "--weights", "net.pt", "--data", "npz:data.npz"]
    assert replayed(capsys, out, *ids, *source)[0] == 0
    reader = Reader(out)
    faults = reader.faults(handle=Replayer(reader, target, (inputs, labels)))
    assert len(faults) == len(run.faults)
    for again, first in zip(faults[:5], run.faults[:5], strict=True):
        replay = again.replay()
        assert replay.is_same
        assert replay.output_gap == 0
        assert torch.equal(replay.outputs, first.replay().outputs)


WRONG = {
    "no such fault": (["100000"], 2, "the run has no fault 100000: its "),
    "no number": (["one"], 2, "FAULT must be a whole number, got 'one'"),
    "no fault": ([], 2, "FAULT must be given"),
    "option": (["0", "--wieghts", "a.pt"], 2, "unknown option --wieghts: did you mean --weights?"),
    "no such factory": (["FAULT", "--model", "wobbling:net"], 2, "no attribute 'net'"),
    "broken model": (["FAULT", "--model", "wobbling:broken"], 3, "raised ZeroDivisionError: no model today"),
    "other model": (["FAULT", "--model", "wobbling:other"], 3, "must match the model"),
    "no weights": (["FAULT", "--weights", "nothing.pt"], 3, "nothing.pt is not a file"),
    "no data": (["FAULT", "--data", "npz:nothing.npz"], 3, "nothing.npz is not a regular file"),
    "device": (["FAULT", "--device", "cuda:77"], 2, "--device must be usable here"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_reported_in_one_line_with_its_exit_code(home, capsys, monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    words, code, message = WRONG[name]
    [id] = some(home / "noise", 1)
    given, line = refused(capsys, home / "noise", *(id if word == "FAULT" else word for word in words))
    assert message in line
    assert given == code
    assert list(tmp_path.iterdir()) == []
