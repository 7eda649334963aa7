"""The file of raw figures: read to go on with, rewritten as campaigns end."""

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
    """What an earlier call left in the file, without the campaigns that are to be run again."""
    if path is None or not os.path.exists(path):
        return {"settings": settings, "rows": {}}
    results: dict[str, Any] = json.loads(Path(path).read_text())["results"]
    if results["settings"] != settings:
        sys.exit(f"{path} must hold campaigns of {settings}, it has {results['settings']}: name another file")
    for row in results["rows"].values():
        row["techniques"] = {name: found for name, found in row["techniques"].items() if name not in again}
    return results


def write_results(path: str, device: str, results: dict[str, Any]) -> None:
    """The whole file anew, a campaign a line; the old one stays until the new one is there."""
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
        return "[" + pad + f",{pad}".join(_text(each, depth + 1) for each in value) + end + "]"
    parts = (f"{json.dumps(name)}: {_text(each, depth + 1)}" for name, each in value.items())
    return "{" + pad + f",{pad}".join(parts) + end + "}"
