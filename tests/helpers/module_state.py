"""The state of a module that a campaign must leave unchanged: tensors, modes, gradients and hooks."""

import torch
import torch.nn.modules.module as nn_module


def state_of(net):
    return (
        {name: tensor.clone() for name, tensor in net.state_dict().items()},
        [each.training for each in net.modules()],
        [each.requires_grad for each in net.parameters()],
        [each.grad for each in net.parameters()],
    )


def hooks_of(net):
    found = [
        len(each._forward_hooks) + len(each._forward_pre_hooks) + len(each._backward_hooks) for each in net.modules()
    ]
    return [*found, len(nn_module._global_forward_hooks), len(nn_module._global_forward_pre_hooks)]


def assert_same_state(before, after):
    assert before[1:] == after[1:]
    for name, tensor in before[0].items():
        assert torch.equal(tensor, after[0][name]), name
