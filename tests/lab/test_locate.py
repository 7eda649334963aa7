"""Locate: the layer that was broken on purpose is named first, from a run in memory and from its folder."""

import json
import os
import sys

import numpy as np
import pytest
import torch
from planted import MARKED, NETS, Cause, cause_of, digits, layer_name, planted

import themis
from themis import UsageError, cli
from themis.runs.analysis.groups import group
from themis.runs.replay import Replayer, read_run
from themis.runs.store.reader import Reader
from themis_lab.locate import learn_baseline, locate

CASES = [(net, layer) for net in ("mlp", "conv", "strided", "skip", "deep") for layer in range(len(NETS[net]().stages))]


def campaign(net, causes, random_seed=0, **options):
    inputs, labels = digits()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(random_seed))[:200]
    target = themis.Target(planted(net, causes))
    limits = {"max_tests": 1500, "tolerance": 1e-9, "plateau": None, "policy": "random"}
    return themis.run(target, (inputs[rows], labels[rows]), MARKED, random_seed=random_seed, **limits, **options)


def broken(run, causes):
    return [run.faults[k] for k in np.flatnonzero(cause_of(causes, run.faults.columns["theta"]) == 0).tolist()]


def plant(case, layer):
    """A layer that is pushed to a class, one that amplifies, and one in which four neurons or channels do."""
    low = 0.7 if case % 2 else 0.15
    how = ({"answer": case % 10}, {"gain": 3.0}, {"gain": 8.0, "neurons": 4})[case % 3]
    return (Cause(case % 2, low, low + 0.15, layer, **how),)


def test_the_broken_layer_is_named_first():
    of_groups, of_faults = [], []
    for case, (net, layer) in enumerate(CASES):
        causes = plant(case, layer)
        run = campaign(net, causes, case)
        faults, baseline, name = broken(run, causes), learn_baseline(run), layer_name(net, layer)
        of_groups.append(locate(faults, baseline).first == name)
        of_faults += [locate([fault], baseline).first == name for fault in faults[:5]]
    print(
        f"first: {sum(of_groups)} of {len(of_groups)} sets of faults, {sum(of_faults)} of {len(of_faults)} single ones"
    )
    assert len(of_groups) >= 20
    assert np.mean(of_groups) >= 0.9
    assert np.mean(of_faults) >= 0.75


def test_broken_neurons_come_first_and_the_other_layers_are_sorted_by_score():
    causes = (Cause(0, 0.7, 0.85, 1, None, 8.0, 3),)
    run = campaign("strided", causes)
    found = locate(broken(run, causes), learn_baseline(run))
    assert found.first == "relu.1"
    assert {each.place[0] for each in found.layers[0].neurons} <= {0, 1, 2}  # channels
    assert all(len(each.place) == 3 for each in found.layers[0].neurons)
    assert found.layers[0].times > 1.5
    scores = [each.score for each in found.layers[1:]]
    assert scores == sorted(scores, reverse=True)
    assert {each.layer for each in found.layers} == set(run.faults.layers)
    assert json.loads(json.dumps(found.as_dict()))["layers"][0]["layer"] == "relu.1"


def test_a_group_is_located_from_the_run_and_from_its_folder(tmp_path):
    causes = (Cause(0, 0.7, 0.85, 2, 3),)
    run = campaign("mlp", causes, out=tmp_path / "run")
    each = next(each for each in group(run.faults) if "answered as 3" in each.text)
    here = locate([run.faults.by_id(id) for id in each.ids], learn_baseline(run))
    assert here.first == "relu.2"
    assert here.n_faults == 24
    inputs, labels = digits()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[:200]
    target, folder = themis.Target(planted("mlp", causes)), Reader(tmp_path / "run")
    again = learn_baseline(read_run(Replayer(folder, target, (inputs[rows], labels[rows]), MARKED)))
    found = folder.faults()
    there = locate([found.by_id(id) for id in each.ids], again)
    assert there.first == "relu.2"
    assert there.layers[0].times == pytest.approx(here.layers[0].times, rel=0.2)


def test_faults_that_cannot_be_located_are_refused(tmp_path):
    run = campaign("mlp", (Cause(0, 0.7, 0.85, 2, 3),))
    baseline = learn_baseline(run)
    with pytest.raises(UsageError, match="there must be a fault to locate, got none"):
        locate([], baseline)
    seeds = digits()[0][:100]
    other = learn_baseline(themis.run(planted("mlp", ()), seeds, MARKED, max_tests=100))
    missing = next(fault for fault in run.faults if fault.seed_id >= 100)
    with pytest.raises(themis.DataError, match=f"the data must hold the fault's seed {missing.seed_id}"):
        locate([missing], other)
    with pytest.raises(themis.DataError, match="ordinary tests, but it passed 0 of 10"):
        learn_baseline(themis.run(planted("mlp", (Cause(2, 0.001, 1, 3, 3),)), seeds[:10], MARKED, max_tests=50), n=10)


MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.last = nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 3)

    def forward(self, x):
        bright = x.mean((1, 2, 3))[:, None] > 0.6
        h = self.first(x.flatten(1) - 0.5)
        return self.last(self.relu(torch.where(bright, 10 * h + 5, h)))
"""


def test_the_command_creates_the_model_to_locate(tmp_path, monkeypatch, capsys):
    (tmp_path / "located_net.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(cli.COMMANDS, "groups", "faults as a few stories")
    inputs = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.3
    np.savez("data.npz", inputs=inputs)
    source = ["--model", "located_net:Net", "--data", "npz:data.npz", "--perturb", "brightness"]
    assert cli.main(["run", *source, "--max-tests", "640", "--tolerance", "1e-9", "--quiet", "--out", "run"]) == 0
    capsys.readouterr()
    assert cli.main(["locate", "run"]) == 0
    assert "starts in relu: " in capsys.readouterr().out
    assert cli.main(["locate", "run", "--json", "--device", "cpu"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "relu" in [each["located"]["layers"][0]["layer"] for each in listed]
    assert os.getcwd() == str(tmp_path)
    sys.modules.pop("located_net")
