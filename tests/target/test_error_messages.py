"""If a model does not accept its inputs, the error says what to change."""

import model_files as files
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, ModelError, Target
from themis.target.loaders.model import load_model
from themis.target.loaders.weights import Trust, load_weights
from themis_integrations.models.onnx import OnnxModel

PICTURES = torch.rand(10, 6, 6, 1)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.relu(self.project(x)).mean(1))


def onnx_box(tmp_path):
    files.onnx(tmp_path / "net.onnx")
    return BlackBox(OnnxModel(tmp_path / "net.onnx"))


ORDERS = {
    "channels last": (
        lambda _: files.make_net(),
        PICTURES,
        "its layer 'conv' expects 1 channels first: permute each input to [1, 6, 6], for instance with "
        "inputs.permute(0, 3, 1, 2",
    ),
    "features first": (
        lambda _: Tokens(),
        torch.rand(10, 5, 7),
        "its layer 'project' expects 5 features last: permute each input to [7, 5], for instance with "
        "inputs.permute(0, 2, 1)",
    ),
    "channels last for ONNX": (
        onnx_box,
        PICTURES,
        "net.onnx expects inputs of shape [1, 6, 6], got [6, 6, 1]: permute each input to [1, 6, 6]",
    ),
    "pictures in colour": (
        lambda _: files.make_net(),
        torch.rand(10, 3, 9, 9),
        "its layer 'conv' expects 1 channels first: give such inputs",
    ),
    "no axis of channels": (
        lambda _: files.make_net(),
        PICTURES[..., 0],
        "its layer 'conv' expects an axis of channels, which the inputs lack: pass inputs[:, None]",
    ),
    "labels among the features": (
        lambda _: torch.nn.Sequential(torch.nn.Linear(8, 3)),
        torch.rand(10, 9),
        "its layer '0' expects 8 features last: give such inputs",
    ),
    "a shape that no order mends": (
        lambda _: files.make_net(),
        torch.rand(10, 2, 9, 9),
        "its layer 'conv' expects 1 channels first: give such inputs",
    ),
    "another shape for ONNX": (onnx_box, torch.rand(10, 1, 9, 9), "got [1, 9, 9]: pass inputs of this shape"),
    "another rank for ONNX": (onnx_box, torch.rand(10, 36), "got [36]: pass inputs of this shape"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_another_order_of_axes_is_suggested_if_it_fits(kind, tmp_path):
    make, inputs, message = ORDERS[kind]
    with pytest.raises(ModelError) as caught:
        themis.run(make(tmp_path), inputs, "gaussian")
    assert message in str(caught.value)


def test_an_error_in_torchscript_is_told_without_the_code_of_the_program(tmp_path):
    files.script(tmp_path / "net.pt", traced=True)
    net = load_model(str(tmp_path / "net.pt"), Trust()).model
    with pytest.raises(ModelError, match=r"in \(0\.0, 1\.0\): Given groups=1, .*; check that it accepts") as caught:
        themis.run(net, torch.rand(10, 3, 6, 6), "gaussian")
    assert "interpreter" not in str(caught.value)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        net = files.Net()
    with pytest.raises(ModelError, match="some are on device 'meta' and have no values"):
        themis.run(net, files.inputs(), "gaussian")


@pytest.mark.parametrize("layer", [torch.nn.LazyLinear(3), torch.nn.LazyBatchNorm1d(affine=False)])
def test_a_model_with_a_lazy_layer_must_have_seen_a_batch(layer):
    """Its parameters, or its buffers, have no shape before."""
    net = torch.nn.Sequential(torch.nn.Flatten(), layer)
    with pytest.raises(ModelError, match=r"its Lazy\w+ '1' gets them from the first batch: load them"):
        themis.run(net, files.inputs(), "gaussian")
    net(files.inputs())
    assert len(themis.Target(net).find_layers(files.inputs()[0])) == 1


def test_weights_from_a_file_make_a_lazy_layer_usable(tmp_path):
    made = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 3))
    torch.save(made.state_dict(), tmp_path / "weights.pt")
    target = themis.Target(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(3)))
    load_weights(target.module, tmp_path / "weights.pt")
    assert target.fingerprint() == themis.Target(made).fingerprint()


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_two_devices_is_explained():
    net = files.make_net()
    net.fc.to("cuda")
    with pytest.raises(ModelError, match="its weights are on cpu and cuda:0: move them to one device"):
        themis.run(net, files.inputs(), "gaussian")


def test_memory_that_runs_out_is_explained_without_a_list_of_processes():
    class Full(nn.Module):
        def forward(self, x):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
                "11.75 MiB is free. Process 1107 has 4.80 GiB memory in use. Process 1125 has 3.19 GiB memory in use."
            )

    with pytest.raises(ModelError) as raised:
        themis.run(Full(), torch.rand(4, 3), "gaussian", max_tests=4)
    message = str(raised.value)
    assert message.startswith("out of memory on cpu with a batch of ")
    assert message.endswith(
        "run fewer processes beside it (CUDA out of memory. Tried to allocate 12.00 MiB. GPU 0 has "
        "a total capacity of 139.80 GiB of which 11.75 MiB is free)"
    )


def test_a_model_in_training_mode_is_tested_in_evaluation_mode_and_restored():
    net = files.make_net()
    with Target(net).opened(), torch.no_grad():
        assert torch.equal(Target(net).forward(files.inputs()), files.expected()["output"])
    assert net.training
