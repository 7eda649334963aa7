"""Pictures as PNG in a page's own text; a writer of thirty lines, so that a report needs no picture library."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Pixels = NDArray[np.uint8]
LARGEST = 80
"""Pixels of the longer side; larger pictures are scaled down to it."""


def data_uri(pixels: Pixels) -> str:
    """A picture `[height, width]` or `[height, width, 3]` as a `data:` address."""
    return "data:image/png;base64," + b64encode(png(pixels)).decode()


def png(pixels: Pixels) -> bytes:
    """The bytes of a PNG file; of two ways to write a row, the one that is smaller."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    up = rows.copy()
    up[1:] -= rows[:-1]
    ways = (np.insert(each, 0, way, axis=1).tobytes() for way, each in ((0, rows), (2, up)))
    body = min((zlib.compress(each, 9) for each in ways), key=len)
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*each) for each in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether an input can be drawn: `[channels, height, width]`."""
    return len(shape) == 3 and min(shape[1:]) > 1


def to_pixels(pictures: Tensor, bounds: tuple[float, float]) -> Pixels:
    """Pictures `[n, channels, height, width]` as bytes `[n, height, width(, 3)]`, large ones scaled down.

    Pictures of other than one or three channels are shown as their mean; what is not finite as black.
    """
    import torch.nn.functional as F

    shown = (pictures.float() - bounds[0]) / (bounds[1] - bounds[0])
    if shown.shape[1] not in (1, 3):
        shown = shown.mean(1, keepdim=True)
    longest = max(shown.shape[2:])
    if longest > LARGEST:
        size = [max(1, round(each * LARGEST / longest)) for each in shown.shape[2:]]
        shown = F.interpolate(shown, size, mode="area")
    whole = shown.nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().movedim(1, -1).numpy()
    return whole[..., 0] if whole.shape[-1] == 1 else whole
