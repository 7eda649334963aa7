"""Damaged, unsuitable and malicious model files: each gives one line, and none runs code without trust."""

import io
import json
import logging
import pickle
import sys
import warnings
import zipfile
from functools import partial
from pathlib import Path

import model_files as files
import pytest
import torch
from torch import nn
from user_module import go_to

from themis.cli import main

RUN = "run --data mine:data --perturb gaussian --max-tests 50 --quiet --out none"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    go_to(tmp_path, monkeypatch, files.MODULE)


def text(name):
    return partial(Path(name).write_text, "hello\n")


def empty(name):
    return partial(Path(name).write_bytes, b"")


def halved(make, name):
    def setup():
        make(name)
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[: len(content) // 2])

    return setup


def bare_pickle(name):
    return lambda: Path(name).write_bytes(pickle.dumps(files.Harmful()))


def saved(name, value):
    return lambda: torch.save(value, name)


class Writes(nn.Module):
    """TorchScript that writes a file through mapped memory."""

    def forward(self, x):
        mapped = torch.from_file("harm", True, 4).fill_(1.0)
        return x.flatten(1)[:, :4] + mapped


class Saves(nn.Module):
    def forward(self, x):
        torch.save(x, "harm")
        return x.flatten(1)[:, :4]


def harmful_export():
    """Write a program that makes its reader evaluate an expression and load a pickle."""
    files.export()
    with zipfile.ZipFile("net.pt2") as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    pickled = io.BytesIO()
    torch.save(files.Harmful(), pickled)
    with zipfile.ZipFile("net.pt2", "w") as archive:
        for name, content in members.items():
            if name.endswith(".json") and b'"config"' in content:
                config = json.loads(content)
                for each in config["config"].values():
                    each["use_pickle"] = True
                content = json.dumps(config).encode()
            elif "/weights/weight_" in name:
                content = pickled.getvalue()
            archive.writestr(name, content)


def harmful_in_a_folder():
    """Trust a different file of the same name."""
    Path("elsewhere").mkdir()
    files.pickled("elsewhere/whole.pt")
    files.harmful()


PICKLED, SCRIPT, EXPORT = "whole.pt must be a model that can be read without running code", "net.pt", "net.pt2 must be "
HOSTILE = {
    # setup, options, message
    "no file": (list, "--model net.onnx", "the model file must exist, but net.onnx does not"),
    "no Keras file": (list, "--model keras:net.keras", "the model file must exist, but net.keras does not"),
    "a folder": (lambda: Path("net.pt").mkdir(), "--model net.pt", "the model file must exist, but net.pt does not"),
    "text for a program": (text("whole.pt"), "--model whole.pt", PICKLED),
    "an empty program": (empty("whole.pt"), "--model whole.pt", PICKLED),
    "half a TorchScript program": (halved(files.script, "whole.pt"), "--model whole.pt", PICKLED),
    "a pickled model": (files.pickled, "--model whole.pt", f"{PICKLED}, but it is pickled"),
    "a pickled model, another trusted": (files.pickled, "--model whole.pt --trust mine.py", PICKLED),
    "a pickled model, its namesake trusted": (
        harmful_in_a_folder,
        "--model whole.pt --trust elsewhere/whole.pt",
        PICKLED,
    ),
    "a pickle that runs code": (files.harmful, "--model whole.pt", PICKLED),
    "a bare pickle that runs code": (bare_pickle("whole.pt"), "--model whole.pt", PICKLED),
    "weights for a model": (
        files.state,
        "--model weights.pt",
        "weights.pt must be a model, but it holds weights: pass",
    ),
    "a tensor for a model": (
        saved("x.pt", torch.zeros(3)),
        "--model x.pt",
        "x.pt must be a model, but it holds Tensor",
    ),
    "a number, trusted": (
        saved("x.pt", {"a": 1}),
        "--model x.pt --trust x.pt",
        "x.pt must hold an nn.Module, got dict: save the model itself",
    ),
    "text, trusted": (text("x.pt"), "--model x.pt --trust x.pt", "x.pt must be a pickled model that loads"),
    "TorchScript that maps a file": (
        partial(files.script, net=Writes()),
        "--model net.pt",
        "net.pt must be trusted, but it is TorchScript that may read and write files: it uses aten::from_file: pass",
    ),
    "TorchScript that saves a file": (partial(files.script, net=Saves()), "--model net.pt", "net.pt must be trusted"),
    "torch.export without trust": (
        files.export,
        "--model net.pt2",
        "net.pt2 must be trusted, but it is a torch.export program, and reading it runs code in it: pass --trust "
        "net.pt2",
    ),
    "torch.export that runs code": (harmful_export, "--model net.pt2", "net.pt2 must be trusted"),
    "torch.export by another ending": (partial(files.export, "x.pt"), "--model x.pt", "x.pt must be trusted"),
    "half a torch.export program": (
        halved(files.export, "net.pt2"),
        "--model net.pt2 --trust net.pt2",
        "net.pt2 must be a torch.export program that loads",
    ),
    "text for torch.export": (text("net.pt2"), "--model net.pt2 --trust net.pt2", EXPORT),
    "torch.export for two inputs": (
        partial(files.export, batch=2),
        "--model net.pt2 --trust net.pt2",
        "it was exported for 2 at a time: export it with dynamic_shapes=",
    ),
    "torch.export in training mode": (
        lambda: files.export(net=files.make_net()),
        "--model net.pt2 --trust net.pt2",
        "must give the same output for the same input",
    ),
    "text for ONNX": (text("net.onnx"), "--model net.onnx", "net.onnx must be an ONNX model, but it cannot be read"),
    "empty ONNX": (empty("net.onnx"), "--model net.onnx", "net.onnx must be an ONNX model, but it has no graph"),
    "half an ONNX file": (halved(files.onnx, "net.onnx"), "--model net.onnx", "net.onnx must be an ONNX model"),
    "a pickle for ONNX": (bare_pickle("net.onnx"), "--model net.onnx", "net.onnx must be an ONNX model"),
    "an ONNX operator of its own": (
        partial(files.onnx, last="Frobnicate"),
        "--model net.onnx",
        "net.onnx must be a model that onnxruntime can run",
    ),
    "weights beside ONNX": (
        lambda: (files.onnx(), files.state()),
        "--model net.onnx --weights weights.pt",
        "--weights must be left out, because net.onnx has its own",
    ),
    "ONNX on a GPU": (files.onnx, "--model net.onnx --device cuda", "--device must be left out"),
    "text for safetensors": (
        text("w.safetensors"),
        "--model mine:blank --weights w.safetensors",
        "w.safetensors must be a safetensors file of tensors",
    ),
    "half a safetensors file": (
        halved(files.safetensors, "w.safetensors"),
        "--model mine:blank --weights w.safetensors",
        "w.safetensors must be a safetensors file of tensors",
    ),
    "no safetensors file": (list, "--model mine:blank --weights w.safetensors", "the weights file must exist"),
    "weights that run code": (
        files.harmful,
        "--model mine:blank --weights whole.pt",
        "or pass --trust whole.pt to run the code in it",
    ),
    "weights that are TorchScript": (
        files.script,
        "--model mine:blank --weights net.pt",
        "net.pt must be a state dict, but it is a TorchScript program",
    ),
    "a checkpoint of another net": (
        saved("w.pt", {"state_dict": {"module.conv9": torch.zeros(1)}}),
        "--model mine:blank --weights w.pt",
        "must match the model, missing ['conv.weight', 'conv.bias', 'fc.weight'], unexpected ['module.conv9']",
    ),
    # factories
    "code for an argument": (list, "--model mine:needs_width(open('harm','w'))", "must be literal values"),
    "a name for an argument": (list, "--model mine:needs_width(width=six)", "must be literal values"),
    "stars": (list, "--model mine:needs_width(**{'width':6})", "must be literal values"),
    "a call that goes on": (list, "--model mine:needs_width(6).mro()", "must be literal values"),
    "no end": (list, "--model mine:needs_width(6", "must be literal values"),
    "arguments for an object": (list, "--model mine:NET(3)", "NET is a Net and takes no arguments"),
    "arguments that do not fit": (list, "--model mine:needs_width(depth=6)", "unexpected keyword argument 'depth'"),
    "no package": (list, "--model timm:resnet18", "this model needs timm: pip install timm"),
    "no name": (list, "--model timm:", "must name a model: write timm:NAME"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_gets_one_line_and_nothing_runs(kind, monkeypatch, capfd, caplog):
    monkeypatch.setitem(sys.modules, "timm", None)  # as if it were not installed
    setup, options, message = HOSTILE[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings from writing the file
        setup()
    capfd.readouterr()
    caplog.clear()
    code = main([*RUN.split(), *options.split()])
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]  # which users see as more lines
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if "loaded the weights under" not in line]
    assert len(lines) == 1, said
    assert message in lines[0]
    assert code in (2, 3)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    ("setup", "options"),
    [
        (files.harmful, "--model whole.pt --trust whole.pt"),
        (files.harmful, "--model mine:blank --weights whole.pt --trust whole.pt"),
        (harmful_export, "--model net.pt2 --trust net.pt2"),
        (partial(files.script, net=Writes()), "--model net.pt --trust net.pt"),
    ],
)
def test_a_trusted_file_runs_its_code(setup, options):
    """Without this, the refusals above might refuse nothing."""
    setup()
    main([*RUN.split(), *options.split()])
    assert Path("harm").exists()
