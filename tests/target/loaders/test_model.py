"""The same net in every format has the same activations, and is tested, replayed and resumed."""

import json
import re
from contextlib import closing
from functools import partial
from pathlib import Path

import model_files as files
import pytest
import torch
from user_module import go_to

from themis.cli import main
from themis.runs.source import Origin
from themis.runs.store.reader import Reader


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Work in a folder that contains the user's module."""
    go_to(tmp_path, monkeypatch, files.MODULE)


def nothing():
    pass


NAMED, BY_FUNCTION, NODES = ("act", "tanh()"), ("relu()", "tanh()"), ("/act/Relu", "f")
CHECKPOINT = {"epoch": 3, "lr": 0.1}
WAYS = {
    # setup, options, names of the two inner layers, warning
    "factory": (nothing, "--model mine:make_net", NAMED, ""),
    "factory with arguments": (nothing, "--model mine:needs_width(6,act='tanh')", NAMED, ""),
    "factory of a target": (nothing, "--model mine:target", NAMED, ""),
    "object with logits": (nothing, "--model mine:wrapped", ("net.act", "net.tanh()"), ""),
    "black box": (nothing, "--model mine:open_box", ("first", "second"), ""),
    "black box without activations": (nothing, "--model mine:box", (), ""),
    "weights": (files.state, "--model mine:blank --weights weights.pt", NAMED, ""),
    "safetensors": (files.safetensors, "--model mine:blank --weights weights.safetensors", NAMED, ""),
    "checkpoint": (
        partial(files.state, wrap=lambda state: {**CHECKPOINT, "state_dict": state}, prefix="module."),
        "--model mine:blank --weights weights.pt",
        NAMED,
        "weights.pt: removed 'module.' from the names",
    ),
    "checkpoint of a compiled model": (
        partial(files.state, wrap=lambda state: {**CHECKPOINT, "model": state}, prefix="_orig_mod."),
        "--model mine:blank --weights weights.pt",
        NAMED,
        "removed '_orig_mod.' from the names",
    ),
    "pickled weights": (files.pickled, "--model mine:blank --weights whole.pt --trust whole.pt", NAMED, ""),
    "pickled model": (files.pickled, "--model whole.pt --trust whole.pt", NAMED, ""),
    "TorchScript": (files.script, "--model net.pt", BY_FUNCTION, ""),
    "traced TorchScript": (partial(files.script, "net.ts", traced=True), "--model net.ts", BY_FUNCTION, ""),
    "torch.export": (files.export, "--model net.pt2 --trust net.pt2", NAMED, ""),
    "ONNX": (files.onnx, "--model net.onnx", NODES, ""),
    "ONNX of one input at a time": (partial(files.onnx, batch=1), "--model net.onnx", NODES, ""),
    "ONNX of seven inputs at a time": (partial(files.onnx, batch=7), "--model net.onnx", NODES, ""),
}
RUN = (
    "run --data mine:data --perturb gaussian --magnitude 0.5 --tolerance 1e-9 --round-size 150 --quiet --out first "
    "--max-tests"
)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_tested_replayed_and_resumed(way, capsys):
    setup, options, layers, said = WAYS[way]
    setup()
    assert main([*RUN.split(), "300", *options.split()]) == 0
    assert said in capsys.readouterr().err.replace("\n", " ")
    with closing(Reader("first")) as run:
        start, ids = run.record["start"], [str(row.id) for row in run.faults()]
    assert [each["name"] for each in start["layers"]] == [*layers, "output"]
    if layers and "black box" not in way:
        assert [each["shape"] for each in start["layers"]] == [[3, 4, 4], [8], [4]]
    assert main(["replay", "first", *ids[:2], "--json"]) == 0
    replayed = json.loads(capsys.readouterr().out)
    assert replayed["changes"] == []
    assert [(each["is_same"], each["input"]["gap"]) for each in replayed["faults"]] == [(True, 0.0)] * 2
    rounding = 1e-6 if "black box" in way else 0.0  # a function is sent the input alone, not in a batch
    assert max(each["output"]["gap"] for each in replayed["faults"]) <= rounding
    assert main(["resume", "first", "--max-tests", "600", "--quiet"]) == 0
    assert main([*RUN.replace("first", "whole").split(), "600", *options.split()]) == 0
    with closing(Reader("first")) as resumed, closing(Reader("whole")) as whole:
        assert resumed.summary()["tests"] == 600
        assert [f.id for f in resumed.faults()] == [f.id for f in whole.faults()] != []


