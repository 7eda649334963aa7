"""Planted mistakes in inputs and labels are found and named."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from user_module import TROUBLED, go_to

import themis
from themis import Target
from themis.campaign.preflight import check
from themis.cli import main
from themis.target.diagnose import is_near_chance, suspect


class Expects(nn.Module):
    """A model that was trained on inputs prepared differently."""

    def __init__(self, net, undo):
        super().__init__()
        self.net, self.undo = net, undo

    def forward(self, x):
        return self.net(self.undo(x))


MISTAKES = {
    "bytes": (lambda x: x / 255, "the model expects inputs in 0..255"),
    "transposed": (lambda x: x.transpose(2, 3), "rows and columns are swapped"),
    "negatives": (lambda x: 1 - x, "the images are negatives"),
}


@pytest.mark.parametrize("name", [name for name, (_, words) in MISTAKES.items() if words])
def test_a_mistake_in_the_inputs_is_found(trained, name):
    model, digits = trained
    undo, words = MISTAKES[name]
    target = Target(Expects(model, undo))
    with target.opened():
        found = suspect(target, digits.inputs[:300], digits.labels[:300])
    assert found[0].what == words
    assert found[0].accuracy > 0.9


def test_what_helps_far_less_than_another_correction_is_not_suspected():
    class Above(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0] - 5, 5 - x[:, 0]], 1)

    inputs = torch.arange(60.0).view(-1, 1) % 10
    target, labels = Target(Above(), bounds=(0, 10)), (inputs[:, 0] >= 4).long()
    with target.opened():
        found = suspect(target, inputs, labels)
    assert [suspicion.what[:32] for suspicion in found] == ["the labels are in another order:"]
    assert found[0].accuracy == 0.9  # inputs in -1..1 would make 60% correct


def test_an_accurate_model_raises_no_suspicion(trained):
    model, digits = trained
    target = Target(model)
    with target.opened():
        assert suspect(target, digits.inputs[:300], digits.labels[:300]) == []


def test_labels_in_another_order_are_found(trained):
    model, digits = trained
    order = torch.tensor([3, 1, 4, 0, 5, 9, 2, 6, 8, 7])
    seen = check(Target(model), (digits.inputs, order[digits.labels]))
    assert seen.suspicions[0].what.startswith("the labels are in another order: the model says ")
    assert seen.suspicions[0].accuracy > 0.9


class Colours(nn.Module):
    """Returns which channel is brightest."""

    def forward(self, x):
        return torch.relu(x).mean((2, 3))


def test_channels_in_another_order_are_found():
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (200,), generator=rng)
    inputs = torch.rand(200, 3, 4, 4, generator=rng) * 0.3
    inputs[torch.arange(200), labels] += 0.5
    target = Target(Colours())
    with target.opened():
        found = suspect(target, inputs.flip(1), labels)
    assert "the channels are in reverse order (BGR instead of RGB)" in [each.what for each in found]


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("ImageNet", [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ("CIFAR-10", [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]),
    ],
)
def test_a_forgotten_normalisation_is_found(name, mean, std):
    options = f"--mean {','.join(map(str, mean))} --std {','.join(map(str, std))}"
    mean, std = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    class Signed(nn.Module):
        """Class 1 if the normalised image is brighter than average, which raw images always are."""

        def forward(self, x):
            score = torch.tanh(x).mean((1, 2, 3))
            return torch.stack([-score, score], 1)

    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (200,), generator=rng)
    noise = 0.02 * torch.randn(200, 3, 6, 6, generator=rng)
    inputs = (mean + std * (labels * 2.0 - 1).view(-1, 1, 1, 1) + noise).clamp(0, 1)
    target = Target(Signed())
    with target.opened():
        found = suspect(target, inputs, labels)
    (remedy,) = (each.remedy for each in found if each.what.endswith(f" normalised as for {name}"))
    assert options in remedy


@pytest.mark.parametrize(("right", "is_chance"), [(25, True), (60, False), (0, True)])
def test_chance_is_distinguished_from_skill(right, is_chance):
    assert is_near_chance(right, 256, 10) == is_chance


def test_a_campaign_on_a_model_at_chance_warns(trained):
    model, digits = trained
    with pytest.warns(RuntimeWarning, match="clean answers are the same.*themis check"):
        themis.run(Target(Expects(model, lambda x: x / 255)), digits, "gaussian", max_tests=300, max_seeds=300)


@pytest.fixture
def here(tmp_path, monkeypatch):
    return go_to(tmp_path, monkeypatch, TROUBLED)


def test_check_describes_the_model_and_how_to_start(here, capsys):
    assert main(["check", "--model", "mine:net", "--data", "mine:data", "--magnitude", "0.3"]) == 0
    said = capsys.readouterr().out
    assert "19 in 2 layers" in said
    assert "30 of shape 1x8x8, " in said
    assert ", with bounds 0,1" in said
    assert "tests per second" in said
    assert "Start the campaign: themis run --model mine:net --data mine:data --magnitude 0.3 --perturb gaussian" in said


def test_check_of_a_model_at_chance_asks_to_fix_it_first(tmp_path, monkeypatch, capsys):
    labels = "def shifted(): x = data(); return x, (net()(x).argmax(1) + 1) % 3"
    go_to(tmp_path, monkeypatch, f"{TROUBLED}\n{labels}\n")
    assert main(["check", "--model", "mine:net", "--data", "mine:shifted"]) == 3
    said = capsys.readouterr().out
    assert "Once this is fixed, start the campaign: themis run --model mine:net --data mine:shifted" in said


def test_check_says_that_inputs_are_outside_the_bounds(tmp_path, monkeypatch, capsys):
    go_to(tmp_path, monkeypatch, f"{TROUBLED}\ndef bytes_(): return 255 * data()\n")
    assert main(["check", "--model", "mine:net", "--data", "mine:bytes_"]) == 3
    said = capsys.readouterr().out
    assert ", with bounds 0,1" in said
    assert "! inputs must lie in bounds (0, 1)" in said


def test_check_prints_json(here, capsys):
    assert main(["check", "--model", "mine:net", "--data", "mine:data", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["start"]["n_neurons"] == 19
    assert seen["suspicions"] == []


class Configured(nn.Module):
    """Returns whether a picture is brighter than the mean that its configuration names, as models of timm do."""

    def __init__(self, mean=(0.4, 0.5, 0.6)):
        super().__init__()
        self.relu = nn.ReLU()
        self.pretrained_cfg = {"mean": mean, "std": (0.2, 0.2, 0.2), "input_size": (3, 4, 4)}

    def forward(self, x):
        score = self.relu(x.mean((1, 2, 3)) + 10) - 10
        return torch.stack([-score, score], 1)


def bright_and_dark(scale=1.0, n=48):
    labels = torch.arange(n) % 2
    noise = 0.05 * torch.rand(n, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    return scale * (0.35 + 0.25 * labels.view(-1, 1, 1, 1) + noise), labels


@pytest.mark.parametrize("scale", [1, 255])
def test_a_normalisation_that_the_model_names_and_needs_is_warned_of(scale):
    inputs, labels = bright_and_dark(scale)
    target = Target(Configured(), bounds=(0, scale))
    remedy = "" if scale == 1 else r", \(0, 255\)"
    rule = (
        "the configuration of Configured names a normalisation, which is not applied: with it, the model answers "
        r"100.0% of 48 clean inputs correctly instead of 50.0%; pass preprocess="
        rf"themis.Normalize.of\(model{remedy}\) \(--mean "
    )
    with pytest.warns(RuntimeWarning, match=rule):
        run = themis.run(target, (inputs, labels), "gaussian", max_tests=64)
    norm = themis.Normalize.of(target.module, target.bounds)
    right = themis.run(replace(target, preprocess=norm), (inputs, labels), "gaussian", max_tests=64)
    assert (run.start.clean_accuracy, right.start.clean_accuracy) == (0.5, 1.0)


def test_without_labels_a_normalisation_that_is_not_applied_is_named():
    inputs, _ = bright_and_dark()
    with pytest.warns(RuntimeWarning, match=r"cannot tell .*: pass preprocess=.*--mean 0.4,0.5,0.6 --std 0.2,0.2,0.2"):
        themis.run(Configured(), inputs, "gaussian", max_tests=64)


class TrainedFurther(Configured):
    """Is right without the normalisation that its configuration still names."""

    def forward(self, x):
        return super().forward(x - 0.5)


@pytest.mark.parametrize(
    ("model", "how"),
    [
        (TrainedFurther(), {}),
        (Configured(mean=(0.5,) * 4), {}),
        (Configured(), {"preprocess": themis.Normalize(0.3, 0.5)}),
        (nn.Sequential(Configured()), {}),
    ],
    ids=["trained further", "other channels", "normalised", "part of a model"],
)
def test_a_normalisation_is_not_mentioned_where_it_is_not_known_to_help(model, how):
    with warnings.catch_warnings(record=True) as seen:
        themis.run(Target(model, **how), bright_and_dark(), "gaussian", max_tests=64)
    assert not any("names a normalisation" in str(each.message) for each in seen)


def test_check_names_a_missing_normalisation():
    seen = check(Target(Configured()), bright_and_dark())
    assert any("the configuration of Configured names a normalisation" in each for each in seen.warnings)
