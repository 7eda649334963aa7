"""Activations of compiled models, TorchScript and torch.export: programs in which Python sees no function call."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx, nn

from themis.errors import ModelError
from themis.target.activations import ACTIVATION_NAMES, OnActivation

KINDS = {variant: name for name in ACTIVATION_NAMES for variant in (name, f"{name}_")}
"""Operators whose results are neurons, with the name of each that does not work in place."""
MODE_AT = {"dropout": 2, "feature_dropout": 2, "alpha_dropout": 2, "batch_norm": 5}
"""Which argument of an operator says that it works as in training."""


class Script:
    """Sees inside a TorchScript module: runs its graph with the activations as further outputs.

    The graph is frozen: calls inlined, weights constants. The names of submodules are lost on the way, so a layer is
    called by its function and its place: `relu()`, `relu()#2`.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self.module: nn.Module = module
        self.made_by_activation: set[str] = set()
        self._names: list[str] = []
        self._function: Any = None
        self._further: list[Any] = []
        self._has_said = False

    def trace(self, inputs: Tensor, on_activation: OnActivation) -> Any:
        self._expose()  # anew: the weights may have changed
        return self.forward(inputs, on_activation, self._names)

    def forward(self, inputs: Tensor, on_activation: OnActivation, wanted: Container[str]) -> Any:
        if self._function is None:
            return self.run(inputs)
        with _plainly():
            result, *seen = self._function(inputs, *self._further)
        for name, activation in zip(self._names, seen, strict=True):
            if name in wanted:
                on_activation(name, activation)
        return result

    def run(self, inputs: Tensor) -> Any:
        with _plainly():
            return self.module(inputs)

    def _expose(self) -> None:
        try:
            graph, self._further = _frozen_graph(self.module)
        except RuntimeError as error:
            return self._say(f"its graph cannot be frozen ({_first_line(error)})")
        _refuse_training_mode(
            (node.kind().removeprefix("aten::"), _constant, list(node.inputs())) for node in _all_nodes(graph)
        )
        found = [(node, KINDS[kind]) for node in graph.nodes() if (kind := _kind(node)) in KINDS]
        n_hidden = sum(_kind(node) in KINDS for node in _all_nodes(graph)) - len(found)
        try:
            self._function = _with_outputs(graph, [node for node, _ in found])
        except RuntimeError as error:
            return self._say(f"its graph cannot be given further outputs ({_first_line(error)})")
        self._names = numbered([f"{name}()" for _, name in found])
        self.made_by_activation = set(self._names)
        if n_hidden:
            self._say(f"{n_hidden} of its activations are computed inside a branch or a loop", "those are left out")

    def _say(self, why: str, what: str = "only its output is a layer") -> None:
        if not self._has_said:
            self._has_said = True
            warnings.warn(f"the TorchScript model hides layers: {why}; {what}", RuntimeWarning, stacklevel=2)


class Exported:
    """Sees inside the module of a torch.export program, by running its graph node by node.

    Layers are named as in the model that was exported.
    """

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, fx.GraphModule)
        self.module: nn.Module = module
        nodes = [each for each in module.graph.nodes if isinstance(each.target, torch._ops.OpOverload)]
        _refuse_training_mode((_operator(each), lambda value: value, list(each.args)) for each in nodes)
        _refuse_one_batch_size(module.graph)
        found = [each for each in nodes if _operator(each) in KINDS]
        self._names = dict(zip(found, numbered([_path(each) for each in found]), strict=True))
        self.made_by_activation = set(self._names.values())

    def trace(self, inputs: Tensor, on_activation: OnActivation) -> Any:
        return self.forward(inputs, on_activation, self.made_by_activation)

    def forward(self, inputs: Tensor, on_activation: OnActivation, wanted: Container[str]) -> Any:
        return _Shown(self.module, self._names, on_activation, wanted).run(inputs)

    def run(self, inputs: Tensor) -> Any:
        return self.module(inputs)


