"""Files whose code the user allows to run.

Weights, ONNX and TorchScript files are read without running Python code. A pickled model and a torch.export program
are not: what reads them runs what is in them. They are refused, unless the user names exactly that file. A run
remembers the file with its hash, so that another file put in its place is refused again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from themis.errors import DataError, ModelError
from themis.target.fingerprint import hash_file

MARK = "@sha256:"


@dataclass(frozen=True)
class Trust:
    """Trusted files, each as `FILE` or `FILE@sha256:HASH`; relative ones are looked up in the working directory."""

    files: tuple[str, ...] = ()

    @staticmethod
    def of(files: Sequence[str] | None) -> Trust:
        return Trust(tuple(files or ()))

    def covers(self, path: Path) -> bool:
        """Whether the user trusts this file."""
        for each in self.files:
            name, _, known = each.partition(MARK)
            if os.path.realpath(name) == os.path.realpath(path):
                if known and path.is_file() and hash_file(path) != known:
                    raise ModelError(
                        f"{path} must be the file that was trusted, it has changed since: look at it, and give --trust "
                        f"{name} again"
                    )
                return True
        return False

    def require(self, path: Path, what: str, remedy: str) -> None:
        """Refuse a file that is not trusted; `what` it is and why that matters."""
        if not self.covers(path):
            raise DataError(f"{path} must be trusted, it is {what}: give --trust {path} if you know it, or {remedy}")

    def as_list(self, folder: Path) -> list[str]:
        """Each file with its hash, for a run to remember."""
        return [_with_hash(each, folder) for each in self.files]


def _with_hash(name: str, folder: Path) -> str:
    path = folder / name
    return name if MARK in name or not path.is_file() else f"{name}{MARK}{hash_file(path)}"
