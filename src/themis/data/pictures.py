"""Pictures in PNG, JPEG, WebP and BMP files, which are decoded one at a time when needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from themis.data.files import Numbers, data_errors, labelled_files, parse_whole
from themis.data.seeds import Seeds, from_files, scaled
from themis.errors import DataError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MAX_PIXELS = 1 << 26
"""Pixels of the largest picture that is decoded, 67 million."""
MAX_SIDE = 8192
SIZE_REMEDY = "scale them with ?size="
"""What to do with pictures of different sizes."""

Mode = Literal["RGB", "L"]
MODES: dict[str, Mode] = {"rgb": "RGB", "grey": "L", "gray": "L", "l": "L"}
Pixels = NDArray[np.uint8]


def image_seeds(
    path: Path, *, size: int | str | None = None, crop: int | str | None = None, mode: str | None = None
) -> Seeds:
    """A folder with one folder of pictures per class, or with pictures without labels.

    They become `[seeds, channels, height, width]` in 0..1. Classes are numbered in the order of the folders' names.
    size: scale the shorter side to this size and take the central square. crop: take the central square of this side
    afterwards. mode: `rgb` or `grey` (also `gray` and `L`); by default that of the first picture.
    """
    files, labels, classes = labelled_files(path.absolute(), SUFFIXES, "pictures")
    short, square = parse_whole(size, "size", MAX_SIDE, 224), parse_whole(crop, "crop", MAX_SIDE, 224)
    return picture_seeds(files, labels, size=short, crop=square, mode=mode).with_classes(classes)


def picture_seeds(
    files: Sequence[Path], labels: Any, *, size: int | None = None, crop: int | None = None, mode: str | None = None
) -> Seeds:
    """Seeds from picture files."""
    pixel_mode = parse_mode(mode) or picture_mode(files[0])

    def read(file: Path) -> Numbers:
        return scaled(crop_picture(decode(file, file, mode=pixel_mode, size=size), file, crop), 255)

    return from_files(files, read, labels, SIZE_REMEDY)


def decode(file: Path | IO[bytes], name: Path | str, *, mode: Mode, size: int | None = None) -> Pixels:
    """A picture's pixels `[channels, height, width]`; refuses, before decoding, a picture that is too large."""
    with opened(file, name) as image:
        return pixels_of(image, mode, size)


def pixels_of(image: Picture, mode: Mode, size: int | None = None) -> Pixels:
    """The pixels `[channels, height, width]` of an open picture."""
    from PIL import Image

    image = image.convert(mode)
    if size is not None:
        width, height = image.size
        scale = size / min(width, height)
        new_size = (max(size, round(width * scale)), max(size, round(height * scale)))
        if new_size[0] * new_size[1] > MAX_PIXELS:
            raise ValueError(f"a picture of {width}x{height} scaled to the short side {size} is too large")
        image = image.resize(new_size, Image.Resampling.BILINEAR)
        left, top = (new_size[0] - size) // 2, (new_size[1] - size) // 2
        image = image.crop((left, top, left + size, top + size))
    pixels = np.array(image)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def crop_picture(pixels: Pixels, name: Path | str, crop: int | None) -> Pixels:
    """The central square of side `crop`, or the whole picture if it is None."""
    if crop is None:
        return pixels
    height, width = pixels.shape[1:]
    if crop > min(height, width):
        raise DataError(f"{name} must be at least crop={crop} wide and high, but it is {width}x{height}: give ?size=")
    top, left = (height - crop) // 2, (width - crop) // 2
    return np.ascontiguousarray(pixels[:, top : top + crop, left : left + crop])


def picture_mode(file: Path) -> Mode:
    """`L` if a picture is grey, otherwise `RGB`."""
    with opened(file, file) as image:
        return "L" if image.mode in ("L", "1") else "RGB"


@contextmanager
def opened(file: Path | IO[bytes], name: Path | str) -> Iterator[Picture]:
    """An open picture that is not decoded yet; errors become one-line `DataError`s."""
    from PIL import Image

    with data_errors(name, "a picture (PNG, JPEG, WebP or BMP)"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures are refused below, others are read as well as possible
        with Image.open(file, formats=PICTURE_FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(
                    f"{name} must have at most {MAX_PIXELS:,} pixels, got {width:,}x{height:,}: scale it down"
                )
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{name} must have 8 bits per channel, but its mode is {image.mode}: convert it")
            yield image


def parse_mode(mode: str | None) -> Mode | None:
    """The mode given by an option; None for that of the first picture."""
    if mode is None:
        return None
    if mode.lower() not in MODES:
        raise UsageError(f"mode must be 'rgb' or 'grey', got {mode!r}: leave it out to use that of the first picture")
    return MODES[mode.lower()]