@pytest.mark.parametrize("way", [way for way in WAYS if WAYS[way][2]])
def test_the_activations_are_those_of_the_net(way):
    setup, options, layers, _ = WAYS[way]
    setup()
    values = dict(zip(*[iter(re.split(" ?--(?=[a-z])| ", options)[1:])] * 2, strict=True))
    values["trust"] = [values["trust"]] if "trust" in values else None
    with pytest.warns() if "checkpoint" in way else torch.no_grad():
        target = Origin.of({**values, "data": "mine:data"}).target()
    seen, names = {}, dict(zip([*layers, "output"], ["first", "second", "output"], strict=True))
    with target.opened(), torch.no_grad():
        found = {each.name: each for each in target.find_layers(files.inputs()[0])}
        assert list(found) == list(names)
        seen["output"] = target.forward(
            files.inputs(), lambda name, each: seen.update({names[name]: each.clone()}), found
        )
        assert torch.equal(target.forward(files.inputs()), seen["output"])
    wanted = files.expected()
    assert seen.keys() == wanted.keys()
    for name, each in wanted.items():
        torch.testing.assert_close(seen[name], each, rtol=1e-5, atol=1e-5)


def test_a_replaced_file_is_no_longer_trusted(capsys):
    files.pickled()
    assert main([*RUN.split(), "300", "--model", "whole.pt", "--trust", "whole.pt"]) == 0
    files.harmful()
    assert main(["resume", "first", "--max-tests", "600", "--quiet"]) == 3
    assert "whole.pt must be as it was trusted, but has changed" in capsys.readouterr().err
    assert not Path("harm").exists()


def test_a_run_is_not_resumed_with_another_onnx_file(capsys):
    files.onnx()
    assert main([*RUN.split(), "300", "--model", "net.onnx"]) == 0
    files.onnx("other.onnx", last="Neg")
    assert main(["resume", "first", "--max-tests", "600", "--quiet", "--model", "other.onnx"]) == 3
    assert "the model must be the same as in the run" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["black box", "ONNX"])
def test_an_attack_needs_a_gradient(way, capsys):
    setup, options, *_ = WAYS[way]
    setup()
    assert main([*RUN.replace("gaussian", "fgsm").split(), "300", *options.split()]) == 2
    assert "needs the model's gradient and this target gives none" in capsys.readouterr().err
    assert not Path("first").exists()


@pytest.mark.parametrize("way", ["TorchScript", "torch.export"])
def test_compiled_programs_can_be_attacked(way):
    setup, options, *_ = WAYS[way]
    found = []
    for named in ("--model mine:make_net", options):
        setup()
        out = f"run{len(found)}"
        words = RUN.replace("gaussian", "fgsm").replace("first", out).replace("0.5", "0.1")
        assert main([*words.split(), "300", *named.split()]) == 0
        with closing(Reader(out)) as run:
            found.append([fault.id for fault in run.faults()])
    assert found[0] == found[1] != []


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", ["factory", "TorchScript", "traced TorchScript", "torch.export"])
def test_a_program_is_tested_on_a_gpu(way, capsys):
    setup, options, layers, _ = WAYS[way]
    setup()
    assert main([*RUN.split(), "300", *options.split(), "--device", "cuda"]) == 0
    with closing(Reader("first")) as run:
        assert [each["name"] for each in run.record["start"]["layers"]] == [*layers, "output"]
        assert run.record["start"]["device"].startswith("cuda")
        ids = [str(row.id) for row in run.faults()]
    assert main(["replay", "first", *ids[:2], "--json"]) == 0
