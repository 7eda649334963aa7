"""Files whose code the user allows to run.

Weights, ONNX and TorchScript files are read without running Python code. Reading a pickled model or a torch.export
program runs the code in it, so these are refused unless the user names exactly that file. A run records the file with
its hash, so that a different file in its place is refused again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from themis.errors import DataError, ModelError
from themis.target.fingerprint import hash_file

HASH_MARK = "@sha256:"


@dataclass(frozen=True)
class Trust:
    """Trusted files, each as `FILE` or `FILE@sha256:HASH`; relative paths start at the working directory."""

    files: tuple[str, ...] = ()

    @staticmethod
    def of(files: Sequence[str] | None) -> Trust:
        return Trust(tuple(files or ()))

    def covers(self, path: Path) -> bool:
        """Return whether the user trusts this file; raise if it has changed since."""
        for file in self.files:
            name, _, expected = file.partition(HASH_MARK)
            if os.path.realpath(name) == os.path.realpath(path):
                if expected and os.path.isfile(path) and hash_file(path) != expected:
                    raise ModelError(
                        f"{path} must be the file that was trusted, but it has changed since: inspect it, and pass "
                        f"--trust {name} again"
                    )
                return True
        return False

    def require(self, path: Path, kind: str, remedy: str) -> None:
        """Refuse a file that is not trusted; `kind` says what it is and why that matters."""
        if not self.covers(path):
            raise DataError(
                f"{path} must be trusted, but it is {kind}: pass --trust {path} if you know it, or {remedy}"
            )

    def as_list(self, folder: Path) -> list[str]:
        """Return each file with its hash, for a run to record."""
        plain = {file for file in self.files if HASH_MARK not in file and os.path.isfile(folder / file)}
        return [f"{file}{HASH_MARK}{hash_file(folder / file)}" if file in plain else file for file in self.files]