class _Shown(fx.Interpreter):
    def __init__(
        self, module: Any, names: dict[fx.Node, str], on_activation: OnActivation, wanted: Container[str]
    ) -> None:
        super().__init__(module)
        self.names, self.on_activation, self.wanted = names, on_activation, wanted
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n in self.names and self.names[n] in self.wanted:
            self.on_activation(self.names[n], result)
        return result


def _plainly() -> AbstractContextManager[None]:
    """TorchScript as it is written: its optimizer sets in after some passes, and those before must not differ."""
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def is_exported(module: nn.Module) -> bool:
    """Whether a module is what `ExportedProgram.module()` gives: a graph of operators, not of modules."""
    return isinstance(module, fx.GraphModule) and any(
        isinstance(each.target, torch._ops.OpOverload) for each in module.graph.nodes
    )


def _frozen_graph(module: Any) -> tuple[Any, list[Any]]:
    """A copy of a module's graph that is one block as far as possible, and its further arguments' defaults."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        frozen = torch._C._freeze_module(module._c, [], True, False)
    finally:
        for each, mode in modes:
            each.training = mode
    graph = frozen._get_method("forward").graph.copy()
    return graph, [each.default_value for each in module._c._get_method("forward").schema.arguments[2:]]


def _with_outputs(graph: Any, nodes: list[Any]) -> Any:
    """The graph as a function that returns its result and those of some nodes."""
    is_written = any(_kind(each).endswith("_") for each in _all_nodes(graph))
    shown = [_copied(graph, each) if is_written else each.output() for each in nodes]
    values = [*graph.outputs(), *shown]
    together = graph.create("prim::TupleConstruct", values, 1)
    together.output().setType(torch._C.TupleType([each.type() for each in values]))
    graph.appendNode(together)
    graph.eraseOutput(0)
    graph.registerOutput(together.output())
    graph.eraseInput(0)  # the module itself, of which nothing is used any more
    return torch._C._create_function_from_graph("shown", graph)


def _copied(graph: Any, node: Any) -> Any:
    """A node's result as it is then: the model may overwrite it later."""
    nothing = graph.insertConstant(None)
    nothing.node().moveBefore(node)
    copy = graph.create("aten::clone", [node.output(), nothing], 1)
    copy.insertAfter(node)
    return copy.output()


def _all_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _all_nodes(inner)


def _kind(node: Any) -> str:
    kind: str = node.kind()
    return kind.removeprefix("aten::") if kind.startswith("aten::") else ""


def _constant(value: Any) -> Any:
    return value.toIValue()


def _operator(node: fx.Node) -> str:
    """`relu` of `aten.relu.default`."""
    return str(getattr(node.target, "_schema").name).removeprefix("aten::")  # noqa: B009  # typed as a mere callable


def _path(node: fx.Node) -> str:
    """Where the model called an activation: its module, or the module that called the function."""
    stack = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    is_own = path and kind.startswith(nn.ReLU.__module__)
    return str(path) if is_own else f"{path}.{KINDS[_operator(node)]}()".lstrip(".")


def numbered(names: list[str]) -> list[str]:
    """Each name but the first of its kind with its number, as `relu()#2`."""
    calls: dict[str, int] = {}
    numbered = []
    for name in names:
        calls[name] = calls.get(name, 0) + 1
        numbered.append(name if calls[name] == 1 else f"{name}#{calls[name]}")
    return numbered


def _refuse_training_mode(operators: Iterator[tuple[str, Any, list[Any]]]) -> None:
    for name, value, arguments in operators:
        at = MODE_AT.get(name)
        if at is not None and len(arguments) > at and value(arguments[at]) is True:
            raise ModelError(
                f"the program must answer the same each time, its {name} works as in training: call model.eval() "
                "before tracing or exporting it"
            )


def _refuse_one_batch_size(graph: fx.Graph) -> None:
    for node in graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", None) if node.op == "placeholder" else None
        if shape and isinstance(shape[0], int):
            raise ModelError(
                f"the program must take any number of inputs, it was exported for {shape[0]} at a time: export it with "
                'dynamic_shapes=({0: torch.export.Dim("batch")},)'
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
