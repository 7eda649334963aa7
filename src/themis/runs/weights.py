"""Writing weights together with the ledger of what they were trained on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from themis.errors import ModelError, UsageError
from themis.runs.store.files import explained, write_file
from themis.target.ledger import COUNT_KEY, HASHES_KEY, Ledger, ledger_metadata, ledger_of


def write_weights(path: Path, module: nn.Module, ledger: Ledger, about: dict[str, str]) -> None:
    """Write a module's weights as safetensors, atomically; the same weights give the same bytes.

    ledger: what they were trained on, in addition to the module's own ledger. about: metadata in plain text.
    """
    from themis.runs.store.tensors import content_of

    path = Path(path)
    if not isinstance(module, nn.Module):
        raise UsageError(f"weights must be those of an nn.Module, got {type(module).__name__}: pass target.module")
    if path.suffix != ".safetensors":
        raise UsageError(f"the weights file must end in .safetensors, got {path.name}: rename it")
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"weights must be tensors, but {name} is a {type(value).__name__}: make it a tensor")
    if reserved := {HASHES_KEY, COUNT_KEY} & about.keys():
        raise UsageError(f"about must not use the names of the ledger, got {min(reserved)!r}: rename it")
    metadata = {"format": "pt", **about, **ledger_metadata(ledger.merge(ledger_of(module)))}
    with explained(path):
        write_file(path, *content_of(state, metadata))
