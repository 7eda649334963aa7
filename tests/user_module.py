"""A user's own module in the folder that a command runs in."""

import importlib
import sys


def go_to(folder, monkeypatch, text, name="mine"):
    """Work in a folder with the module in it, as if by a process that was started there."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return folder
