"""Tracing compiled models, TorchScript and torch.export, whose function calls are invisible to Python."""

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx._pytree import tree_flatten_spec
from torch.utils._pytree import tree_unflatten

from themis.errors import ModelError, UsageError, warn
from themis.target.activations import ACTIVATION_NAMES, Arguments, OnActivation, call_module

OPERATORS = {variant: name for name in ACTIVATION_NAMES for variant in (name, f"{name}_")}
"""Operators whose results are neurons; in-place variants map to the name of the plain operator."""


class ScriptTracer:
    """Traces a TorchScript module by running its graph with the activations as additional outputs.

    The graph is frozen: calls are inlined and weights become constants. This loses the names of submodules, so layers
    are named after their function and position: `relu()`, `relu()#2`.
    """

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        self.module: nn.Module = module
        self.activation_results: set[str] = set()
        self._names: list[str] = []
        self._function: Any = None
        self._default_arguments: list[Any] = []
        self._has_warned = False

    def trace(self, inputs: Any, on_activation: OnActivation) -> Any:
        self._expose()  # every time, since the weights may have changed
        return self.forward(inputs, on_activation, self._names)

    def forward(self, inputs: Any, on_activation: OnActivation, names: Container[str]) -> Any:
        if self._function is None:
            return self.run(inputs)
        given = inputs if isinstance(inputs, Arguments) else Arguments((inputs,), {})
        parameters = script_parameters(self.module)
        arguments = dict(zip(parameters[1:], self._default_arguments, strict=True))
        arguments.update(zip(parameters, given.args, strict=False))
        arguments.update(given.kwargs)
        with _without_optimizer():
            result, *activations = self._function(*(arguments[name] for name in parameters))
        for name, activation in zip(self._names, activations, strict=True):
            if name in names:
                on_activation(name, activation)
        return result

    def run(self, inputs: Any) -> Any:
        with _without_optimizer():
            return call_module(self.module, inputs)

    def _expose(self) -> None:
        try:
            graph, self._default_arguments = _frozen_graph(self.module)
            nodes = [(node, OPERATORS[kind]) for node in graph.nodes() if (kind := _kind(node)) in OPERATORS]
            n_hidden = sum(_kind(node) in OPERATORS for node in all_nodes(graph)) - len(nodes)
            self._function = _with_outputs(graph, [node for node, _ in nodes])
        except RuntimeError as error:
            return self._warn(f"its graph cannot be frozen and given more outputs ({_last_line(error)})")
        self._names = numbered([f"{name}()" for _, name in nodes])
        self.activation_results = set(self._names)
        if n_hidden:
            self._warn(f"{n_hidden} of its activations are computed inside a branch or a loop", "those are left out")

    def _warn(self, reason: str, consequence: str = "only its output is a layer") -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"the TorchScript model hides layers: {reason}; {consequence}")


