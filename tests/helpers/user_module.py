"""A user's own module in the folder that a command runs in."""

import importlib
import sys

SMALL = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))

def data():
    return torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
"""
"""A small net and its data."""


def go_to(folder, monkeypatch, text, name="mine"):
    """Work in a folder with the module in it, as if by a process that was started there."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return folder
