"""Layers are found in any module, and tracing leaves no trace in it."""

import pickle

import pytest
import torch
from module_state import assert_same_state, hooks_of, state_of
from nets import WRAPPINGS, Branching, Conv, Functional, Hand, InPlace, Reused, Wrapped
from torch import nn

from themis import ModelError, Target, UsageError
from themis.target.activations import ActivationTracer, flatten
from themis_lab.zoo import lenet5, resnet56


def names(target, example):
    with target.opened():
        return [layer.name for layer in target.find_layers(example)]


def activations(net, inputs):
    target = Target(net, bounds=(-9, 9))
    seen = {}
    with target.opened(), torch.no_grad():
        layers = {layer.name: layer for layer in target.find_layers(inputs[0])}
        outputs = target.forward(
            inputs, lambda name, a: seen.update({name: flatten(a, layers[name], len(inputs)).clone()}), layers
        )
    return seen, outputs


def test_activations_match_those_computed_by_hand():
    seen, outputs = activations(Hand(), torch.tensor([[2.0, -1.0], [-3.0, 1.0]]))
    assert seen["relu"].tolist() == [[2.0, 0.0, 1.0], [0.0, 3.0, 0.0]]
    assert outputs.tolist() == [[2.0, 1.0], [0.0, 0.0]]


def test_functional_activations_are_named_after_the_module_that_calls_them():
    assert names(Target(Functional()), torch.rand(4)) == ["relu()", "tanh()", "sigmoid()", "gelu()", "output"]


def test_activations_are_seen_in_a_layer_of_torch_whose_forward_was_replaced():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    linear = net[0].forward
    net[0].forward = lambda inputs: linear(inputs).relu()
    assert names(Target(net), torch.rand(4)) == ["0.relu()", "output"]
    inputs = torch.rand(2, 4)
    seen, _ = activations(net, inputs)
    assert torch.equal(seen["0.relu()"], net[0](inputs))


def test_a_module_called_several_times_is_a_layer_each_time():
    found = names(Target(Reused()), torch.rand(4))
    assert found == ["act", "act#2", "act#3", "output"]
    seen, _ = activations(Reused(), torch.rand(2, 4))
    assert not torch.equal(seen["act"], seen["act#2"])


def test_nested_branches_and_activation_modules_of_the_user_are_layers():
    net = Branching()
    assert names(Target(net), torch.rand(4)) == ["left.1.0", "right.1", "output"]
    x = torch.rand(2, 4)
    seen, _ = activations(net, x)
    hidden = net.right[0](x)
    assert torch.allclose(seen["right.1"], hidden * torch.sigmoid(hidden))


def test_an_activation_is_taken_before_a_later_operation_overwrites_it():
    net, x = InPlace(), torch.rand(2, 4)
    seen, _ = activations(net, x)
    assert torch.allclose(seen["relu"], torch.relu(net.a(x)))


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_scores_are_found_in_any_container(wrapping):
    net = Wrapped(WRAPPINGS[wrapping])
    x = torch.rand(2, 4)
    _, outputs = activations(net, x)
    assert torch.equal(outputs, net.net(x))


def test_the_error_for_an_unreadable_output_says_how_to_pick_the_scores():
    net = Wrapped(lambda scores: "nothing")
    with pytest.raises(ModelError, match=r"got str.*output="):
        names(Target(net), torch.rand(4))
    target = Target(Wrapped(lambda scores: {"a": {"b": scores}}), output=lambda result: result["a"]["b"])
    assert names(target, torch.rand(4))[-1] == "output"


def test_a_net_that_ends_in_an_activation_has_one_last_layer():
    net = nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    assert names(Target(net), torch.rand(4)) == ["output"]


def test_the_published_resnet56_has_as_many_neurons_as_the_paper_says():
    target = Target(resnet56())
    with target.opened():
        layers = target.find_layers(torch.rand(3, 32, 32))
    assert layers[-1].stop == 532_490
    assert len(layers) == 56  # 55 ReLUs and the output
    channels = Target(resnet56(), neurons="channel")
    with channels.opened():
        assert channels.find_layers(torch.rand(3, 32, 32))[-1].stop == 16 * 19 + 32 * 18 + 64 * 18 + 10


