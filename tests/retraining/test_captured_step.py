"""A training step that is captured as a CUDA graph trains like the plain one; what cannot be captured trains too."""

import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.compute.rng import host_randomness
from themis.data.seeds import from_arrays
from themis.measure.captured import CaptureError
from themis.perturb import choose_perturbation
from themis.retraining import tune as tune_module
from themis.retraining.captured_step import _unchanged, can_capture
from themis.retraining.material import Material
from themis.retraining.recipe import OPTIMISERS, Recipe
from themis.retraining.tune import tune
from themis.retraining.weights import CHECKPOINT_FILE, channels_last

NOISE = choose_perturbation("gaussian", 0.3)
RECIPE = {"epochs": 3, "batches": 6, "fresh": 0.5, "share": 1.0}
RATES = {"sgd": 0.05, "adam": 3e-3, "adamw": 3e-3}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Net(nn.Module):
    """A small net with batch normalisation and dropout; `disturb` is called in each pass."""

    def __init__(self, disturb=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 48, bias=False)  # a bias before normalisation would have a gradient of rounding only
        self.normalise, self.drop = nn.BatchNorm1d(48), nn.Dropout(0.3)
        self.last, self.disturb = nn.Linear(48, 4), disturb
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs):
        hidden = self.drop(self.normalise(self.first(inputs.flatten(1))).relu())
        if self.disturb is not None and self.training:
            hidden = self.disturb(self, hidden)
        return self.last(hidden)


class Pictures(nn.Module):
    """A small convolutional net; `flatten` turns its activations into rows."""

    def __init__(self, flatten):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3)
        self.last, self.flatten = nn.Linear(128, 4), flatten

    def forward(self, inputs):
        return self.last(self.flatten(self.second(self.first(inputs).relu()).relu()))


def view(x):
    return x.view(len(x), -1)


@pytest.fixture
def material():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(400) % 4
    inputs = torch.rand(400, 1, 8, 8, generator=generator) * 0.8
    inputs[torch.arange(400), 0, labels] += 0.2
    pool, clean = from_arrays(inputs[:150], labels[:150]), from_arrays(inputs[150:], labels[150:])
    return Material(inputs[:90].flip(3), labels[:90], torch.arange(90), pool, clean)


def train(net, material, device="cpu", **options):
    material = replace(material, loss=options.pop("loss", None))
    options, recipe = {key: options.pop(key) for key in ("folder", "on_epoch") if key in options}, options
    target = themis.Target(net.to(device), oracle="wrong")
    recipe.setdefault("learning_rate", RATES[recipe.setdefault("optimiser", "adam")])
    return tune(target, material, NOISE, Recipe(**RECIPE, **recipe), **options)


def weights(tuned):
    return tuned.ends[1]


