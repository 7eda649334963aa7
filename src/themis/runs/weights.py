"""Writing weights together with the ledger of what they were trained on."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor, nn

from themis.errors import ModelError, UsageError
from themis.runs.store.files import explained, write_file
from themis.target.ledger import COUNT_KEY, HASHES_KEY, Ledger, ledger_metadata, ledger_of


def write_weights(path: Path, module: nn.Module, ledger: Ledger, about: dict[str, str]) -> None:
    """Write a module's weights as safetensors, atomically; the same weights give the same bytes.

    ledger: what they were trained on, in addition to the module's own ledger. about: metadata in plain text.
    """
    from themis.runs.store.tensors import serialize

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
    # Copies, since tensors in a safetensors file may not share memory as those of a module may.
    content = serialize({name: value.detach().cpu().clone().contiguous() for name, value in state.items()})
    with explained(path):
        write_file(path, _with_metadata(content, metadata))


def _with_metadata(content: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with metadata in a fixed order; the library itself writes it in a varying order."""
    size = int.from_bytes(content[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(content[8 : 8 + size])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[8 + size :]
