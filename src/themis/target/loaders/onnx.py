"""ONNX models on onnxruntime, with the results of their activation nodes as layers."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.errors import DataError, MissingExtraError, ModelError
from themis.target.compiled import numbered
from themis.target.fingerprint import hash_file, hash_text
from themis.target.loaders.factory import first_line
from themis.target.target import permutation_that_fits

_NAMES = """
    Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu Swish Mish Sigmoid Tanh HardSigmoid HardSwish Softplus
    Softsign Shrink Clip Erf
"""
ACTIVATIONS = frozenset(_NAMES.split())
"""Operators whose results are neurons: Clip is ReLU6, and Erf what older exporters make of GELU."""
GATES = ("Sigmoid", "HardSigmoid")
"""Operators that times their own input are one activation: SiLU and Hardswish."""
FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
SCORES = ("logits", "out")


class OnnxModel:
    """A function for `BlackBox`: `inputs [inputs, ...]` to the scores and the activations by node.

    One session computes everything, so that the scores are the same to the bit whether or not the activations are
    looked at. A graph of a fixed batch size is run in pieces, the last one filled up.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        onnx, self._runtime = _import("onnx"), _import("onnxruntime")
        try:
            model = onnx.load(self.path)
            self.version = _version(self.path, onnx)
        except Exception as error:  # protobuf, external files and onnx itself each raise errors of their own
            raise DataError(f"{path} must be an ONNX model, it cannot be read: {first_line(error)}") from error
        if not model.graph.node or not model.graph.output:
            raise DataError(f"{path} must be an ONNX model, it has no graph: check the file")
        _refuse_training_mode(onnx, model.graph)
        given = {each.name for each in model.graph.output}
        self.layers = {name: tensor for name, tensor in _find_layers(model.graph) if tensor not in given}
        model.graph.output.extend(onnx.ValueInfoProto(name=each) for each in self.layers.values())
        self._bytes = model.SerializeToString()
        self._open()
        self.output = next((each for each in SCORES if each in given), model.graph.output[0].name)

    def __call__(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        if self._threads != torch.get_num_threads():
            self._open()
        self._check(inputs)
        step = self.batch or len(inputs)
        pieces = [self._run(inputs[k : k + step], step) for k in range(0, len(inputs), step)]
        outputs, *activations = (
            pieces[0] if len(pieces) == 1 else (np.concatenate(each) for each in zip(*pieces, strict=True))
        )
        return outputs, dict(zip(self.layers, activations, strict=True))

    def _run(self, inputs: NDArray[Any], step: int) -> list[NDArray[Any]]:
        n = len(inputs)
        if n < step:
            inputs = np.concatenate([inputs, np.repeat(inputs[-1:], step - n, 0)])
        found = self._session.run([self.output, *self.layers.values()], {self.input: inputs.astype(self.dtype)})
        return [each[:n] for each in found] if n < step else found

    def _open(self) -> None:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 4
        self._threads = options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = self._runtime.InferenceSession(self._bytes, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class of error for each cause, without a common one
            raise DataError(f"{self.path} must be an ONNX model that onnxruntime runs: {first_line(error)}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in FLOATS:
            got = ", ".join(f"{each.name} {each.type}" for each in inputs) or "none"
            raise ModelError(f"{self.path} must take one input of floating-point numbers, it takes {got}")
        self.input, self.dtype, self.shape = inputs[0].name, FLOATS[inputs[0].type], inputs[0].shape
        self.batch = self.shape[0] if self.shape and isinstance(self.shape[0], int) else None

    def _check(self, inputs: NDArray[Any]) -> None:
        """Refuse inputs that the graph was not made for."""

        def fits(shape: Any) -> bool:
            return len(shape) == len(self.shape) and all(
                not isinstance(wanted, int) or wanted == got
                for wanted, got in zip(self.shape[1:], shape[1:], strict=True)
            )

        if not fits(inputs.shape):
            remedy = permutation_that_fits(inputs.shape, fits) or "give inputs of this shape"
            wanted = [each if isinstance(each, int) else "any" for each in self.shape[1:]]
            raise ModelError(f"{self.path} takes inputs of shape {wanted}, got {list(inputs.shape[1:])}: {remedy}")


def _find_layers(graph: Any) -> Iterator[tuple[str, str]]:
    """Name and tensor of each activation, in the order of the graph."""
    found, n_hidden = [], 0
    for node in graph.node:
        n_hidden += sum(each.op_type in ACTIVATIONS for each in _inner_nodes(node))
        if node.op_type in ACTIVATIONS:
            gated = [each for each in graph.node if node.op_type in GATES and _is_gated(each, node)]
            found.append(gated[0] if gated else node)
    if n_hidden:
        warnings.warn(
            f"the ONNX model hides layers: {n_hidden} of its activations are computed inside a branch or a loop; those "
            "are left out",
            RuntimeWarning,
            stacklevel=4,
        )
    names = numbered([node.name or node.output[0] for node in found])
    return zip(names, [node.output[0] for node in found], strict=True)


def _is_gated(node: Any, gate: Any) -> bool:
    return node.op_type == "Mul" and set(node.input) == {gate.input[0], gate.output[0]}


def _inner_nodes(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield inner
                yield from _inner_nodes(inner)


def _refuse_training_mode(onnx: Any, graph: Any) -> None:
    constants = {each.name: each for each in graph.initializer}
    for node in graph.node:
        for each in node.attribute if node.op_type == "Constant" else ():
            constants[node.output[0]] = each.t
    for node in graph.node:
        is_training = any(each.name == "training_mode" and each.i for each in node.attribute)
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in constants:
            is_training |= bool(onnx.numpy_helper.to_array(constants[node.input[2]]).any())
        if is_training:
            raise ModelError(
                f"the program must answer the same each time, its {node.op_type} works as in training: call "
                "model.eval() before exporting it"
            )


def _version(path: Path, onnx: Any) -> str:
    """Hash of the file, and of the files with its weights where they lie apart."""
    apart = set()
    for each in onnx.load(path, load_external_data=False).graph.initializer:
        apart |= {entry.value for entry in each.external_data if entry.key == "location"}
    of_file = hash_file(path)
    return hash_text(of_file + "".join(hash_file(path.parent / each) for each in sorted(apart))) if apart else of_file


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError('ONNX models need onnx and onnxruntime: pip install "themis-dl[onnx]"') from error
