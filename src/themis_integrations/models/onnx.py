"""ONNX models run by onnxruntime, with the results of their activation nodes as layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from themis.errors import DataError, ModelError, first_line, warn
from themis.target.compiled import numbered
from themis.target.estimator import FileModel
from themis.target.fingerprint import hash_file, hash_text
from themis.target.loaders.factory import import_package
from themis.target.loaders.weights import Trust
from themis.target.output import SCORE_ENTRIES, describe_entry
from themis.target.target import permutation_that_fits

_ACTIVATION_NODES = """
    Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu Swish Mish Sigmoid Tanh HardSigmoid HardSwish Softplus
    Softsign Shrink Clip Erf
"""
ACTIVATION_NODES = frozenset(_ACTIVATION_NODES.split())
"""Operators whose results are neurons: Clip is ReLU6, and older exporters turn GELU into Erf."""
GATE_NODES = ("Sigmoid", "HardSigmoid")
"""Operators that form one activation when multiplied by their own input: SiLU and Hardswish."""
FLOATS = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}


def load_onnx(path: Path, trust: Trust) -> OnnxModel:
    """The model in a file, which needs no trust: an ONNX graph runs no code."""
    return OnnxModel(path)


class OnnxModel(FileModel):
    """A function for `BlackBox` that maps `inputs [inputs, ...]` to the scores and the activations by node.

    One session computes everything, so that the scores are equal to the last bit whether or not the activations are
    used. A graph with a fixed batch size is run in batches of that size, and the last one is padded.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        onnx, self._runtime = (import_package(name, '"themis-dl[onnx]"') for name in ("onnx", "onnxruntime"))
        try:
            model = onnx.load(self.path)
            self.version = _version(self.path, onnx)
        except Exception as error:  # protobuf, external files and onnx raise different errors
            raise DataError(f"{path} must be an ONNX model, but it cannot be read: {first_line(error)}") from error
        if not model.graph.node or not model.graph.output:
            raise DataError(f"{path} must be an ONNX model, but it has no graph: check the file")
        outputs = {output.name for output in model.graph.output}
        self.layers = {name: tensor for name, tensor in _find_layers(model.graph) if tensor not in outputs}
        model.graph.output.extend(onnx.ValueInfoProto(name=tensor) for tensor in self.layers.values())
        self._bytes = model.SerializeToString()
        self._open()
        self.outputs = [
            output.name
            for output in self._session.get_outputs()
            if output.name in outputs and (output.type in FLOATS or len(outputs) == 1)
        ]
        known = [name for name in SCORE_ENTRIES if name in outputs]
        self.output: str | None = next(iter(known or self.outputs)) if known or len(self.outputs) == 1 else None

    def choose(self, output: str | None) -> OnnxModel:
        """Take the scores from this output of the graph, given by its name or its index; None keeps the default."""
        if output is None:
            return self
        names = dict(enumerate(self.outputs))
        name = output if output in self.outputs else names.get(int(output)) if output.isdecimal() else None
        if name is None:
            raise ModelError(f"{self.path} must have the --output {output!r}, but it has {', '.join(self.outputs)}")
        self.output = name
        return self

    @property
    def entry(self) -> str | None:
        """Describe which output holds the scores; None if there is only one output."""
        is_chosen = self.output is not None and len(self.outputs) > 1
        return describe_entry(self.output, self.outputs) if is_chosen else None

    def __call__(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        if self.output is None:
            raise ModelError(
                f"{self.path} must have one output of numbers, got {', '.join(self.outputs) or 'none'}: name the one "
                "with the scores with --output NAME, or OnnxModel(path).choose(NAME)"
            )
        if self._threads != torch.get_num_threads():
            self._open()
        self._check(inputs)
        step = self.batch or len(inputs)
        batches = [self._run(inputs[k : k + step], step) for k in range(0, len(inputs), step)]
        outputs, *activations = (
            batches[0] if len(batches) == 1 else (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        )
        return outputs, dict(zip(self.layers, activations, strict=True))

    def _run(self, inputs: NDArray[Any], step: int) -> list[NDArray[Any]]:
        n = len(inputs)
        if n < step:
            inputs = np.concatenate([inputs, np.repeat(inputs[-1:], step - n, 0)])
        arrays = self._session.run([self.output, *self.layers.values()], {self.input: inputs.astype(self.dtype)})
        return [array[:n] for array in arrays] if n < step else arrays

    def _open(self) -> None:
        options = self._runtime.SessionOptions()
        options.log_severity_level = 4
        self._threads = options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = self._runtime.InferenceSession(self._bytes, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the errors of onnxruntime have no common base class
            raise DataError(f"{self.path} must be a model that onnxruntime can run: {first_line(error)}") from error
        inputs = self._session.get_inputs()
        if len(inputs) != 1 or inputs[0].type not in FLOATS:
            got = ", ".join(f"{argument.name} {argument.type}" for argument in inputs) or "none"
            raise ModelError(f"{self.path} must accept one input of floating-point numbers, but it accepts {got}")
        self.input, self.dtype, self.shape = inputs[0].name, FLOATS[inputs[0].type], inputs[0].shape
        self.batch = self.shape[0] if self.shape and isinstance(self.shape[0], int) else None

    def _check(self, inputs: NDArray[Any]) -> None:
        """Refuse inputs of a shape that the graph does not accept."""

        def fits(shape: Any) -> bool:
            return len(shape) == len(self.shape) and all(
                not isinstance(expected, int) or expected == actual
                for expected, actual in zip(self.shape[1:], shape[1:], strict=True)
            )

        if not fits(inputs.shape):
            remedy = permutation_that_fits(inputs.shape, fits) or "pass inputs of this shape"
            expected = [size if isinstance(size, int) else "any" for size in self.shape[1:]]
            raise ModelError(f"{self.path} expects inputs of shape {expected}, got {list(inputs.shape[1:])}: {remedy}")


def _find_layers(graph: Any) -> Iterator[tuple[str, str]]:
    """Return the name and the tensor of each activation, in the order of the graph."""
    nodes, n_hidden = [], 0
    for node in graph.node:
        n_hidden += sum(inner.op_type in ACTIVATION_NODES for inner in _inner_nodes(node))
        if node.op_type in ACTIVATION_NODES:
            products = [other for other in graph.node if other.op_type == "Mul"] if node.op_type in GATE_NODES else []
            gated = (other for other in products if set(other.input) == {node.input[0], node.output[0]})
            nodes.append(next(gated, node))
    if n_hidden:
        warn(
            f"the ONNX model hides layers: {n_hidden} of its activations are computed inside a branch or a loop; those "
            "are left out"
        )
    names = numbered([node.name or node.output[0] for node in nodes])
    return zip(names, [node.output[0] for node in nodes], strict=True)


def _inner_nodes(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            for inner in graph.node:
                yield inner
                yield from _inner_nodes(inner)


def _version(path: Path, onnx: Any) -> str:
    """Return the hash of the file, including the files of its weights if they are stored separately."""
    external = set()
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        external |= {entry.value for entry in tensor.external_data if entry.key == "location"}
    of_file = hash_file(path)
    if not external:
        return of_file
    return hash_text(of_file + "".join(hash_file(path.parent / name) for name in sorted(external)))
