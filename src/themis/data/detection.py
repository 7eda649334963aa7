"""Pictures with boxes: the formats of COCO (one JSON file) and of YOLO (one text file per picture).

Labels are `[pictures, objects, 5]`: left, top, right and bottom in pixels, and a class number. Rows of class -1 are
empty, and a class `-2 - c` is a crowd of class c.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.files import Numbers, check_memory, data_errors, required_path
from themis.data.pictures import SUFFIXES, Pixels, decode, parse_mode, picture_mode, picture_size, same_shape
from themis.data.seeds import Seeds, from_reader, scaled
from themis.errors import DataError, UsageError
from themis.reading import check_form, items, number, parse_json, parse_yaml, read_regular, record, text, whole

MAX_JSON, MAX_TEXT = 1 << 30, 1 << 22
MAX_CLASSES = 10_000
GREY = 114
"""Brightness of what is added to a picture to give it another shape, as Ultralytics has it."""
PADDING = -1.0
SPLITS = ("val", "valid", "test", "train")
"""Parts of a data set in the order in which they are looked for."""

INSTANCES = record(
    {
        "images": items(record({"id": whole(), "file_name": text(1000)})),
        "annotations": items(
            record(
                {"image_id": whole(), "category_id": whole(0, MAX_CLASSES - 1), "bbox": items(number(), 4)},
                {"iscrowd": whole(0, 1)},
            )
        ),
        "categories": items(record({"id": whole(0, MAX_CLASSES - 1), "name": text(200)})),
    }
)


@dataclass(frozen=True)
class Frame:
    """The height and width that pictures are brought to: scaled to fit, with grey beside or above and below them."""

    height: int
    width: int

    def place(self, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """The place of a picture of a height and width: left, top, width and height."""
        scale = min(self.height / size[0], self.width / size[1])
        high, wide = (max(1, round(side * scale)) for side in size)
        return (self.width - wide) // 2, (self.height - high) // 2, wide, high


def coco_seeds(
    path: Path | None = None,
    *,
    annotations: str | None = None,
    images: str | None = None,
    size: str | None = None,
    numbers: str = "ids",
    mode: str | None = None,
) -> Seeds:
    """Pictures with boxes in COCO's format: a JSON file, or a folder with one.

    annotations: the JSON file, if the folder has several. images: the folder of the pictures. size: `640` or `640x480`
    (width, height); pictures are scaled to fit, with grey beside them, and their boxes with them. numbers: `ids`, the
    ids of the categories, as torchvision and DETR number them, or `index`, their order from 0 on, as Ultralytics does.
    mode: `rgb` or `grey`.
    """
    path = required_path(path, "coco").absolute()
    if numbers not in ("ids", "index"):
        raise UsageError(f"numbers must be 'ids' or 'index', got {numbers!r}: leave it out for the ids of the file")
    file = _find_json(path, annotations)
    form = "a JSON file of COCO with images, annotations and categories"
    with data_errors(file, form):
        content = check_form(parse_json(read_regular(file, MAX_JSON)), INSTANCES)
    if not content["images"]:
        raise DataError(f"{file} must list pictures, but it has none: check the file")
    folder = _find_pictures(file, path, images, content["images"][0]["file_name"])
    files = [_inside(folder, image["file_name"], file) for image in content["images"]]
    class_of, names = _number_classes(content["categories"], numbers, file)
    row_of = {image["id"]: k for k, image in enumerate(content["images"])}
    objects: list[list[list[float]]] = [[] for _ in files]
    for annotation in content["annotations"]:
        if annotation["image_id"] not in row_of or annotation["category_id"] not in class_of:
            raise DataError(
                f"{file} must list the picture and the category of every annotation, but picture "
                f"{annotation['image_id']} or category {annotation['category_id']} is missing: repair the file"
            )
        left, top, wide, high = annotation["bbox"]
        if wide < 0 or high < 0:
            raise DataError(
                f"{file}: a box must have a width and a height of at least 0, got {annotation['bbox']} in picture "
                f"{annotation['image_id']}: repair the file"
            )
        known = class_of[annotation["category_id"]]
        objects[row_of[annotation["image_id"]]].append(
            [left, top, left + wide, top + high, -2 - known if annotation.get("iscrowd") else known]
        )
    return _seeds(files, objects, names, size, mode, str(file), shares=False)


def yolo_seeds(
    path: Path | None = None, *, split: str | None = None, size: str | None = None, mode: str | None = None
) -> Seeds:
    """Pictures with boxes in the format of YOLO: folders `images` and `labels`, or a folder for each split with both.

    Each picture may have a text file of the same name with lines `class x y width height`, in shares of the picture;
    (x, y) is the centre. Lines with more numbers are outlines, whose bounds are taken. Class names come from
    `data.yaml` or `classes.txt`. split: `val`, `test` or `train`; by default the first that there is. size, mode: as
    for `coco`.
    """
    folder = required_path(path, "yolo").absolute()
    if not os.path.isdir(folder):
        raise DataError(f"the folder of pictures must exist, but {folder} does not: check the path")
    pictures, labels = _find_split(folder, split)
    with data_errors(pictures, "a folder that can be listed"):
        files = sorted(file for file in pictures.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    names = _yolo_names(folder)
    objects = [_read_lines(labels / f"{file.stem}.txt", len(names) if names else MAX_CLASSES) for file in files]
    return _seeds(files, objects, names, size, mode, str(pictures), shares=True)


def _seeds(
    files: Sequence[Path],
    objects: Sequence[Sequence[Sequence[float]]],
    names: list[str] | None,
    size: str | None,
    mode: str | None,
    subject: str,
    *,
    shares: bool,
) -> Seeds:
    """Seeds from picture files and their objects, with boxes in pixels or, with `shares`, in shares of a picture."""
    if not files:
        raise DataError(f"{subject} must hold pictures ({', '.join(SUFFIXES)}), but it has none: check the path")
    frame = _parse_size(size)
    n_objects = max(1, *map(len, objects))
    check_memory(len(files) * n_objects * 20, f"the boxes of {subject}")
    labels = np.zeros((len(files), n_objects, 5), np.float32)
    labels[..., 4] = PADDING
    for k, rows in enumerate(objects):
        if rows:
            labels[k, : len(rows)] = rows
        if rows and (frame is not None or shares):
            labels[k, : len(rows), :4] = _scale(labels[k, : len(rows), :4], picture_size(files[k]), frame, shares)
    pixel_mode = parse_mode(mode) or picture_mode(files[0])

    def pixels(k: int) -> Pixels:
        picture = decode(files[k], files[k], mode=pixel_mode)
        return picture if frame is None else _fit(picture, frame)

    shape = pixels(0).shape

    def read(k: int) -> Numbers:
        return scaled(same_shape(pixels(k), files[k], shape), 255)

    seeds = from_reader(read, shape, len(files), labels)
    return seeds if names is None else seeds.with_classes(names)


def _scale(boxes: Numbers, size: tuple[int, int], frame: Frame | None, shares: bool) -> Numbers:
    """Boxes as they are in the frame."""
    high, wide = size
    left, top, new_wide, new_high = (0, 0, wide, high) if frame is None else frame.place(size)
    per_unit = (new_wide, new_high) if shares else (new_wide / wide, new_high / high)
    scaled_boxes: Numbers = boxes * np.tile(per_unit, 2) + np.tile((left, top), 2)
    return scaled_boxes


def _fit(picture: Pixels, frame: Frame) -> Pixels:
    """A picture `[channels, height, width]` in the frame."""
    from PIL import Image

    left, top, wide, high = frame.place((picture.shape[1], picture.shape[2]))
    channels = [Image.fromarray(channel).resize((wide, high), Image.Resampling.BILINEAR) for channel in picture]
    fitted = np.full((len(picture), frame.height, frame.width), GREY, np.uint8)
    fitted[:, top : top + high, left : left + wide] = np.stack([np.asarray(channel) for channel in channels])
    return fitted


def _parse_size(size: str | int | None) -> Frame | None:
    if size is None:
        return None
    wide, _, high = str(size).partition("x")
    sides = [int(side) if side.isdecimal() else 0 for side in (high or wide, wide)]
    if not all(1 <= side <= 8192 for side in sides):
        raise UsageError(f"size must be a number of pixels from 1 to 8192, or two, got {size!r}: write ?size=640x480")
    return Frame(*sides)


# COCO


def _find_json(path: Path, annotations: str | None) -> Path:
    """The file of annotations: the one that is named, or the only one in the folder or in its folder `annotations`."""
    if annotations is not None:
        named = [Path(annotations).absolute(), path / annotations, path / "annotations" / annotations]
        path = next((file for file in named if os.path.isfile(file)), named[0])
    if os.path.isfile(path):
        return path
    if annotations is not None or not os.path.isdir(path):
        raise DataError(f"the file of annotations must exist, but {str(path)[:200]} does not: check the path")
    with data_errors(path, "a folder that can be listed"):
        folders = [path / "annotations", path]
        found = [file for folder in folders if folder.is_dir() for file in sorted(folder.glob("*.json"))]
    instances = [file for file in found if file.name.startswith("instances")] or found
    if len(instances) != 1:
        listed = ", ".join(file.name for file in instances[:5]) or "none"
        raise DataError(f"{path} must hold one JSON file of annotations, got {listed}: name it with ?annotations=FILE")
    return instances[0]


def _find_pictures(file: Path, path: Path, images: str | None, name: str) -> Path:
    """The folder of the pictures: the one that is named, or the first of the usual ones that has the first picture."""
    root = path if path.is_dir() else file.parent.parent if file.parent.name == "annotations" else file.parent
    split = file.stem.removeprefix("instances_")
    if images is not None:
        folders = [Path(images).absolute(), root / images]
    else:
        folders = [root / split, root / "images", root / "images" / split, root, file.parent]
    for folder in folders:
        if os.path.isfile(folder / name):
            return folder
    raise DataError(
        f"the pictures of {file} must exist, but {name[:200]} is in none of "
        f"{', '.join(str(folder) for folder in folders)}: name their folder with ?images=FOLDER"
    )


def _inside(folder: Path, name: str, file: Path) -> Path:
    """The path of a picture, which must not lead out of its folder."""
    if os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        raise DataError(f"{file}: a picture must be in the folder of the pictures, got {name[:200]!r}: repair the file")
    return folder / name


def _number_classes(
    categories: Sequence[dict[str, Any]], numbers: str, file: Path
) -> tuple[dict[int, int], list[str] | None]:
    """The class of each category, and the names of the classes in the order of their numbers."""
    ordered = sorted(categories, key=lambda category: category["id"])
    ids = [category["id"] for category in ordered]
    if len(set(ids)) < len(ids):
        raise DataError(f"{file} must list each category once, but an id occurs twice: repair the file")
    class_of = {id: k if numbers == "index" else id for k, id in enumerate(ids)}
    names = [f"class {k}" for k in range(max(class_of.values(), default=-1) + 1)]
    for category in ordered:
        names[class_of[category["id"]]] = category["name"]
    return class_of, names or None


# YOLO


def _find_split(folder: Path, split: str | None) -> tuple[Path, Path]:
    """The folders of pictures and of labels."""
    for name in SPLITS if split is None else (split,):
        if os.path.isdir(folder / "images" / name):
            return folder / "images" / name, folder / "labels" / name
        if os.path.isdir(folder / name / "images"):
            return folder / name / "images", folder / name / "labels"
    if split is None and os.path.isdir(folder / "images"):
        return folder / "images", folder / "labels"
    part = "" if split is None else f" for the split {split!r}"
    raise DataError(f"{folder} must have folders 'images' and 'labels'{part}, but it has not: check the path")


def _yolo_names(folder: Path) -> list[str] | None:
    """The names of the classes, if a file tells them."""
    for name in ("data.yaml", "dataset.yaml", "data.yml"):
        file = folder / name
        if os.path.isfile(file):
            with data_errors(file, "a YAML file with the names of the classes"):
                content = parse_yaml(read_regular(file, MAX_TEXT).decode())
                names = content.get("names") if isinstance(content, dict) else None
                if isinstance(names, dict) and sorted(names) == list(range(len(names))):
                    names = [names[k] for k in range(len(names))]
                if isinstance(names, list) and 0 < len(names) <= MAX_CLASSES:
                    return [str(name) for name in names]
                raise ValueError("its 'names' must be a list of names, or names by number from 0 on")
    file = folder / "classes.txt"
    if not os.path.isfile(file):
        return None
    with data_errors(file, "a file with one class name per line"):
        lines = read_regular(file, MAX_TEXT).decode().splitlines()
        return [line.strip() for line in lines if line.strip()][:MAX_CLASSES] or None


def _read_lines(file: Path, n_classes: int) -> list[list[float]]:
    """The objects of a picture, in shares of it; none if there is no file."""
    if not os.path.isfile(file):
        return []
    with data_errors(file, "a text file with lines `class x y width height`"):
        lines = read_regular(file, MAX_TEXT).decode().splitlines()
    return [_read_line(line.split(), f"{file}, line {k}", n_classes) for k, line in enumerate(lines, 1) if line.strip()]


def _read_line(words: list[str], place: str, n_classes: int) -> list[float]:
    try:
        values = [float(word) for word in words]
    except ValueError:
        values = []
    is_outline = len(values) > 5 and len(values) % 2 == 1
    if not (len(values) == 5 or is_outline) or not all(map(math.isfinite, values)):
        raise DataError(
            f"{place}: a label must be numbers `class x y width height`, got {' '.join(words)[:60]!r}: fix it"
        )
    if not (values[0].is_integer() and 0 <= values[0] < n_classes):
        raise DataError(
            f"{place}: a class must be a whole number from 0 to {n_classes - 1}, got {words[0][:20]}: fix it"
        )
    if any(not -0.01 <= value <= 1.01 for value in values[1:]):
        raise DataError(
            f"{place}: boxes must be in shares of the picture, from 0 to 1, got {max(values[1:], key=abs):g}: divide "
            "by its width and height"
        )
    if is_outline:
        across, down = values[1::2], values[2::2]
        return [min(across), min(down), max(across), max(down), values[0]]
    x, y, wide, high = values[1:]
    return [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2, values[0]]
