"""One small net in every form a model can come in; each writer makes its file in the working directory."""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

MODULE = """
import numpy as np
import torch
from types import SimpleNamespace
from model_files import Net, inputs, make_net
from themis import BlackBox, Target

def data(): return inputs()
def needs_width(width, *, act="relu"): assert (width, act) == (6, "tanh"); return make_net()
def target(): return Target(make_net(), bounds=(0, 1))
def blank(): return Net()

class Wrapped(torch.nn.Module):
    def __init__(self): super().__init__(); self.net = make_net()
    def forward(self, x): return SimpleNamespace(loss=None, logits=self.net(x))
def wrapped(): return Wrapped()

NET = make_net().eval()
def predict(x):
    with torch.no_grad(): return NET(torch.from_numpy(x)).numpy()
def with_activations(x):
    with torch.no_grad():
        first = torch.relu(NET.conv(torch.from_numpy(x)))
        return predict(x), {"first": first.numpy(), "second": torch.tanh(NET.fc(first.flatten(1))).numpy()}
def box(): return BlackBox(predict, version="1")
def open_box(): return BlackBox(with_activations, version="1")
"""


class Net(nn.Module):
    """ReLU as a module, tanh as a function, dropout that only training would show."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.drop = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Dropout(0.5)
        self.fc, self.out = nn.Linear(3 * 4 * 4, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.drop(self.act(self.conv(x))).flatten(1)
        return self.out(torch.tanh(self.fc(x)))


def make_net() -> Net:
    """The same weights each time, and answers that hang on the input."""
    rng = torch.Generator().manual_seed(0)
    net = Net()
    with torch.no_grad():
        for each in net.parameters():
            each.copy_(torch.randn(each.shape, generator=rng) * 0.5)
        net.out.bias -= net.eval()(inputs()).mean(0)
    return net.train()


def inputs() -> torch.Tensor:
    return torch.rand(30, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def script(name="net.pt", net=None, *, traced=False):
    net = (net or make_net()).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(net, inputs()[:2]) if traced else torch.jit.script(net), name)


def export(name="net.pt2", *, batch=None, net=None):
    batch = {0: torch.export.Dim("batch")} if batch is None else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(net or make_net().eval(), (inputs()[:2],), dynamic_shapes=batch and (batch,))
        torch.export.save(program, name)


def onnx(name="net.onnx", *, batch="batch", last="Identity"):
    """The net as a graph, node by node."""
    from onnx import TensorProto, helper, numpy_helper, save

    net = make_net()
    weights = [numpy_helper.from_array(value.numpy(), key) for key, value in net.state_dict().items()]
    mode = [numpy_helper.from_array(torch.tensor(each).numpy(), key) for key, each in (("p", 0.5), ("mode", False))]
    nodes = [
        helper.make_node("Conv", ["x", "conv.weight", "conv.bias"], ["a"], name="/conv/Conv"),
        helper.make_node("Relu", ["a"], ["b"], name="/act/Relu"),
        helper.make_node("Dropout", ["b", "p", "mode"], ["c"]),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("Gemm", ["d", "fc.weight", "fc.bias"], ["e"], transB=1),
        helper.make_node("Tanh", ["e"], ["f"]),
        helper.make_node("Gemm", ["f", "out.weight", "out.bias"], ["g"], transB=1),
        helper.make_node(last, ["g"], ["scores"]),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "net",
        [value("x", TensorProto.FLOAT, [batch, 1, 6, 6])],
        [value("scores", TensorProto.FLOAT, [batch, 4])],
        [*weights, *mode],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), name)


def state(name="weights.pt", wrap=lambda state: state, prefix=""):
    torch.save(wrap({prefix + key: value for key, value in make_net().state_dict().items()}), name)


def safetensors(name="weights.safetensors"):
    from safetensors.torch import save_file

    save_file(make_net().state_dict(), name)


def pickled(name="whole.pt"):
    torch.save(make_net(), name)


class Harmful:
    """A pickle that leaves a file behind when it is loaded."""

    def __reduce__(self):
        return exec, ("open('harm', 'w').close()",)


def harmful(name="whole.pt"):
    torch.save({"state": Harmful()}, name)


def expected() -> dict[str, torch.Tensor]:
    """The activations of the net, computed by hand."""
    net = make_net().eval()
    with torch.no_grad():
        first = F.relu(net.conv(inputs()))
        second = torch.tanh(net.fc(first.flatten(1)))
        return {"first": first, "second": second, "output": net.out(second)}
