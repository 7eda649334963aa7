"""Layers of ONNX graphs, node by node."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from themis import BlackBox, ModelError
from themis_integrations.models.onnx import OnnxModel


def save(path, nodes, *, kind=TensorProto.FLOAT, inputs=("x",), outputs=("y",), initializers=()):
    """A graph of `[batch, 4]` tensors; a node is `(operator, inputs, output)`, with a name if there is a fourth."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(op, given, [made], name=(*rest, "")[0]) for op, given, made, *rest in nodes],
        "graph",
        [value(name, kind, ["batch", 4]) for name in inputs],
        [value(name, kind, None) for name in outputs],
        list(initializers),
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def names(path):
    layers = BlackBox(OnnxModel(path), bounds=(-1, 1)).find_layers(torch.rand(4))
    return [each.name for each in layers]


GRAPHS = {
    "a name for each node": (
        [("Relu", ["x"], "a", "first"), ("Tanh", ["a"], "b"), ("Neg", ["b"], "y")],
        ["first", "b"],
    ),
    "a name that a tensor has too": (
        [("Relu", ["x"], "a", "b"), ("Tanh", ["a"], "b"), ("Neg", ["b"], "y")],
        ["b", "b#2"],
    ),
    "a net that ends in an activation": ([("Relu", ["x"], "a"), ("Sigmoid", ["a"], "y")], ["a"]),
    "SiLU is one activation": (
        [("Sigmoid", ["x"], "s"), ("Mul", ["x", "s"], "silu"), ("Neg", ["silu"], "y")],
        ["silu"],
    ),
    "a gate of something else": (
        [("Neg", ["x"], "n"), ("Sigmoid", ["x"], "s"), ("Mul", ["n", "s"], "gated"), ("Neg", ["gated"], "y")],
        ["s"],
    ),
    "no activation": ([("Neg", ["x"], "y")], []),
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_the_layers_of_a_graph(graph, tmp_path):
    nodes, expected = GRAPHS[graph]
    assert names(save(tmp_path / "net.onnx", nodes)) == [*expected, "output"]


@pytest.mark.parametrize("kind", ["FLOAT", "DOUBLE", "FLOAT16"])
def test_floating_point_types_are_cast(kind, tmp_path):
    path = save(tmp_path / "net.onnx", [("Relu", ["x"], "a"), ("Neg", ["a"], "y")], kind=getattr(TensorProto, kind))
    inputs = torch.tensor([[1.0, -2.0, 0.5, 4.0]])
    assert torch.equal(BlackBox(OnnxModel(path)).forward(inputs).float(), -inputs.relu())


WRONG = {
    "whole numbers": (
        {"kind": TensorProto.INT64},
        "must accept one input of floating-point numbers, but it accepts x tensor",
    ),
    "two inputs": ({"inputs": ("x", "z")}, "must accept one input of floating-point numbers, but it accepts x .*, z "),
}


@pytest.mark.parametrize("case", WRONG)
def test_graphs_that_cannot_be_fed_are_refused(case, tmp_path):
    options, message = WRONG[case]
    nodes = [("Neg", ["x"], "y")] if case == "whole numbers" else [("Add", ["x", "z"], "y")]
    with pytest.raises(ModelError, match=message):
        OnnxModel(save(tmp_path / "net.onnx", nodes, **options))


def test_the_scores_are_the_logits_or_the_output_that_is_named(tmp_path):
    nodes = [("Relu", ["x"], "hidden"), ("Neg", ["hidden"], "logits")]
    x = np.ones((2, 4), dtype=np.float32)
    several = save(tmp_path / "a.onnx", nodes, outputs=("hidden", "logits"))
    assert (OnnxModel(several)(x)[0] == -1).all()
    other = save(tmp_path / "b.onnx", [("Relu", ["x"], "first"), ("Neg", ["first"], "last")], outputs=("first", "last"))
    with pytest.raises(
        ModelError, match="must have one output of numbers, got first, last: name the one with the scores"
    ):
        OnnxModel(other)(x)
    for name, value in (("first", 1), ("1", -1), ("last", -1)):
        model = OnnxModel(other).choose(name)
        assert (model(x)[0] == value).all()
    assert model.entry == "entry 'last' of what the model returns, beside 'first'"
    with pytest.raises(ModelError, match=r"must have the --output 'x', but it has first, last"):
        OnnxModel(other).choose("x")


def test_weights_in_a_separate_file_are_part_of_the_version(tmp_path):
    def write(value):
        weight = numpy_helper.from_array(np.full((4, 400), value, dtype=np.float32), "w")
        path = save(tmp_path / "net.onnx", [("MatMul", ["x", "w"], "y")], initializers=[weight])
        (tmp_path / "net.data").unlink(missing_ok=True)
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="net.data", size_threshold=0)
        assert (tmp_path / "net.data").exists()
        return OnnxModel(path), path.read_bytes()

    (one, first), (two, second) = write(1.0), write(2.0)
    assert first == second
    assert one.version != two.version
    assert (two(np.ones((1, 4), dtype=np.float32))[0] == 8).all()


def test_the_session_follows_the_number_of_threads(tmp_path):
    model = OnnxModel(save(tmp_path / "net.onnx", [("Neg", ["x"], "y")]))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        model(np.ones((1, 4), dtype=np.float32))
        assert model._threads == 2
    finally:
        torch.set_num_threads(before)


def test_activations_in_a_branch_are_left_out_with_a_warning(tmp_path):
    value = helper.make_tensor_value_info
    branches = [
        helper.make_graph(
            [helper.make_node(op, ["x"], [f"in_{op}"])], op, [], [value(f"in_{op}", TensorProto.FLOAT, None)]
        )
        for op in ("Relu", "Neg")
    ]
    condition = numpy_helper.from_array(np.array(True), "c")
    nodes = [helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])]
    ends = [[value("x", TensorProto.FLOAT, ["batch", 4])], [value("y", TensorProto.FLOAT, None)]]
    graph = helper.make_graph(nodes, "graph", *ends, [condition])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "net.onnx"
    )
    with pytest.warns(RuntimeWarning, match="1 of its activations are computed inside a branch or a loop") as caught:
        model = OnnxModel(tmp_path / "net.onnx")
    assert caught[0].filename == __file__
    assert model.layers == {}
