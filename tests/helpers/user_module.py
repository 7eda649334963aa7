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

TROUBLED = f"""{SMALL}
import warnings
from themis import Target

def target():
    return Target(net(), bounds=(0, 2))

def broken():
    raise ZeroDivisionError("no model today")

class Interrupted(nn.Module):
    left, error = 12, KeyboardInterrupt

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        warnings.warn("an old habit")
        type(self).left -= 1
        if self.left == 0:
            raise self.error
        return self.net(x)

class WornOut(Interrupted):
    error = ZeroDivisionError("worn out")
"""
"""The same with factories that fail, warn or are interrupted."""


def go_to(folder, monkeypatch, text, name="mine"):
    """Work in a folder with the module in it, as if by a process that was started there."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    # A module that is rewritten within a second, at the same length, would be read from its old bytecode.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return folder
