"""The run folder: where a campaign's faults and results go as it runs."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from themis.errors import UsageError
from themis.faults import Fault
from themis.result import Round, Run, Start


class Store(Protocol):
    """Where results go. Faults of a round are handed over before the round is announced to anyone."""

    def begin(self, start: Start, environment: dict[str, Any]) -> None: ...

    def add_faults(self, faults: list[Fault], inputs: Tensor) -> None:
        """Keep faults and their inputs `[faults, ...]`."""

    def add_round(self, round: Round) -> None: ...

    def end(self, run: Run) -> None: ...


class Folder:
    """A run folder of plain files: config, environment, summary, and faults and rounds as JSON lines."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if (self.path / "config.yaml").exists():
            raise UsageError(f"out must be a new folder, {self.path} holds a run already: choose another or remove it")
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"out must be a folder, {self.path} is a file")

    def begin(self, start: Start, environment: dict[str, Any]) -> None:
        import yaml

        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"out must be a folder that can be written, {self.path}: {error.strerror}") from error
        settings = {name: _named(value) for name, value in asdict(start.settings).items()}
        config = {"perturb": start.perturbation, **settings}
        self._write("config.yaml", yaml.safe_dump(config, sort_keys=False))
        self._write("environment.json", json.dumps(environment, indent=2))

    def add_faults(self, faults: list[Fault], inputs: Tensor) -> None:
        self._append("faults.jsonl", [fault.as_dict() for fault in faults])

    def add_round(self, round: Round) -> None:
        self._append("rounds.jsonl", [asdict(round)])

    def end(self, run: Run) -> None:
        self._write("summary.json", json.dumps(_finite(run.summary()), indent=2, allow_nan=False))

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text + "\n", encoding="utf-8")

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            with (self.path / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(_finite(row), allow_nan=False) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())


def _finite(value: Any) -> Any:
    """Plain data with None for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _named(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
