"""Test an ONNX file with onnxruntime: its intermediate tensors are the neurons, and no gradients are needed."""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import themis
from themis_integrations import OnnxModel

digits = load_digits()
inputs, labels = digits.data.astype(np.float32), digits.target
mlp = MLPClassifier((32,), max_iter=80, random_state=0, tol=1e-2).fit(inputs[:1200], labels[:1200])

# Any exporter will do; here the two layers are written by hand.
arrays = {"w1": mlp.coefs_[0], "b1": mlp.intercepts_[0], "w2": mlp.coefs_[1], "b2": mlp.intercepts_[1]}
graph = helper.make_graph(
    [
        helper.make_node("Gemm", ["inputs", "w1", "b1"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"], name="hidden"),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["scores"]),
    ],
    "digits",
    [helper.make_tensor_value_info("inputs", onnx.TensorProto.FLOAT, ["batch", 64])],
    [helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["batch", 10])],
    [numpy_helper.from_array(value.astype(np.float32), name) for name, value in arrays.items()],
)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "digits.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    # On the command line: themis run --model digits.onnx --data ... --bounds 0,16 --perturb gaussian
    model = OnnxModel(path)
    target = themis.BlackBox(model, bounds=(0, 16), version=model.version)
    run = themis.run(target, (inputs[1200:], labels[1200:]), "gaussian", magnitude=0.2, max_tests=2000)
    print(run.stop, f"{run.start.n_neurons} neurons in {[layer.name for layer in run.start.layers]}")
    print(f"{run.rounds[-1].distinct_faults} distinct faults")
