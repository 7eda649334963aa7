"""The file of raw results: read to continue from it, rewritten whenever campaigns finish."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from themis.runs.environment import describe_environment


def read_results(path: str | None, settings: dict[str, Any], again: list[str]) -> dict[str, Any]:
    """The results of an earlier call in the file, without the campaigns that are run again."""
    if path is None or not os.path.exists(path):
        return {"settings": settings, "rows": {}}
    results: dict[str, Any] = json.loads(Path(path).read_text())["results"]
    if results["settings"] != settings:
        sys.exit(f"{path} must hold campaigns of {settings}, but it has {results['settings']}: give another file")
    for row in results["rows"].values():
        row["techniques"] = {name: records for name, records in row["techniques"].items() if name not in again}
    return results


def write_results(path: str, device: str, results: dict[str, Any]) -> None:
    """Rewrite the file, one line per campaign; the old file is replaced atomically."""
    command = shlex.join(["python", *sys.argv])
    content = {"command": command, "environment": describe_environment(torch.device(device)), "results": results}
    Path(f"{path}.part").write_text(_text(content) + "\n")
    os.replace(f"{path}.part", path)


def _text(value: Any, depth: int = 0) -> str:
    """JSON with line breaks down to single campaigns."""
    if not isinstance(value, dict | list) or not value or "random_seed" in value or depth > 5:
        return json.dumps(value)
    pad, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, list):
        return "[" + pad + f",{pad}".join(_text(item, depth + 1) for item in value) + end + "]"
    parts = (f"{json.dumps(str(name))}: {_text(item, depth + 1)}" for name, item in value.items())
    return "{" + pad + f",{pad}".join(parts) + end + "}"
