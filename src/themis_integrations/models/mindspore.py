"""MindSpore cells as targets."""

import importlib
from typing import Any

from numpy.typing import NDArray

from themis.errors import ModelError, UsageError
from themis.target.blackbox import BlackBox
from themis.target.compiled import numbered
from themis.target.loaders.factory import import_package


def black_box(cell: Any, **options: Any) -> BlackBox:
    """Return a `BlackBox` around a MindSpore cell; every call of an activation cell is a layer.

    options: those of `BlackBox`. The cell is put into evaluation mode, and must run in PyNative mode for hooks to fire.
    Activations that are functions, such as `ops.relu`, are not cells and cannot be seen: if nothing else is, the cell
    is refused.
    """
    mindspore = import_package("mindspore")
    if not isinstance(cell, mindspore.nn.Cell):
        raise UsageError(f"black_box needs a mindspore.nn.Cell, got {type(cell).__name__}: pass the model itself")
    activation_module = importlib.import_module("mindspore.nn.layer.activation").__name__
    cell.set_train(False)

    def predict(inputs: NDArray[Any]) -> tuple[NDArray[Any], dict[str, NDArray[Any]]]:
        seen: list[tuple[str, NDArray[Any]]] = []

        def hook(name: str) -> Any:
            return lambda _cell, _inputs, output: seen.append((name, output.asnumpy()))

        handles = [
            submodule.register_forward_hook(hook(name or "cell"))
            for name, submodule in cell.cells_and_names()
            if type(submodule).__module__ == activation_module
        ]
        try:
            result = cell(mindspore.Tensor(inputs))
        finally:
            for handle in handles:
                handle.remove()
        check_seen(len(seen), sum(1 for _ in cell.cells()))
        scores = result[0] if isinstance(result, tuple | list) else result
        if not hasattr(scores, "asnumpy"):
            raise ModelError(f"the cell must return a tensor or a tuple of them, got {type(result).__name__}")
        names = numbered([name for name, _ in seen])
        return scores.asnumpy(), dict(zip(names, (activation for _, activation in seen), strict=True))

    predict.keeps_padding = True  # type: ignore[attr-defined]
    return BlackBox(predict, **options)


def check_seen(n_activations: int, n_children: int) -> None:
    """Refuse a cell with layers if none of them was observed, because only its output would be tested."""
    if n_children and not n_activations:
        raise ModelError(
            f"some activation of the cell must be seen, got none of its {n_children} child cells: use activation cells "
            "such as nn.ReLU() instead of functions such as ops.relu, and PyNative mode "
            "(mindspore.set_context(mode=mindspore.PYNATIVE_MODE)); to test the output alone, pass a function to "
            "themis.BlackBox"
        )