def test_lenet5_has_its_elements_or_its_channels():
    for neurons, expected in (("element", 6 * 784 + 16 * 196 + 120 + 84 + 10), ("channel", 6 + 16 + 120 + 84 + 10)):
        target = Target(lenet5(), neurons=neurons)
        with target.opened():
            assert target.find_layers(torch.rand(1, 28, 28))[-1].stop == expected


def test_the_type_of_a_target_is_that_of_its_model_before_and_after_it_is_opened():
    target = Target(lenet5())
    with target.opened():
        assert target.dtype == torch.float32
    target.module.double()
    assert target.dtype == torch.float64
    with target.opened(), torch.no_grad():
        assert target.dtype == target.forward(torch.rand(2, 1, 28, 28)).dtype == torch.float64


def test_a_channel_is_its_spatial_mean():
    target = Target(lenet5(), neurons="channel")
    x, seen = torch.rand(2, 1, 28, 28), {}
    with target.opened(), torch.no_grad():
        layers = {layer.name: layer for layer in target.find_layers(x[0])}
        target.forward(x, lambda name, a: seen.update({name: flatten(a, layers[name], 2)}), layers)
        assert torch.allclose(seen["relu()"], torch.relu(target.module.conv1(x)).mean((2, 3)))


def test_globs_pick_activations_and_module_outputs():
    net = lenet5()
    assert names(Target(net, layers="conv*"), torch.rand(1, 28, 28)) == ["conv1", "conv2"]
    assert names(Target(net, layers=["fcs.1", "relu()*"]), torch.rand(1, 28, 28)) == [
        "relu()", "relu()#2", "relu()#3", "fcs.1", "relu()#4",
    ]  # fmt: skip


def test_a_pattern_that_matches_nothing_names_the_nearest_layer():
    with pytest.raises(UsageError, match=r"'conv3' matches none: did you mean 'conv\d'"):
        names(Target(lenet5(), layers=["conv3"]), torch.rand(1, 28, 28))


def test_a_layer_without_the_batch_in_front_is_left_out():
    class SequenceFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):  # [batch, 6, 4] -> [6, batch, 4]
            x = torch.relu(self.fc(x.transpose(0, 1)))
            return self.head(x.mean(0))

    net = SequenceFirst()
    assert names(Target(net), torch.rand(6, 4)) == ["output"]
    with pytest.raises(UsageError, match="first dimension must be the batch"):
        names(Target(net, layers="relu()"), torch.rand(6, 4))


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_unchanged_even_after_an_exception(fails):
    net = Conv()
    net.bn.eval()  # a mixed state that must be restored
    net.fc.weight.requires_grad_(False)
    net.calls += 7
    state, hooks = state_of(net), hooks_of(net)
    target = Target(net)
    try:
        with target.opened():
            assert not any(each.training for each in net.modules())
            layers = {layer.name: layer for layer in target.find_layers(torch.rand(1, 8, 8))}

            def on_activation(name, activation):
                if fails:
                    raise ZeroDivisionError

            target.forward(torch.rand(5, 1, 8, 8), on_activation, layers)
    except ModelError:
        assert fails
    assert_same_state(state, state_of(net))
    assert hooks_of(net) == hooks


def test_a_model_that_raises_is_explained():
    with pytest.raises(ModelError, match=r"the model raised RuntimeError on inputs \[1, 5\]"):
        names(Target(Hand()), torch.rand(5))


def test_half_precision_models_are_probed_in_float32():
    target = Target(lenet5().to(torch.bfloat16))
    kinds = set()
    with target.opened(), torch.no_grad():
        layers = {layer.name: layer for layer in target.find_layers(torch.rand(1, 28, 28))}
        target.forward(torch.rand(2, 1, 28, 28), lambda n, a: kinds.add(flatten(a, layers[n], 2).dtype), layers)
    assert kinds == {torch.float32}


def test_only_the_requested_layers_are_reported():
    tracer, shown = ActivationTracer(lenet5()), []
    tracer.forward(torch.rand(2, 1, 28, 28), lambda name, a: shown.append(name), {"relu()#2"})
    assert shown == ["relu()#2"]


def test_a_target_that_was_traced_can_be_pickled():
    target = Target(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    layers = target.find_layers(torch.rand(4))
    other = pickle.loads(pickle.dumps(target))
    assert other.find_layers(torch.rand(4)) == layers
    assert other.fingerprint() == target.fingerprint()