class ExportTracer:
    """Traces the module of a torch.export program by running its graph node by node.

    Layers have the names of the exported model.
    """

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, fx.GraphModule)
        self.module: nn.Module = module
        nodes = [node for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        for node in module.graph.nodes:
            shape = getattr(node.meta.get("val"), "shape", None) if node.op == "placeholder" else None
            if shape and isinstance(shape[0], int):
                raise ModelError(
                    f"the program must accept any number of inputs, but it was exported for {shape[0]} at a time: "
                    'export it with dynamic_shapes=({0: torch.export.Dim("batch")},)'
                )
        activations = [node for node in nodes if _operator(node) in OPERATORS]
        self._names = dict(zip(activations, numbered([_path(node) for node in activations]), strict=True))
        self.activation_results = set(self._names.values())

    def trace(self, inputs: Any, on_activation: OnActivation) -> Any:
        return self.forward(inputs, on_activation, self.activation_results)

    def forward(self, inputs: Any, on_activation: OnActivation, names: Container[str]) -> Any:
        def on_node(node: fx.Node, result: Any) -> None:
            name = self._names.get(node)
            if name is not None and name in names:
                on_activation(name, result)

        interpreter = _TracingInterpreter(self.module, on_node)
        if not isinstance(inputs, Arguments):
            return interpreter.run(inputs)
        arguments, spec = self._as_exported(inputs), cast(Any, self.module._in_spec)
        return interpreter.run(*tree_flatten_spec((arguments.args, arguments.kwargs), spec))

    def run(self, inputs: Any) -> Any:
        return call_module(self.module, self._as_exported(inputs) if isinstance(inputs, Arguments) else inputs)

    def _as_exported(self, arguments: Arguments) -> Arguments:
        """The arguments by position or by name, as they were when the program was exported."""
        spec: Any = self.module._in_spec  # the structure of the arguments that it was exported with
        by_position, by_name = tree_unflatten(range(spec.num_leaves), spec)
        if len(arguments.args) > len(by_position):
            raise UsageError(
                f"the program was exported with the named inputs {', '.join(map(repr, by_name))}, but those of the "
                "data have positions: give the data as a dict"
            )
        bound = inspect.signature(self.module.forward).bind(*arguments.args, **arguments.kwargs).arguments
        return Arguments(tuple(bound.values())[: len(by_position)], {name: bound[name] for name in by_name})


class _TracingInterpreter(fx.Interpreter):
    def __init__(self, module: Any, on_node: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(module)
        self.on_node, self.extra_traceback = on_node, False

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.on_node(n, result)
        return result


def _without_optimizer() -> AbstractContextManager[None]:
    """Turn off TorchScript's optimizer, which starts after a few passes and would change the last bits."""
    return torch.jit.optimized_execution(False)  # type: ignore[attr-defined]


def is_exported(module: nn.Module) -> bool:
    """Return whether a module comes from `ExportedProgram.module()`: a graph of operators, not of modules."""
    return isinstance(module, fx.GraphModule) and any(
        isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes
    )


def script_parameters(module: Any) -> list[str]:
    """The names of the parameters of a TorchScript module."""
    return [argument.name for argument in module._c._get_method("forward").schema.arguments[1:]]


def _frozen_graph(module: Any) -> tuple[Any, list[Any]]:
    """Return a copy of a module's graph, inlined as far as possible, and the defaults of its optional arguments."""
    modes = [(submodule, submodule.training) for submodule in module.modules() if hasattr(submodule, "training")]
    module.eval()
    try:
        frozen = torch._C._freeze_module(module._c, [], True, False)
    finally:
        for submodule, mode in modes:
            submodule.training = mode
    graph = frozen._get_method("forward").graph.copy()
    arguments = module._c._get_method("forward").schema.arguments[2:]
    return graph, [argument.default_value for argument in arguments]


def _with_outputs(graph: Any, nodes: list[Any]) -> Any:
    """Return the graph as a function that also returns the results of `nodes`."""
    writes_in_place = any(_kind(node).endswith("_") for node in all_nodes(graph))
    outputs = [_copied(graph, node) if writes_in_place else node.output() for node in nodes]
    values = [*graph.outputs(), *outputs]
    result = graph.create("prim::TupleConstruct", values, 1)
    result.output().setType(torch._C.TupleType([value.type() for value in values]))
    graph.appendNode(result)
    graph.eraseOutput(0)
    graph.registerOutput(result.output())
    graph.eraseInput(0)  # the module itself, which a frozen graph does not use
    return torch._C._create_function_from_graph("traced", graph)


def _copied(graph: Any, node: Any) -> Any:
    """Return a copy of a node's result, taken before the model can overwrite it."""
    none = graph.insertConstant(None)
    none.node().moveBefore(node)
    copy = graph.create("aten::clone", [node.output(), none], 1)
    copy.insertAfter(node)
    return copy.output()


def all_nodes(block: Any) -> Iterator[Any]:
    """The nodes of a block of a graph, and of the blocks in them."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from all_nodes(inner)


def _kind(node: Any) -> str:
    kind: str = node.kind()
    return kind.removeprefix("aten::") if kind.startswith("aten::") else ""


def _operator(node: fx.Node) -> str:
    """Return `relu` for `aten.relu.default`."""
    return str(getattr(node.target, "_schema").name).removeprefix("aten::")  # noqa: B009  # typed as a mere callable


def _path(node: fx.Node) -> str:
    """Return where the model called an activation: its module, or the module that called the function."""
    stack = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())
    path, kind = stack[-1]
    kind = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    is_activation_module = path and kind.startswith(nn.ReLU.__module__)
    return str(path) if is_activation_module else f"{path}.{OPERATORS[_operator(node)]}()".lstrip(".")


def numbered(names: list[str]) -> list[str]:
    """Return the names with a number appended to every repetition, as in `relu()#2`."""
    calls: dict[str, int] = {}
    numbered = []
    for name in names:
        calls[name] = calls.get(name, 0) + 1
        numbered.append(name if calls[name] == 1 else f"{name}#{calls[name]}")
    return numbered


def _last_line(error: BaseException) -> str:
    """Return the last line of a TorchScript error, which says what went wrong."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
