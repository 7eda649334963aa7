"""Damaged, wrong or malicious pictures are refused in one line and take little memory."""

from pathlib import Path

import numpy as np
import pytest
from hostile import cut, png_header, refused, then, write
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8)


def picture(name, pixels=PIXELS, **options):
    def setup():
        Path(name).parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(name, **options)

    return setup


HOSTILE = {
    "picture cut": (
        "images:p",
        "1.png must be a picture",
        cut("p/1.png", lambda name: Image.fromarray(PIXELS).save(name), 0.8),
    ),
    "jpeg cut": (
        "images:p",
        "1.jpg must be a picture",
        cut("p/1.jpg", lambda name: Image.fromarray(PIXELS).save(name), 0.9),
    ),
    "picture of text": ("images:p", "1.png must be a picture", write("p/1.png", "hello")),
    "picture of nothing": ("images:p", "1.png must be a picture", write("p/1.png", b"")),
    "picture of ten gigapixels": (
        "images:p",
        "exceeds limit of 178956970 pixels",
        write("p/1.png", png_header(100_000, 100_000)),
    ),
    "picture of a hundred megapixels": (
        "images:p",
        "pixels, got 10,000x10,000",
        write("p/1.png", png_header(10_000, 10_000)),
    ),
    "later picture of ten gigapixels": (
        "images:p",
        "9.png must be a picture",
        then(picture("p/1.png"), write("p/9.png", png_header(100_000, 100_000))),
    ),
    "picture of another format": ("images:p", "1.png must be a picture", picture("p/1.png", format="TIFF")),
    "picture of 16 bits": (
        "images:p",
        "must have 8 bits per channel",
        picture("p/1.png", np.zeros((4, 4), np.uint16)),
    ),
    "pictures of two sizes": (
        "images:p",
        "all inputs must have the same shape",
        then(picture("p/1.png"), picture("p/2.png", PIXELS[:5])),
    ),
    "picture smaller than the crop": ("images:p?crop=50", "at least crop=50 wide and high", picture("p/1.png")),
    "picture as thin as a thread": (
        "images:p?size=8000",
        "is too large",
        picture("p/1.png", np.zeros((1, 9000, 3), np.uint8)),
    ),
    "pictures beside class folders": (
        "images:p",
        "not both",
        then(picture("p/1.png"), lambda: Path("p/a").mkdir(), picture("p/a/1.png")),
    ),
    "a folder without pictures": ("images:.", "must hold pictures", lambda: None),
    "no folder": ("images:nowhere", "the folder of pictures must exist", lambda: None),
    "a mosaic of another size": (
        "cifar10:.",
        "must be a 3200x3200 mosaic",
        picture("test_batch.webp"),
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_refused_in_one_line(name, tmp_path, monkeypatch):
    spec, message, setup = HOSTILE[name]
    assert message in refused(spec, setup, tmp_path, monkeypatch)
