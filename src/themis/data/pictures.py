"""Pictures: PNG, JPEG, WebP and BMP, decoded one at a time when they are asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from themis.data.files import explained, needed
from themis.data.rows import Numbers
from themis.data.seeds import Seeds, from_reader, scaled
from themis.errors import DataError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MAX_PIXELS = 1 << 26
"""Of a picture that is decoded: 67 million."""

Mode = Literal["RGB", "L"]
Pixels = NDArray[np.uint8]


def image_seeds(
    path: Path | None = None, *, size: int | str | None = None, crop: int | str | None = None, mode: str | None = None
) -> Seeds:
    """A folder of class folders of pictures, or of pictures without labels; `[seeds, channels, height, width]` in 0..1.

    Class numbers are those of the folders' names in order. size: the short side is scaled to it and the middle square
    taken. crop: the middle square of this side, after that. mode: `rgb` or `grey`; by default as the first picture is.
    """
    folder = needed(path, "images").absolute()
    if not os.path.isdir(folder):
        raise DataError(f"the folder of pictures must exist, {folder} does not: check the path")
    with explained(folder, "a folder that can be listed"):
        classes = sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
        by_class = [_pictures_in(each) for each in classes]
        loose = _pictures_in(folder)
    if any(by_class) and loose:
        raise DataError(
            f"{folder} must hold folders of classes or pictures, it has both, as {loose[0].name}: move them apart"
        )
    files = [each for part in by_class for each in part] or loose
    labels = [k for k, part in enumerate(by_class) for _ in part] or None
    how = {"size": side_of(size, "size"), "crop": side_of(crop, "crop")}
    seeds = picture_seeds(files, labels, **how, mode=mode, what=str(folder))
    return seeds if labels is None else seeds.classed([each.name for each in classes])


def picture_seeds(
    files: Sequence[Path],
    labels: Any,
    *,
    what: str,
    size: int | None = None,
    crop: int | None = None,
    mode: str | None = None,
) -> Seeds:
    """Seeds from files of pictures."""
    if not files:
        raise DataError(f"{what} must hold pictures ({', '.join(SUFFIXES)}), none was found: check the path")
    wanted = _mode(mode) or first_mode(files[0], files[0])
    first = fit(decode(files[0], files[0], mode=wanted, size=size), files[0], crop)
    shape = first.shape

    def read(k: int) -> Numbers:
        return scaled(fit(decode(files[k], files[k], mode=wanted, size=size), files[k], crop, shape), 255)

    return from_reader(read, shape, len(files), labels)


def decode(file: Path | IO[bytes], name: Path | str, *, mode: Mode, size: int | None = None) -> Pixels:
    """A picture's bytes `[channels, height, width]`; one that declares too many pixels is refused undecoded."""
    with _opened(file, name) as image:
        return pixels_of(image, mode, size)


def pixels_of(image: Picture, mode: Mode, size: int | None = None) -> Pixels:
    """The bytes `[channels, height, width]` of an open picture."""
    from PIL import Image

    image = image.convert(mode)
    if size is not None:
        width, height = image.size
        scale = size / min(width, height)
        scaled = (max(size, round(width * scale)), max(size, round(height * scale)))
        if scaled[0] * scaled[1] > MAX_PIXELS:
            raise ValueError(f"a picture of {width}x{height} scaled to the short side {size} is too large")
        image = image.resize(scaled, Image.Resampling.BILINEAR)
        left, top = (scaled[0] - size) // 2, (scaled[1] - size) // 2
        image = image.crop((left, top, left + size, top + size))
    pixels = np.array(image)
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def fit(pixels: Pixels, name: Path | str, crop: int | None, shape: tuple[int, ...] | None = None) -> Pixels:
    """The middle square, where one is wanted; refuses a picture that is not of the others' shape."""
    if crop is not None:
        height, width = pixels.shape[1:]
        if crop > min(height, width):
            raise DataError(f"{name} must be at least crop={crop} wide and high, it is {width}x{height}: give ?size=")
        top, left = (height - crop) // 2, (width - crop) // 2
        pixels = np.ascontiguousarray(pixels[:, top : top + crop, left : left + crop])
    if shape is not None and pixels.shape != shape:
        raise DataError(
            f"all inputs must have one shape, {name} is {pixels.shape[2]}x{pixels.shape[1]}, the first "
            f"{shape[2]}x{shape[1]}: scale them with ?size={min(shape[1:])}"
        )
    return pixels


def first_mode(file: Path | IO[bytes], name: Path | str) -> Mode:
    """`L` where a picture is grey, else `RGB`."""
    with _opened(file, name) as image:
        return "L" if image.mode in ("L", "1") else "RGB"


@contextmanager
def _opened(file: Path | IO[bytes], name: Path | str) -> Iterator[Picture]:
    """A picture, looked at but not decoded; what goes wrong with it becomes one line."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError('reading pictures needs Pillow: pip install "themis-dl[images]"') from error
    with explained(name, "a picture (PNG, JPEG, WebP or BMP)"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures are refused below, odd ones are read as well as they can be
        try:
            image = Image.open(file, formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise _too_large(name, str(error)) from error
        with image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise _too_large(name, f"it is {width:,}x{height:,}")
            if image.mode.startswith(("I", "F")):
                raise DataError(f"{name} must have 8 bits a channel, its mode is {image.mode}: save it with 8 bits")
            yield image


def _too_large(name: Path | str, why: str) -> DataError:
    return DataError(f"{name} must have at most {MAX_PIXELS:,} pixels, {why.rstrip('.')}: scale it down, or drop it")


def _pictures_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.suffix.lower() in SUFFIXES and each.is_file())


def side_of(value: int | str | None, name: str) -> int | None:
    """A number of pixels, from what a user wrote."""
    if value is None:
        return None
    try:
        side = int(value)
    except ValueError:
        side = 0
    if not 1 <= side <= 8192:
        raise UsageError(f"{name} must be a whole number of pixels from 1 to 8192, got {value!r}: write ?{name}=224")
    return side


def _mode(mode: str | None) -> Mode | None:
    if mode is None:
        return None
    if mode not in ("rgb", "grey"):
        raise UsageError(f"mode must be 'rgb' or 'grey', got {mode!r}: leave it out to take that of the first picture")
    return "RGB" if mode == "rgb" else "L"
