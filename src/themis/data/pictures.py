"""Pictures: PNG, JPEG, WebP and BMP, decoded one at a time, when they are needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from themis.data.files import Numbers, data_errors, labelled_files, required_path
from themis.data.seeds import Seeds, from_reader, scaled
from themis.errors import DataError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
MAX_PIXELS = 1 << 26
"""Largest picture that is decoded: 67 million pixels."""

Mode = Literal["RGB", "L"]
MODES: dict[str, Mode] = {"rgb": "RGB", "grey": "L", "gray": "L", "l": "L"}
Pixels = NDArray[np.uint8]


def image_seeds(
    path: Path | None = None, *, size: int | str | None = None, crop: int | str | None = None, mode: str | None = None
) -> Seeds:
    """A folder with one folder of pictures per class, or of pictures without labels.

    They become `[seeds, channels, height, width]` in 0..1. Classes are numbered in the order of the folders' names.
    size: the short side is scaled to it and the central square taken. crop: the central square of this side, taken
    afterwards. mode: `rgb` or `grey` (also `gray` and `L`); by default that of the first picture.
    """
    folder = required_path(path, "images").absolute()
    files, labels, classes = labelled_files(folder, SUFFIXES, "pictures")
    sides = {"size": parse_side(size, "size"), "crop": parse_side(crop, "crop")}
    return picture_seeds(files, labels, **sides, mode=mode, subject=str(folder)).with_classes(classes)


def picture_seeds(
    files: Sequence[Path],
    labels: Any,
    *,
    subject: str,
    size: int | None = None,
    crop: int | None = None,
    mode: str | None = None,
) -> Seeds:
    """Seeds from picture files; `subject` names the collection in messages."""
    if not files:
        raise DataError(f"{subject} must hold pictures ({', '.join(SUFFIXES)}), but it has none: check the path")
    pixel_mode = parse_mode(mode) or picture_mode(files[0])
    shape = crop_picture(decode(files[0], files[0], mode=pixel_mode, size=size), files[0], crop).shape

    def read(k: int) -> Numbers:
        pixels = crop_picture(decode(files[k], files[k], mode=pixel_mode, size=size), files[k], crop)
        return scaled(same_shape(pixels, files[k], shape), 255)

    return from_reader(read, shape, len(files), labels)


def decode(file: Path | IO[bytes], name: Path | str, *, mode: Mode, size: int | None = None) -> Pixels:
    """A picture's pixels `[channels, height, width]`; one that declares too many of them is refused, not decoded."""
    with _opened(file, name) as image:
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


def same_shape(pixels: Pixels, name: Path | str, shape: tuple[int, ...]) -> Pixels:
    """The pixels, if they have the shape of the first picture."""
    if pixels.shape != shape:
        raise DataError(
            f"all inputs must have the same shape, but {name} is {pixels.shape[2]}x{pixels.shape[1]} and the first "
            f"is {shape[2]}x{shape[1]}: scale them with ?size={min(shape[1:])}"
        )
    return pixels


def picture_mode(file: Path) -> Mode:
    """`L` if a picture is grey, otherwise `RGB`."""
    with _opened(file, file) as image:
        return "L" if image.mode in ("L", "1") else "RGB"


def picture_size(file: Path) -> tuple[int, int]:
    """The height and width of a picture."""
    with _opened(file, file) as image:
        return image.height, image.width


@contextmanager
def _opened(file: Path | IO[bytes], name: Path | str) -> Iterator[Picture]:
    """An open picture that is not decoded yet; any error is turned into a one-line `DataError`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError('reading pictures needs Pillow: pip install "themis-dl[images]"') from error
    with data_errors(name, "a picture (PNG, JPEG, WebP or BMP)"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures are refused below, odd ones are read as well as possible
        try:
            image = Image.open(file, formats=FORMATS)
        except Image.DecompressionBombError as error:
            raise _too_large(name, "many more") from error
        with image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise _too_large(name, f"{width:,}x{height:,}")
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"{name} must have 8 bits per channel, but its mode is {image.mode}: save it with 8 bits"
                )
            yield image


def _too_large(name: Path | str, size: str) -> DataError:
    return DataError(f"{name} must have at most {MAX_PIXELS:,} pixels, got {size}: scale it down, or drop it")


def parse_side(value: int | str | None, name: str) -> int | None:
    """The number of pixels that an option gives."""
    if value is None:
        return None
    try:
        side = int(value)
    except ValueError:
        side = 0
    if not 1 <= side <= 8192:
        raise UsageError(f"{name} must be a whole number of pixels from 1 to 8192, got {value!r}: write ?{name}=224")
    return side


def parse_mode(mode: str | None) -> Mode | None:
    """The mode that an option gives; None for that of the first picture."""
    if mode is None:
        return None
    if mode.lower() not in MODES:
        raise UsageError(f"mode must be 'rgb' or 'grey', got {mode!r}: leave it out to use that of the first picture")
    return MODES[mode.lower()]
