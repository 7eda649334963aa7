"""`themis zoo`, and `themis run --zoo`."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from warm_python import warm_python
from zoo_folders import write_drebin, write_mnist

from themis.cli import main
from themis_lab.zoo import ZOO, PublishedFigure, find_weights
from themis_lab.zoo.loading import build

LIMITS = ["--magnitude", "0.5", "--max-tests", "200", "--tolerance", "1e-7"]  # it never converges
RUN = ["run", "--zoo", "mlp-drebin", "--perturb", "gaussian", *LIMITS]


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A separate data folder next to the working directory."""
    (tmp_path / "data").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("THEMIS_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "data"


@pytest.fixture
def drebin(root):
    write_drebin(root)
    module = build(ZOO["mlp-drebin"], random_seed=1)
    with torch.no_grad():
        module[4].weight.mul_(10)
    torch.save(module.state_dict(), root / "drebin215" / "weights" / "mlp_200x10.pt")
    return root


def elsewhere(*words):
    """In another process."""
    return subprocess.run([warm_python(), "-m", "themis", *words], capture_output=True, text=True)


def test_the_list_shows_which_data_and_weights_are_available(drebin, capsys):
    assert main(["zoo"]) == 0
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[: len(ZOO) + 1]}
    assert list(lines)[1:] == list(ZOO)
    assert lines["mlp-drebin"] == ["212", "212", "15,230", "45,232", "97.59%", "yes", "yes"]
    assert lines["vgg19-imagenet"] == ["14,861,288", "14,696", "14,888", "143,667,240", "-", "no", "no"]
    assert main(["zoo", "list", "lenet1-mnist", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["n_elements"], row["stated"], row["data"], row["weights"]) == (5498, 0.9788, False, None)


def test_the_list_needs_no_data_folder(root, monkeypatch, capsys):
    monkeypatch.delenv("THEMIS_DATA")
    assert main(["zoo"]) == 0
    assert "Set THEMIS_DATA" in capsys.readouterr().out


def state(monkeypatch, name, value, tolerance=1e-4):
    """Give the zoo another published figure."""
    monkeypatch.setitem(ZOO, name, replace(ZOO[name], stated=PublishedFigure(value, tolerance, "rows")))


def test_verify_exits_with_0_only_if_all_models_agree(drebin, monkeypatch, capsys):
    assert main(["zoo", "verify", "mlp-drebin", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert row["agrees"] is False
    state(monkeypatch, "mlp-drebin", row["measured"])
    assert main(["zoo", "verify", "mlp-drebin"]) == 0
    assert ": agrees, rows" in capsys.readouterr().out
    assert main(["zoo", "verify", "mlp-drebin", "vgg19-imagenet"]) == 1
    printed = capsys.readouterr().out
    assert "vgg19-imagenet  no weights (none could be obtained" in printed
    assert printed.endswith("1 of 2 agree\n")


def test_verify_of_all_skips_only_optional_models_without_weights(root, capsys):
    assert main(["zoo", "verify"]) == 1
    printed = capsys.readouterr().out
    n_counted = len(ZOO) - 2 - (find_weights("efficientnet-lite0-imagenet") is None)
    assert (
        f"0 of {n_counted} agree; skipped, because they have no weights: vgg19-imagenet, resnet50-imagenet" in printed
    )
    assert "lenet1-mnist                 no weights (DeepXplore's Keras file, converted)" in printed


def test_verify_continues_after_data_that_cannot_be_read(drebin, capsys):
    folder = drebin / "mnist" / "weights"
    folder.mkdir(parents=True)
    torch.save(build(ZOO["lenet1-mnist"]).state_dict(), folder / "lenet1_deepxplore.pt")
    assert main(["zoo", "verify", "lenet1-mnist", "mlp-drebin"]) == 1
    printed = capsys.readouterr().out
    assert "lenet1-mnist  cannot be verified: " in printed
    assert "mlp-drebin    accuracy" in printed


def test_train_writes_weights_that_run_and_verify_accept(root, capsys):
    write_mnist(root, n_train=1000, n_test=200)
    for file in ("lenet1-mnist.pt", "net.safetensors"):
        out = [] if file == "lenet1-mnist.pt" else ["--out", file]
        assert main(["zoo", "train", "lenet1-mnist", "--epochs", "1", *out]) == 0
        printed = capsys.readouterr().out
        assert "epoch 1 of 1: loss " in printed
        assert "test accuracy " in printed
        assert f"Wrote {file}. Test it: themis run --zoo lenet1-mnist --weights {file} --perturb gaussian" in printed
        assert main(["zoo", "verify", "lenet1-mnist", "--weights", file, "--json"]) == 1
        (row,) = json.loads(capsys.readouterr().out)
        assert f"{row['measured']:.2%}" in printed
        words = ["run", "--zoo", "lenet1-mnist", "--weights", file, "--perturb", "gaussian", "--max-tests", "50"]
        assert main([*words, "--out", "none", "--quiet"]) == 0
    assert main(["zoo", "train", "lenet1-mnist", "--epochs", "1"]) == 2
    assert "lenet1-mnist.pt exists" in capsys.readouterr().err
    assert main(["zoo", "train", "lenet1-mnist", "--epochs", "1", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == "lenet1-mnist.pt"


WRONG = {
    "an unknown word": (["zoo", "verfy"], "ACTION must be list, verify or train, got 'verfy'"),
    "an unknown name": (["zoo", "verify", "lenet5"], "no model 'lenet5': did you mean 'lenet5-mnist'?"),
    "train nothing": (["zoo", "train"], "needs exactly one NAME, got 0"),
    "train two": (["zoo", "train", "lenet1-mnist", "mlp-pdf"], "needs exactly one NAME, got 2"),
    "train what has no data": (["zoo", "train", "vgg19-imagenet"], "no training data for vgg19-imagenet"),
    "no epochs": (["zoo", "train", "mlp-pdf", "--epochs", "0"], "epochs must be 1 or more, got 0"),
    "another ending": (["zoo", "train", "mlp-pdf", "--out", "a.onnx"], "known file extension, got a.onnx"),
    "epochs to verify": (["zoo", "verify", "--epochs", "2"], "--epochs does not apply to themis zoo verify"),
    "weights to list": (["zoo", "--weights", "a.pt"], "--weights does not apply to themis zoo list"),
    "weights for all": (["zoo", "verify", "--weights", "a.pt"], "--weights needs exactly one NAME"),
    "run an unknown name": ([*RUN[:2], "drebin", *RUN[3:]], "no model 'drebin'"),
    "run with a model": (
        [*RUN, "--model", "mine:net"],
        "--model must be left out, because mlp-drebin of the zoo has its own",
    ),
    "run with bounds": ([*RUN, "--bounds", "0,255"], "--bounds must be left out"),
    "run with a mean": ([*RUN, "--mean", "0.5", "--std", "0.5"], "--mean must be left out"),
    "run without perturbation": (["run", "--zoo", "mlp-drebin"], "--perturb must be given"),
    "run nothing": (["run", "--perturb", "gaussian"], "--model must be given"),
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_use_is_reported_in_one_line(words, root, capsys):
    given, expected = WRONG[words]
    assert main(given) == 2
    printed = capsys.readouterr().err
    assert expected in printed
    assert printed.count("\n") == 1


def test_verify_and_train_need_a_data_folder(root, monkeypatch, capsys):
    monkeypatch.delenv("THEMIS_DATA")
    for words in (["zoo", "verify"], ["zoo", "train", "lenet1-mnist"], RUN):
        with monkeypatch.context() as calm:
            calm.setattr(sys, "warnoptions", [])
            assert main(words) == 2
        assert "set THEMIS_DATA" in capsys.readouterr().err


def test_a_run_can_be_resumed_and_replayed_by_another_process(drebin):
    begun = elsewhere(*RUN, "--out", "a")
    assert begun.returncode == 0, begun.stderr
    record = json.loads(elsewhere("faults", "a", "--json").stdout)
    assert record
    again = elsewhere("replay", "a", str(record[0]["id"]))
    assert again.returncode == 0, again.stderr
    assert "1 of 1 reproduced; model, data and environment are the same as at the start of the run" in again.stdout
    more = elsewhere("resume", "a", "--max-tests", "400", "--json")
    assert json.loads(more.stdout)["tests"] == 400, more.stderr
    whole = elsewhere("run", "--config", "a/config.yaml", "--out", "b", "--json")  # it contains the new limit
    assert json.loads(whole.stdout)["tests"] == 400, whole.stderr


def test_a_run_records_the_weights_that_were_tested(drebin, capsys):
    assert main([*RUN, "--out", "a", "--quiet"]) == 0
    module = build(ZOO["mlp-drebin"], random_seed=2)
    torch.save(module.state_dict(), find_weights("mlp-drebin"))
    assert main(["resume", "a", "--max-tests", "400"]) == 3
    assert "the model must be the same as in the run" in capsys.readouterr().err


def test_random_weights_are_announced_and_are_the_same_in_another_process(root):
    write_drebin(root)
    begun = elsewhere(*RUN, "--out", "a", "--json")
    assert begun.returncode == 0
    assert begun.stderr.startswith("themis run: mlp-drebin has random weights")
    assert begun.stderr.count("\n") == 1
    more = elsewhere("resume", "a", "--max-tests", "400", "--json")
    assert json.loads(more.stdout)["tests"] == 400, more.stderr
    assert "random weights" in more.stderr


def test_other_weights_and_data_can_be_given_for_a_model_of_the_zoo(drebin, capsys):
    torch.save(build(ZOO["mlp-drebin"], random_seed=7).state_dict(), "other.pt")
    np.savez("mine.npz", inputs=np.random.default_rng(0).random((20, 215), dtype=np.float32))
    words = [*RUN, "--weights", "other.pt", "--data", "npz:mine.npz", "--neurons", "channel", "--oracle", "changed"]
    assert main([*words, "--out", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tests"] == 200
