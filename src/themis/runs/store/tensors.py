"""Safetensors files with the inputs and outputs of the most telling faults, and with weights and their ledger."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from themis.data.files import available_bytes
from themis.errors import ModelError, StoreError, first_line
from themis.measure.tests import Bools, Ints
from themis.reading import open_regular, parse_json, read_regular
from themis.runs.faults import Array, telling
from themis.runs.store.files import explained, write_file
from themis.runs.store.schema import RESTORE_REMEDY, damage_explained
from themis.target.ledger import Ledger, ledger_metadata, ledger_of

_FILE_PATTERN = re.compile(r"\d{6,}\.safetensors")
SMALL_FILE_BYTES, MAX_SMALL_FILES = 32 << 20, 32
"""Files smaller than SMALL_FILE_BYTES are merged once there are MAX_SMALL_FILES of them."""
NEW_FILE_BYTES = 16 << 20
"""Approximate size of a file of new tensors, and of the tensors in memory after which they are written."""
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in safetensors files."""


@dataclass(frozen=True)
class Tensors:
    """Clean inputs, disturbed inputs and outputs of faults, one row per fault, all on the CPU."""

    id: Tensor
    clean_inputs: Tensor
    inputs: Tensor
    outputs: Tensor
    clean_outputs: Tensor | None = None
    """Outputs for the clean inputs, in tasks whose answers are drawn."""
    seed: Tensor | None = None
    """The row of each fault's seed in `clean_inputs`, which faults may share; None if there is one row per fault."""

    def __len__(self) -> int:
        return len(self.id)

    @property
    def nbytes(self) -> int:
        """The size of these tensors in memory, without shared clean inputs."""
        columns = (self.id, self.inputs, self.outputs, self.clean_outputs)
        own = sum(column.nbytes for column in columns if column is not None)
        return own + (self.clean_inputs.nbytes if self.seed is None else self.seed.nbytes)

    def __getitem__(self, rows: Tensor | slice) -> Tensors:
        clean_inputs = self.clean_inputs[rows if self.seed is None else self.seed[rows]]
        answers = None if self.clean_outputs is None else self.clean_outputs[rows]
        return Tensors(self.id[rows], clean_inputs, self.inputs[rows], self.outputs[rows], answers)

    @staticmethod
    def join(parts: Iterable[Tensors]) -> Tensors:
        return Tensors(**{name: torch.cat(column) for name, column in columns_of(list(parts)).items()})


TENSOR_COLUMNS = ("id", "clean_inputs", "inputs", "outputs", "clean_outputs")
"""The arrays in a file of tensors."""


def columns_of(parts: Sequence[Tensors]) -> dict[str, list[Tensor]]:
    """The columns that all parts have, each as a list with one tensor per part."""
    columns = {name: [getattr(part, name) for part in parts] for name in TENSOR_COLUMNS}
    return {name: column for name, column in columns.items() if all(each is not None for each in column)}


def read_tensors(path: Path) -> Tensors:
    """Read all rows of a file."""
    arrays = deserialize(read_tensor_file(path), path)
    with damage_explained(path):
        _check_rows(arrays)
    return Tensors(**{name: arrays[name] for name in TENSOR_COLUMNS if name in arrays})


def read_tensor_file(path: Path) -> bytes:
    """The content of a safetensors file; refuses a file that is too large for the memory."""
    try:
        return read_regular(path, available_bytes() // 2)
    except FileNotFoundError as error:
        raise StoreError(f"{path} belongs to the run, but it does not exist: {RESTORE_REMEDY}") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}; {RESTORE_REMEDY}") from error


def read_header(content: bytes) -> dict[str, Any]:
    """The metadata in the content of a safetensors file that has been deserialized already."""
    size = int.from_bytes(content[:8], "little")
    metadata: dict[str, Any] = parse_json(content[8 : 8 + size]).get("__metadata__", {})
    return metadata


def _check_rows(arrays: dict[str, Tensor]) -> None:
    """Raise ValueError if the arrays are not those of faults."""
    if missing := [name for name in TENSOR_COLUMNS[:-1] if name not in arrays]:
        raise ValueError(f"it must have an array {missing[0]!r}, which is missing")
    for name in arrays.keys() & set(TENSOR_COLUMNS):
        tensor = arrays[name]
        is_right = tensor.dtype == torch.int64 and tensor.ndim == 1 if name == "id" else tensor.is_floating_point()
        if not is_right or tensor.ndim < 1 or len(tensor) != len(arrays["id"]):
            raise ValueError(f"its array {name!r} has the wrong type or shape, {tensor.dtype} {list(tensor.shape)}")
    if arrays["inputs"].shape != arrays["clean_inputs"].shape:
        raise ValueError("its arrays 'inputs' and 'clean_inputs' must have the same shape")
    for name in ("inputs", "clean_inputs"):
        if not bool(arrays[name].isfinite().all()):
            raise ValueError(f"its array {name!r} must hold finite numbers")


