"""Models that run with fewer bits where torch.autocast considers that safe."""

import pytest
import torch
from torch import nn

import themis
from themis import Target
from themis.cli import main
from themis.errors import UsageError

TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 3))


def pictures(n=40):
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", TYPES)
def test_activations_and_outputs_are_those_of_torch(name):
    net, inputs, seen = make_net().eval(), pictures(4), {}
    target = Target(net, autocast=name)
    layers = {layer.name: layer for layer in target.find_layers(inputs[0])}
    outputs = target.forward(inputs, lambda name, values: seen.update({name: values.clone()}), layers)
    with torch.autocast("cpu", TYPES[name]):
        expected = net(inputs)
        hidden = net[:2](inputs)
    assert outputs.dtype == TYPES[name]
    assert torch.equal(outputs, expected)
    first = next(iter(seen.values()))
    assert torch.equal(first.flatten(1).float(), hidden.flatten(1).float())
    assert not torch.equal(expected.float(), net(inputs))


def test_a_campaign_differs_little_and_its_weights_stay_as_they_are():
    net, inputs = make_net(), pictures()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    options = {"magnitude": 2.0, "max_tests": 600, "coverage": None, "plateau": None, "policy": "random"}
    full, half = (themis.run(Target(net, autocast=name), inputs, "gaussian", **options) for name in (None, "bfloat16"))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    found = [dict(zip(run.faults.columns["id"], run.faults.columns["margin"], strict=True)) for run in (full, half)]
    assert len(found[0]) > 20
    assert all(abs(found[0].get(id, 0) - found[1].get(id, 0)) < 0.005 for id in {*found[0], *found[1]}), "but near-ties"
    assert abs(half.coverage - full.coverage) < 0.05


def test_it_is_part_of_the_model_that_was_tested(tmp_path):
    net = make_net()
    assert len({Target(net, autocast=name).fingerprint() for name in (None, *TYPES)}) == 3
    target = Target(net, autocast="bfloat16")
    themis.run(target, pictures(), "gaussian", magnitude=0.9, max_tests=200, out=tmp_path / "run")
    with pytest.raises(themis.ThemisError, match="the model must be the same as in the run"):
        themis.resume(tmp_path / "run", net, pictures(), max_tests=400)
    assert themis.resume(tmp_path / "run", target, pictures(), max_tests=400).summary()["tests"] >= 200


@pytest.mark.parametrize("perturbation", ["fgsm", "rotate"])
def test_attacks_and_gradients_work(perturbation):
    run = themis.run(Target(make_net(), autocast="bfloat16"), pictures(), perturbation, policy="paper", max_tests=60)
    assert run.summary()["tests"] == 60


def test_the_command_line_replays_to_the_bit(tmp_path, monkeypatch, capsys):
    (tmp_path / "cast.py").write_text(
        "import torch\nfrom torch import nn\n\ndef net():\n    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))\n\n"
        "def data():\n    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))\n"
    )
    monkeypatch.chdir(tmp_path)
    words = "run --model cast:net --data cast:data --perturb gaussian --magnitude 0.9 --max-tests 200 --quiet --out run"
    assert main([*words.split(), "--autocast", "bfloat16"]) == 0
    fault = str(themis.open_run("run").faults[0].id)
    assert main(["replay", "run", fault]) == 0
    assert "output  identical, bit for bit" in capsys.readouterr().out


def test_other_types_are_refused():
    with pytest.raises(UsageError, match="autocast must be bfloat16 or float16, or None, got 'int8'"):
        Target(make_net(), autocast="int8")
