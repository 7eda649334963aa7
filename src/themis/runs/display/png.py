"""Pictures as embedded PNG images, written without an image library so that a report needs none."""

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
MAX_SIDE = 80
"""Pixels of the longer side; larger pictures are scaled down."""


def data_uri(pixels: Pixels) -> str:
    """A picture `[height, width]` or `[height, width, 3]` as a `data:` URI."""
    return "data:image/png;base64," + b64encode(png(pixels)).decode()


def png(pixels: Pixels) -> bytes:
    """The bytes of a PNG file, with the smaller of two row filters."""
    height, width = pixels.shape[:2]
    colour = 2 if pixels.ndim == 3 else 0
    rows = np.ascontiguousarray(pixels).reshape(height, -1)
    up = rows.copy()
    up[1:] -= rows[:-1]
    filtered = (np.insert(lines, 0, kind, axis=1).tobytes() for kind, lines in ((0, rows), (2, up)))
    body = min((zlib.compress(content, 9) for content in filtered), key=len)
    head = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def is_picture(shape: tuple[int, ...]) -> bool:
    """Whether an input can be drawn: `[channels, height, width]`."""
    return len(shape) == 3 and min(shape[1:]) > 1


def to_pixels(pictures: Tensor, bounds: tuple[float, float], max_side: int = MAX_SIDE) -> Pixels:
    """Pictures `[n, channels, height, width]` as bytes `[n, height, width(, 3)]`, large ones scaled down.

    Pictures with other than one or three channels are shown as their mean, values that are not finite as black.
    """
    import torch.nn.functional as F

    scaled = (pictures.float() - bounds[0]) / (bounds[1] - bounds[0])
    if scaled.shape[1] not in (1, 3):
        scaled = scaled.mean(1, keepdim=True)
    longest = max(scaled.shape[2:])
    if longest > max_side:
        size = [max(1, round(side * max_side / longest)) for side in scaled.shape[2:]]
        scaled = F.interpolate(scaled, size, mode="area")
    pixels = scaled.nan_to_num(0.0).clamp(0, 1).mul(255).round().byte().movedim(1, -1).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