def content_of(
    arrays: Mapping[str, Tensor | list[Tensor]], metadata: dict[str, str] | None = None
) -> list[bytes | memoryview]:
    """The content of a safetensors file, as pieces to write one after the other, without copying the arrays.

    A list of tensors becomes one array with all their rows. The safetensors library would need that array in memory,
    and copies every array twice while it holds the GIL.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    pieces, stop = list[memoryview](), 0
    in_parts = {name: [array] if isinstance(array, Tensor) else array for name, array in arrays.items()}
    for name, parts in in_parts.items():
        if len({part.dtype for part in parts}) > 1:
            in_parts[name] = [torch.cat(parts)]
    for name, parts in sorted(in_parts.items(), key=lambda item: (-item[1][0].element_size(), item[0])):  # aligned
        dtype, shape, start = parts[0].dtype, list(parts[0].shape), stop
        if dtype not in _DTYPE_NAMES:
            remedy = "convert it, for instance to torch.float32"
            raise StoreError(f"{name} must have a type that can be stored, got {dtype}: {remedy}")
        for part in parts:
            flat = part.detach().cpu().contiguous().as_strided((part.numel(),), (1,))
            pieces.append(flat.view(torch.uint8).numpy().data)
            stop += pieces[-1].nbytes
        if len(parts) > 1:
            shape[0] = sum(map(len, parts))
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *pieces]


def checksum(*content: bytes | memoryview) -> str:
    """A checksum of a file's content; it is part of the name of a state file."""
    total = 0
    for piece in content:
        total = zlib.crc32(piece, total)
    return f"{total:08x}"


