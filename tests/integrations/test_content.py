"""Groups of faults by what is in the picture, as the model sees it."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from user_module import go_to

import themis
from themis import UsageError
from themis.cli import main
from themis_integrations.content import find_clusters, group_by_content

MINE = """
import torch
from torch import nn

def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    with torch.no_grad():  # which of two neighbours is brighter, which any noise changes
        net[0].weight[0], net[0].bias[0] = 0, 0
        net[0].weight[0, 0, 1, 1] = 1
        net[3].weight.zero_(), net[3].bias.zero_()
        net[3].weight[0, 9], net[3].weight[1, 10] = 1, 1
    return net

def make_data():
    draw = torch.Generator().manual_seed(0)
    scene = torch.arange(90) % 3
    inputs = 0.45 + 0.1 * torch.rand(90, 1, 8, 8, generator=draw)
    inputs[scene == 0, :, :, :4] += 0.4  # bright on the left, on the right, or in stripes
    inputs[scene == 1, :, :, 4:] -= 0.4
    inputs[scene == 2, :, ::2] += 0.3
    return inputs
"""
SPACE = {}
exec(MINE, SPACE)
OPTIONS = {"magnitude": 0.5, "max_tests": 800}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    return out, themis.run(SPACE["make_net"](), SPACE["make_data"](), "gaussian", out=out, **OPTIONS)


def scenes(group, faults):
    seed_of = {fault.id: fault.seed_id for fault in faults}
    return {seed_of[id] % 3 for id in group.ids}


def test_faults_are_grouped_by_the_scene_of_their_seed(found):
    run = found[1]
    groups = group_by_content(run)
    assert len(groups) == 3
    assert [len(scenes(group, run.faults)) for group in groups] == [1, 1, 1]
    assert sum(map(len, groups)) == len(run.faults)
    assert [len(group) for group in groups] == sorted(map(len, groups), reverse=True)
    assert all(group.text.startswith("seeds of class ") for group in groups)
    assert all(fault.id in group.ids for group in groups for fault in group.representatives)


def test_a_run_folder_gives_the_same_groups(found):
    out, run = found
    stored = group_by_content(themis.open_run(out, SPACE["make_net"](), SPACE["make_data"]()))
    assert [group.ids for group in stored] == [group.ids for group in group_by_content(run)]


def test_planted_clusters_are_found_and_a_single_cloud_is_one():
    draw = np.random.default_rng(0)
    cloud = draw.normal(size=(600, 64)).astype(np.float32)
    assert find_clusters(cloud, 20).max() == 0
    planted = np.arange(600) % 5
    found = find_clusters(cloud + 12 * draw.normal(size=(5, 64)).astype(np.float32)[planted] / 4, 20)
    assert len(set(zip(planted.tolist(), found.tolist(), strict=True))) == found.max() + 1 == 5
    assert find_clusters(cloud[:2], 20).max() == 0
    assert find_clusters(np.ones((50, 4), np.float32), 20).max() == 0


def test_more_seeds_than_the_sample_join_the_nearest_cluster(monkeypatch):
    monkeypatch.setattr("themis_integrations.content.CLUSTERED_SEEDS", 60)
    planted = np.arange(500) % 2
    features = (planted[:, None] * 4 + np.random.default_rng(0).normal(size=(500, 8))).astype(np.float32)
    found = find_clusters(features, 20)
    assert len(set(zip(planted.tolist(), found.tolist(), strict=True))) == 2


def test_the_command_groups_by_content(tmp_path, monkeypatch, capsys):
    go_to(tmp_path, monkeypatch, MINE)
    source = ["--model", "mine:make_net", "--data", "mine:make_data", "--perturb", "gaussian", "--magnitude", "0.5"]
    assert main(["run", *source, "--max-tests", "800", "--out", "run"]) == 0
    capsys.readouterr()
    assert main(["groups", "run", "--by", "content", "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)
    assert len(groups) == 3
    assert main(["groups", "run", "--by", "content", "--most", "2"]) == 0
    assert "in 2 groups" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by", "contents"], "--by must be change or content, got 'contents': did you mean 'content'?"),
        (["--by", "content", "--apart", "0.5"], "--apart must be left out with --by content"),
        (["--model", "mine:other"], "--model must be combined with another --by"),
    ],
)
def test_wrong_use_is_refused_in_one_line(found, capsys, arguments, message):
    assert main(["groups", str(found[0]), *arguments]) != 0
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_model_without_hidden_layers_is_refused():
    run = themis.run(nn.Linear(6, 3), torch.rand(60, 6), "gaussian", magnitude=0.6, max_tests=300)
    with pytest.raises(UsageError, match="this one has none"):
        group_by_content(run)