def assert_same(tuned, other, *, is_coarse=False):
    """The same training up to rounding, which is far less than what was learned.

    is_coarse: of 8 bits, where the steps of Adam carry single weights further away, those with little gradient.
    """
    losses = [[epoch.training_loss for epoch in each.history[1:]] for each in (tuned, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3 if is_coarse else 1e-4)
    learned = {name: tensor.double() - tuned.ends[0][name] for name, tensor in weights(tuned).items()}
    assert float(learned["first.weight"].abs().max()) > 5e-3
    for name, tensor in weights(tuned).items():
        if is_coarse:
            assert float((tensor.double() - weights(other)[name]).norm()) <= 0.05 * float(learned[name].norm()), name
        else:
            torch.testing.assert_close(tensor, weights(other)[name], rtol=1e-4, atol=1e-4)


@pytest.fixture
def captured(monkeypatch):
    """What became of each attempt to capture a step: True, or the reason why it is impossible."""
    outcomes, capture = [], tune_module.capture

    def observed(*arguments):
        try:
            step = capture(*arguments)
        except CaptureError as error:
            outcomes.append(str(error))
            raise
        outcomes.append(True)
        return step

    monkeypatch.setattr(tune_module, "capture", observed)
    return outcomes


@pytest.fixture
def plainly(monkeypatch):
    """Trains without a graph, and with the optimiser as it is on a CPU."""

    def run(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(tune_module, "can_capture", lambda module, parameters: False)
            return train(*arguments, **options)

    return run


class TestOnCPU:
    def test_trainings_that_differ_are_told_apart(self, material):
        tuned, other = train(Net(), material), train(Net(), material, learning_rate=2.9e-3)
        for is_coarse in (False, True):
            assert_same(tuned, train(Net(), material), is_coarse=is_coarse)
            with pytest.raises(AssertionError):
                assert_same(tuned, other, is_coarse=is_coarse)

    def test_no_step_is_captured(self, material, captured):
        net = Net()
        assert not can_capture(net, list(net.parameters()))
        assert train(net, material).best > 0
        assert not captured

    @pytest.mark.parametrize("optimiser", OPTIMISERS)
    @pytest.mark.parametrize("n_before", [0, 2])
    def test_trial_steps_leave_no_trace(self, optimiser, n_before):
        net, other = Net().train(), Net().train()
        recipe, inputs = Recipe(optimiser=optimiser, learning_rate=0.01), torch.rand(16, 64)
        optimisers = [tune_module._optimiser(recipe, list(each.parameters()), False) for each in (net, other)]
        total = torch.zeros(())

        def step(net, optimiser):
            optimiser.zero_grad()
            loss = net(inputs).square().mean()
            loss.backward()
            optimiser.step()
            return loss.detach()

        def several(net, optimiser, n):
            torch.manual_seed(5)
            return [step(net, optimiser) for _ in range(n)]

        for each, its in zip((net, other), optimisers, strict=True):
            several(each, its, n_before)
        torch.manual_seed(7)
        with _unchanged(net, optimisers[0], [total], torch.device("cpu")):
            total += step(net, optimisers[0])
            total += step(net, optimisers[0])
        drawn = torch.rand(3)
        torch.manual_seed(7)
        assert torch.equal(drawn, torch.rand(3))
        assert not total
        assert all(parameter.grad is None for parameter in net.parameters())
        assert several(net, optimisers[0], 3) == several(other, optimisers[1], 3)
        for name, tensor in net.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name

    @pytest.mark.parametrize("draw", [lambda: torch.rand(1), random.random, np.random.rand])
    def test_random_numbers_of_the_host_are_noticed(self, draw):
        before = host_randomness()
        assert host_randomness() == before
        draw()
        assert host_randomness() != before

    @pytest.mark.parametrize("optimiser", OPTIMISERS)
    def test_a_training_resumes_on_another_device(self, material, optimiser, tmp_path):
        whole, folder = train(Net(), material, optimiser=optimiser), tmp_path / "training"
        stop_after(1, Net(), material, folder=folder, optimiser=optimiser)
        state = torch.load(folder / CHECKPOINT_FILE)
        for group in state["optimiser"]["param_groups"]:  # as a GPU leaves them
            group |= {"lr": torch.tensor(9.0), "fused": True} | ({"capturable": True} if "capturable" in group else {})
        torch.save(state, folder / CHECKPOINT_FILE)
        resumed = train(Net(), material, optimiser=optimiser, folder=folder)
        assert all(torch.equal(tensor, weights(whole)[name]) for name, tensor in weights(resumed).items())

    def test_nothing_is_left_of_a_training_that_begins_again(self, material, monkeypatch):
        assert_begins_again(material, "cpu", monkeypatch)


def assert_begins_again(material, device, monkeypatch):
    """A training that begins again with a lower rate ends with the same weights as one that began with it."""
    plain = train(Net(), material, device, learning_rate=3e-6, statistics="update")
    monkeypatch.setattr(tune_module, "MAX_FIRST_FALL", -2.0)  # as if every first epoch broke the model
    with pytest.warns(RuntimeWarning) as warned:
        again = train(Net(), material, device, learning_rate=None, statistics="update")
    assert [str(each.message).rpartition(" ")[2] for each in warned] == ["3e-05", "3e-06", "it"]  # lower it
    assert [epoch.training_loss for epoch in again.history] == [epoch.training_loss for epoch in plain.history]
    for name, tensor in weights(again).items():
        assert torch.equal(tensor, weights(plain)[name]), name
    assert not torch.equal(weights(again)["first.weight"], again.ends[0]["first.weight"])


class StoppedError(Exception):
    pass


@pytest.mark.parametrize(("flatten", "is_last"), [(nn.Flatten(), True), (view, False)])
def test_channels_come_last_where_the_model_learns_like_this(flatten, is_last):
    net, inputs = Pictures(flatten), torch.rand(2, 1, 8, 8)
    with channels_last(net, lambda: net(inputs)):
        assert net.second.weight.is_contiguous(memory_format=torch.channels_last) == is_last
        assert net.second.weight.is_contiguous() != is_last
        assert net.second.weight.grad is None
    assert net.second.weight.is_contiguous()


def test_a_training_with_channels_last_resumes_from_one_with_channels_first(material, monkeypatch, tmp_path):
    net, copied = Pictures(nn.Flatten()), tune_module.trainable_copy
    whole = train(net, material)
    stop_after(1, net, material, folder=tmp_path)

    @contextmanager
    def lay_out(target):
        with copied(target) as trained, channels_last(trained.module, lambda: trained.module(torch.rand(2, 1, 8, 8))):
            yield trained

    monkeypatch.setattr(tune_module, "trainable_copy", lay_out)
    assert_same(train(net, material, folder=tmp_path), whole)


def stop_after(number, *arguments, **options):
    def stop(epoch):
        if epoch.number == number:
            raise StoppedError

    with pytest.raises(StoppedError):
        train(*arguments, on_epoch=stop, **options)


def wait(net, hidden):
    return hidden if float(hidden.detach().sum()) > -1e9 else -hidden


def synchronise(net, hidden):
    torch.cuda.synchronize()
    return hidden


def choose_rows(net, hidden):
    return hidden * (hidden.detach()[hidden.detach() > 0].numel() > 0)


def draw_on_host(net, hidden):
    return hidden * (1 + 0.1 * random.Random(int(torch.randint(9, ()))).random())


def replace_buffer(net, hidden):
    net.seen = net.seen * 0.9 + hidden.detach().mean()
    return hidden + 0.1 * net.seen


def run_out_of_memory(net, hidden):
    if torch.cuda.is_current_stream_capturing():
        torch.empty(1 << 50, dtype=torch.uint8, device=hidden.device)
    return hidden


@pytest.mark.slow
@needs_gpu
class TestOnGPU:
    @pytest.mark.parametrize("optimiser", OPTIMISERS)
    @pytest.mark.parametrize("statistics", ["keep", "update"])
    @pytest.mark.parametrize("others", [{}, {"accumulate": 2}, {"autocast": True}, {"distill": 0.0, "steer": 0.0}])
    def test_a_captured_step_trains_like_the_plain_one(
        self, material, captured, plainly, optimiser, statistics, others
    ):
        options = {"optimiser": optimiser, "statistics": statistics, "weight_decay": 0.01, **others}
        is_coarse = "autocast" in others
        tuned = train(Net(), material, "cuda", **options)
        assert captured == [True]
        assert_same(tuned, plainly(Net(), material, "cuda", **options), is_coarse=is_coarse)
        assert captured == [True]
        assert_same(tuned, train(Net(), material, "cuda", **options), is_coarse=is_coarse)

    @pytest.mark.parametrize("flatten", [nn.Flatten(), view])
    def test_convolutions_are_trained_in_either_layout(self, material, captured, plainly, flatten):
        tuned = train(Pictures(flatten), material, "cuda")
        assert captured == [True]
        assert tuned.target.module.second.weight.is_contiguous()
        assert_same(tuned, plainly(Pictures(flatten), material, "cuda"))

    @pytest.mark.parametrize("optimiser", OPTIMISERS)
    def test_an_interrupted_training_resumes_to_the_same_weights(self, material, captured, optimiser, tmp_path):
        options = {"optimiser": optimiser, "statistics": "update"}
        whole = train(Net(), material, "cuda", **options)
        for number in (1, 2):
            folder = tmp_path / str(number)
            stop_after(number, Net(), material, "cuda", folder=folder, **options)
            resumed = train(Net(), material, "cuda", folder=folder, **options)
            for name, tensor in weights(resumed).items():
                assert torch.equal(tensor, weights(whole)[name]), name
        assert captured == [True] * 5

    def test_nothing_is_left_of_a_training_that_begins_again(self, material, captured, monkeypatch):
        assert_begins_again(material, "cuda", monkeypatch)
        assert captured == [True] * 4

    @pytest.mark.parametrize("optimiser", OPTIMISERS)
    def test_a_training_that_began_on_a_cpu_goes_on(self, material, captured, optimiser, tmp_path):
        options = {"optimiser": optimiser, "steer": 0.0, "statistics": "update"}
        net = Net()
        net.drop.p = 0.0  # each device has random numbers of its own
        whole = train(net, material, **options)
        stop_after(1, net.cpu(), material, folder=tmp_path, **options)
        resumed = train(net, material, "cuda", folder=tmp_path, **options)
        assert captured == [True]
        for name, tensor in weights(resumed).items():
            torch.testing.assert_close(tensor, weights(whole)[name], rtol=1e-2, atol=1e-3, msg=name)

    @pytest.mark.parametrize(
        "disturb", [wait, synchronise, choose_rows, draw_on_host, replace_buffer, run_out_of_memory]
    )
    def test_a_model_that_cannot_be_captured_trains_on_the_plain_path(self, material, captured, plainly, disturb):
        tuned = train(Net(disturb), material, "cuda")
        assert len(captured) == 1
        assert captured != [True]
        assert_same(tuned, plainly(Net(disturb), material, "cuda"))
        assert train(Net(), material, "cuda").best > 0
        assert captured[1:] == [True], "the next training is captured"

    def test_a_loss_that_waits_for_the_gpu_is_not_captured_and_others_are(self, material, captured, plainly):
        def waiting(outputs, labels):
            each = nn.functional.cross_entropy(outputs, labels, reduction="none")
            return each * (2.0 if float(each.detach().mean()) > 0 else 1.0)

        def short(outputs, labels):
            return nn.functional.cross_entropy(outputs, labels) * 2

        tuned = [train(Net(), material, "cuda", loss=loss) for loss in (waiting, short)]
        assert captured[0] is not True
        assert captured[1:] == [True]
        for each, loss in zip(tuned, (waiting, short), strict=True):
            assert_same(each, plainly(Net(), material, "cuda", loss=loss))

    def test_an_error_of_the_loss_is_raised(self, material):
        def broken(outputs, labels):
            raise ZeroDivisionError("no such loss")

        with pytest.raises(ZeroDivisionError, match="no such loss"):
            train(Net(), material, "cuda", loss=broken)

    def test_sparse_gradients_are_trained_as_before(self, captured):
        net = nn.Sequential(nn.Embedding(9, 4, sparse=True)).cuda()
        assert not can_capture(net, list(net.parameters()))