def deserialize(content: bytes, path: Path) -> dict[str, Tensor]:
    """The arrays of a safetensors file; `path` is where the bytes were read from."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        arrays: dict[str, Tensor] = load(content)
    except (SafetensorError, ValueError, KeyError, RuntimeError, TypeError) as error:  # types that torch lacks, sizes
        raise StoreError(f"{path} is damaged: {first_line(error)}; {RESTORE_REMEDY}") from error
    return arrays


def choose_kept(seed_id: Ints, answer: Ints, score: NDArray[np.float64], id: Ints, n: int) -> Bools:
    """Which `n` faults are kept: the most telling of every seed and wrong outcome, then the second of each, and so on.

    A fault that is not kept now would not be kept later either, whatever else is found. The choice can therefore be
    made among the faults kept so far and the new ones, and the result does not depend on how often it is made.
    """
    kept = np.ones(len(id), dtype=bool)
    if len(id) <= n:
        return kept
    order = np.lexsort((id, score, answer, seed_id))
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (np.diff(seed_id[order]) != 0) | (np.diff(answer[order]) != 0)
    starts = np.flatnonzero(is_first)
    place = np.arange(len(order)) - starts[np.cumsum(is_first) - 1]
    by_place = order[np.lexsort((id[order], score[order], place))]
    kept[by_place[n:]] = False
    return kept


class TensorStore:
    """Stores the tensors of at most `n` faults, and remembers the file of each."""

    def __init__(self, folder: Path, n: int) -> None:
        self.folder, self.n = folder, n
        ints, floats = np.zeros(0, np.int64), np.zeros(0)
        self._kept: dict[str, Array] = {"id": ints, "seed_id": ints, "answer": ints, "score": floats, "file": ints}
        self._candidates = {name: column for name, column in self._kept.items() if name != "file"}
        self._rows: dict[int, int] = {}  # number of rows in each file, including those of dropped faults
        self._row_bytes = 0
        self._last_file = max(self._files(), default=0)

    def restore(self, columns: dict[str, Array], files: Ints) -> None:
        """Adopt faults whose tensors are in numbered files, and remove all other files."""
        self._kept = {**_joined(self._kept, columns), "file": files}
        self._rows = {file: len(read_ids(self.path(file))) for file in np.unique(files).tolist()}
        self.sweep()

    def worth_keeping(self, columns: dict[str, Array]) -> Bools:
        """Which new faults may be among the `n` stored in the end, given all faults passed to this method so far.

        It does not touch the files, so it can be called while another thread writes.
        """
        both = _joined(self._candidates, columns)
        kept = _choose(both, self.n)
        n_before = len(self._candidates["id"])
        self._candidates = {name: column[kept] for name, column in both.items()}
        return kept[n_before:]

    def put(self, columns: dict[str, Array], tensors: Sequence[Tensors]) -> tuple[Ints, Ints]:
        """Store the tensors of new faults worth keeping; return the file of each fault (0: none) and the ids dropped.

        tensors: those of the new faults, in their order; faults that are not worth keeping may be missing.
        """
        both = _joined(self._kept, columns)
        kept = _choose(both, self.n)
        n_before = len(self._kept["id"])
        is_new = kept[n_before:]
        if is_new.any():
            portions = _pick(tensors, columns["id"][is_new])
            files_of = [np.full(sum(map(len, portion)), self._write(portion)) for portion in portions]
            both["file"][n_before:][is_new] = np.concatenate(files_of)
        files: Ints = both["file"][n_before:]
        dropped: Ints = self._kept["id"][~kept[:n_before]]
        self._kept = {name: column[kept] for name, column in both.items()}
        return files, dropped

    def forget(self, first: int, stop: int) -> bool:
        """Drop the tensors of a range of tests, which are measured again; return whether there were any."""
        is_old = (self._kept["id"] >= first) & (self._kept["id"] < stop)
        if is_old.any():
            self._kept = {name: column[~is_old] for name, column in self._kept.items()}
        return bool(is_old.any())

    def merge_files(self) -> dict[int, Ints]:
        """Merge small and half-empty files if there are many; return ids by new file. Old files stay until `sweep`."""
        files, counts = np.unique(self._kept["file"], return_counts=True)
        live = dict(zip(files.tolist(), counts.tolist(), strict=True))
        small = [file for file in live if self._rows[file] * self._row_bytes < SMALL_FILE_BYTES]
        half_empty = [file for file, n in live.items() if 2 * n < self._rows[file]]
        n_dead = sum(self._rows.values()) - len(self._kept["id"])
        if len(small) < MAX_SMALL_FILES and n_dead <= len(self._kept["id"]):
            return {}
        moved, parts = {}, []
        old = sorted({*small, *half_empty})
        for file in old:
            tensors = read_tensors(self.path(file))
            is_live = np.isin(tensors.id.numpy(), self._kept["id"][self._kept["file"] == file])
            parts.append(tensors[torch.from_numpy(is_live)])
            if file == old[-1] or sum(map(len, parts)) * self._row_bytes >= SMALL_FILE_BYTES:
                ids = torch.cat([part.id for part in parts]).numpy()
                moved[self._write(parts)] = ids
                parts = []
        for number, ids in moved.items():
            self._kept["file"][np.isin(self._kept["id"], ids)] = number
        return moved

    def sweep(self) -> None:
        """Remove files of tensors that have no stored faults."""
        live = set(self._kept["file"].tolist())
        self._rows = {file: n for file, n in self._rows.items() if file in live}
        for file, path in self._files().items():
            if file not in live and not path.is_symlink():
                path.unlink(missing_ok=True)

    def _files(self) -> dict[int, Path]:
        return {int(path.stem): path for path in self.folder.iterdir() if _FILE_PATTERN.fullmatch(path.name)}

    def path(self, file: int) -> Path:
        """The path of a file by its number."""
        return self.folder / file_name(file)

    def _write(self, parts: Sequence[Tensors]) -> int:
        self._last_file += 1
        write_file(self.path(self._last_file), *content_of(columns_of(parts)))
        self._rows[self._last_file] = sum(map(len, parts))
        self._row_bytes = next(part[:1].nbytes for part in parts if len(part))
        return self._last_file


def _pick(parts: Sequence[Tensors], ids: Ints) -> Iterator[list[Tensors]]:
    """The rows with these ids, in portions of about NEW_FILE_BYTES to limit the memory for copies."""
    is_picked = np.isin(np.concatenate([part.id.numpy() for part in parts]), ids)
    n_rows = 1 + NEW_FILE_BYTES // next(part[:1].nbytes for part in parts if len(part))
    picked, nbytes = list[Tensors](), 0
    for part, mask in zip(parts, np.split(is_picked, np.cumsum([len(part) for part in parts])[:-1]), strict=True):
        rows = torch.from_numpy(np.flatnonzero(mask))
        for first in range(0, len(rows), n_rows):
            some = rows[first : first + n_rows]
            picked.append(part[some if len(some) < len(part) else slice(None)])
            nbytes += picked[-1].nbytes
            if nbytes >= NEW_FILE_BYTES:
                yield picked
                picked, nbytes = [], 0
    if picked:
        yield picked


def _joined(kept: dict[str, Array], columns: dict[str, Array]) -> dict[str, Array]:
    """The columns of kept faults, followed by those of new faults, which have no file yet."""
    score, file = telling(columns["distance"], columns["confidence"]), np.zeros(len(columns["id"]), np.int64)
    new = {**columns, "score": score, "file": file}
    return {name: np.concatenate([column, new[name]]) for name, column in kept.items()}


def _choose(faults: dict[str, Array], n: int) -> Bools:
    return choose_kept(faults["seed_id"], faults["answer"], faults["score"], faults["id"], n)


def file_name(file: int) -> str:
    return f"{file:06d}.safetensors"


def read_ids(path: Path) -> Ints:
    """The ids of the faults in a file, without reading their tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path), safe_open(path, "np") as file:
            ids: Ints = file.get_tensor("id")
        if ids.dtype != np.int64 or ids.ndim != 1:
            raise ValueError("its array 'id' has the wrong type or shape")
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is damaged: {first_line(error)}; {RESTORE_REMEDY}") from error
    return ids


def write_weights(path: Path, module: nn.Module, ledger: Ledger, about: dict[str, str]) -> None:
    """Write a module's weights as safetensors, atomically; the same weights give the same bytes.

    ledger: what the weights were trained on, in addition to the module's own ledger. about: metadata in plain text.
    """
    state = module.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ModelError(f"weights must be tensors, but {name} is a {type(value).__name__}: make it a tensor")
    metadata = {"format": "pt", **about, **ledger_metadata(ledger.merge(ledger_of(module)))}
    with explained(path):
        write_file(path, *content_of(state, metadata))
