"""Pictures with boxes: the formats of COCO (a JSON file), YOLO (a text file per picture) and Pascal VOC (XML).

Labels are `[pictures, objects, 5]`: left, top, right and bottom in pixels, and a class number. Rows of class -1 are
empty, and a class `-2 - c` is a crowd of class c.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder, XMLParser

import numpy as np

from themis.data.files import Numbers, check_memory, data_errors
from themis.data.items import pad_boxes
from themis.data.pictures import (
    MAX_SIDE,
    SIZE_REMEDY,
    SUFFIXES,
    Pixels,
    decode,
    opened,
    parse_mode,
    picture_mode,
)
from themis.data.seeds import Seeds, from_files, scaled
from themis.errors import DataError, UsageError
from themis.reading import check_form, items, number, parse_json, parse_yaml, read_regular, record, text, whole

MAX_COCO_BYTES, MAX_TEXT = 1 << 30, 1 << 22
MAX_CLASSES = 10_000
PADDING_GREY = 114
"""Brightness of what is added to a picture to give it another shape, as Ultralytics has it."""
USUAL_SPLITS = ("val", "valid", "test", "train")
"""Parts of a data set in the order in which they are looked for."""
# fmt: off
VOC_CLASSES = [
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
]
# fmt: on

Frame = tuple[int, int]
"""The height and width to which pictures are scaled, with grey margins that keep their shape."""
COCO_FORM = record(
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


def coco_seeds(
    path: Path,
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
    path = path.absolute()
    if numbers not in ("ids", "index"):
        raise UsageError(f"numbers must be 'ids' or 'index', got {numbers!r}: leave it out for the ids of the file")
    file = _find_json(path, annotations)
    form = "a JSON file of COCO with images, annotations and categories"
    with data_errors(file, form):
        content = check_form(parse_json(read_regular(file, MAX_COCO_BYTES)), COCO_FORM)
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
    return _seeds(files, objects, names, size, mode)


def yolo_seeds(path: Path, *, split: str | None = None, size: str | None = None, mode: str | None = None) -> Seeds:
    """Pictures with boxes in the format of YOLO: folders `images` and `labels`, or a folder for each split with both.

    Each picture may have a text file of the same name with lines `class x y width height`, in shares of the picture;
    (x, y) is the centre. Lines with more numbers are outlines, whose bounds are taken. Class names come from
    `data.yaml` or `classes.txt`. split: `val`, `test` or `train`; by default the first that there is. size, mode: as
    for `coco`.
    """
    folder = path.absolute()
    if not os.path.isdir(folder):
        raise DataError(f"the folder of pictures must exist, but {folder} does not: check the path")
    pictures, labels = _find_split(folder, split)
    with data_errors(pictures, "a folder that can be listed"):
        files = sorted(file for file in pictures.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    names = _yolo_names(folder)
    objects = [_read_lines(labels / f"{file.stem}.txt", len(names) if names else MAX_CLASSES) for file in files]
    return _seeds(files, objects, names, size, mode, shares=True)


def voc_seeds(path: Path, *, split: str | None = None, size: str | None = None, mode: str | None = None) -> Seeds:
    """Pictures with boxes in the format of Pascal VOC: `JPEGImages`, `Annotations` and `ImageSets/Main`.

    Classes are numbered from 0: as in `data.yaml` or `classes.txt`, else as the 20 of Pascal VOC if there are no
    others, else in sorted order. Difficult objects become crowds, in which nothing is counted as wrong. split: `val`,
    or another file of `ImageSets/Main`; by default the first of `val`, `test` and `train` that there is, or all
    pictures if there is none. size, mode: as for `coco`.
    """
    folder = path.absolute()
    if not (os.path.isdir(folder / "JPEGImages") and os.path.isdir(folder / "Annotations")):
        raise DataError(f"{folder} must have folders 'JPEGImages' and 'Annotations', but it has not: check the path")
    source, stems = _voc_split(folder, split)
    files = [_find_picture(folder / "JPEGImages", stem, source) for stem in stems]
    found = [_read_voc(folder / "Annotations" / f"{stem}.xml") for stem in stems]
    used = {name for rows in found for name, _, _ in rows}
    names = _yolo_names(folder) or (VOC_CLASSES if used <= {*VOC_CLASSES} else sorted(used))
    unknown = min(used - {*names}, default=None)
    if unknown is not None or len(names) > MAX_CLASSES:
        problem = f"{unknown[:60]!r} is not" if unknown is not None else f"there are {len(names):,}"
        raise DataError(f"the classes of {folder} must be at most {MAX_CLASSES:,} known ones, but {problem}: fix them")
    number_of = {name: k for k, name in enumerate(names)}
    objects = [
        [[*box, -2 - number_of[name] if is_difficult else number_of[name]] for name, box, is_difficult in rows]
        for rows in found
    ]
    return _seeds(files, objects, names, size, mode)


def _seeds(
    files: Sequence[Path],
    objects: Sequence[Sequence[Sequence[float]]],
    names: list[str] | None,
    size: str | None,
    mode: str | None,
    *,
    shares: bool = False,
) -> Seeds:
    """Seeds from picture files and their objects, with boxes in pixels or, with `shares`, in shares of a picture."""
    check_memory(len(files) * max([1, *map(len, objects)]) * 20, "the boxes")
    frame = _parse_size(size)
    labels = pad_boxes(objects)
    for own, rows, file in zip(labels, objects, files, strict=True):
        if rows and (frame is not None or shares):
            own[: len(rows), :4] = _scale(own[: len(rows), :4], _size(file), frame, shares)
    pixel_mode = parse_mode(mode) or (picture_mode(files[0]) if files else "RGB")

    def read(file: Path) -> Numbers:
        picture = decode(file, file, mode=pixel_mode)
        return scaled(picture if frame is None else _fit(picture, frame), 255)

    seeds = from_files(files, read, labels, SIZE_REMEDY)
    return seeds if names is None else seeds.with_classes(names)


def _place(size: tuple[int, int], frame: Frame) -> tuple[int, int, int, int]:
    """Where a picture of a height and width is in a frame: left, top, width and height."""
    scale = min(frame[0] / size[0], frame[1] / size[1])
    high, wide = (max(1, round(side * scale)) for side in size)
    return (frame[1] - wide) // 2, (frame[0] - high) // 2, wide, high


def _scale(boxes: Numbers, size: tuple[int, int], frame: Frame | None, shares: bool) -> Numbers:
    """Convert boxes to the frame."""
    high, wide = size
    left, top, new_wide, new_high = (0, 0, wide, high) if frame is None else _place(size, frame)
    per_unit = (new_wide, new_high) if shares else (new_wide / wide, new_high / high)
    scaled_boxes: Numbers = boxes * np.tile(per_unit, 2) + np.tile((left, top), 2)
    return scaled_boxes


def _fit(picture: Pixels, frame: Frame) -> Pixels:
    """Scale a picture `[channels, height, width]` into the frame."""
    from PIL import Image

    left, top, wide, high = _place((picture.shape[1], picture.shape[2]), frame)
    fitted = np.full((len(picture), *frame), PADDING_GREY, np.uint8)
    for channel, own in zip(picture, fitted, strict=True):
        resized = Image.fromarray(channel).resize((wide, high), Image.Resampling.BILINEAR)
        own[top : top + high, left : left + wide] = np.asarray(resized)
    return fitted


def _parse_size(size: str | int | None) -> Frame | None:
    if size is None:
        return None
    wide, _, high = str(size).partition("x")
    sides = [int(side) if side.isdecimal() else 0 for side in (high or wide, wide)]
    if not all(1 <= side <= MAX_SIDE for side in sides):
        raise UsageError(f"size must be a number of pixels from 1 to 8192, or two, got {size!r}: write ?size=640x480")
    return sides[0], sides[1]


# COCO


def _find_json(path: Path, annotations: str | None) -> Path:
    """The annotation file: the given one, or the only one in the folder or in its folder `annotations`."""
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
    """The folder of the pictures: the given one, or the first usual one with the first picture."""
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
    for name in USUAL_SPLITS if split is None else (split,):
        if os.path.isdir(folder / "images" / name):
            return folder / "images" / name, folder / "labels" / name
        if os.path.isdir(folder / name / "images"):
            return folder / name / "images", folder / name / "labels"
    if split is None and os.path.isdir(folder / "images"):
        return folder / "images", folder / "labels"
    part = "" if split is None else f" for the split {split!r}"
    raise DataError(f"{folder} must have folders 'images' and 'labels'{part}, but it has not: check the path")


def _yolo_names(folder: Path) -> list[str] | None:
    """The names of the classes, if a file has them."""
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
    """The objects of a picture, in shares of its size; none if there is no file."""
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
        raise DataError(f"{place}: a label must be `class x y width height`, got {' '.join(words)[:60]!r}: fix it")
    if not (values[0].is_integer() and 0 <= values[0] < n_classes):
        raise DataError(f"{place}: a class must be whole, from 0 to {n_classes - 1}, got {words[0][:20]}: fix it")
    if any(not -0.01 <= value <= 1.01 for value in values[1:]):
        raise DataError(
            f"{place}: boxes must be shares of the picture, 0..1, got {max(values[1:], key=abs):g}: divide by its size"
        )
    if is_outline:
        across, down = values[1::2], values[2::2]
        return [min(across), min(down), max(across), max(down), values[0]]
    x, y, wide, high = values[1:]
    return [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2, values[0]]


# Pascal VOC


class _PlainTree(TreeBuilder):
    """Builds a tree, and refuses document types, because these can define entities."""

    def doctype(self, *_: Any) -> None:
        raise ValueError("it must have no document type and no entities")


def _voc_split(folder: Path, split: str | None) -> tuple[Path, list[str]]:
    """The file or folder that lists the pictures of a split, and their names without suffixes."""
    for name in USUAL_SPLITS if split is None else (split,):
        file = _inside(folder / "ImageSets" / "Main", f"{name}.txt", folder)
        if os.path.isfile(file):
            with data_errors(file, "a text file with one picture per line"):
                lines = read_regular(file, MAX_TEXT).decode().splitlines()
            return file, [line.split()[0] for line in lines if line.strip()]
    if split is not None:
        raise DataError(f"the split must be a file of ImageSets/Main, but {file} does not exist: check ?split=")
    with data_errors(folder, "a folder that can be listed"):
        return folder / "Annotations", sorted(file.stem for file in (folder / "Annotations").glob("*.xml"))


def _find_picture(folder: Path, stem: str, source: Path) -> Path:
    """The picture with this name and any suffix."""
    file = _inside(folder, stem, source)
    named = [file.with_name(file.name + suffix) for suffix in SUFFIXES]  # its name may have points
    for picture in named:
        if os.path.isfile(picture):
            return picture
    raise DataError(f"the pictures that {source} lists must exist, but {named[1]} does not: repair the file")


def _read_voc(file: Path) -> list[tuple[str, list[float], bool]]:
    """The class, the box and the difficulty of each object of a picture."""
    with data_errors(file, "an XML file of Pascal VOC"):
        parser = XMLParser(target=_PlainTree())
        parser.feed(read_regular(file, MAX_TEXT))
        return [_read_object(element) for element in parser.close().findall("object")]


def _read_object(element: Element) -> tuple[str, list[float], bool]:
    name, box = (element.findtext("name") or "").strip(), element.find("bndbox")
    if not 0 < len(name) <= 200 or box is None:
        raise ValueError("an object must have a name of at most 200 letters and a bndbox")
    sides = [float(box.findtext(side) or "nan") for side in ("xmin", "ymin", "xmax", "ymax")]
    left, top, right, bottom = sides[0] - 1, sides[1] - 1, *sides[2:]  # pixels are counted from 1, the last included
    if not (all(map(math.isfinite, sides)) and left <= right and top <= bottom):
        raise ValueError(f"the box of {name[:60]!r} must have xmin <= xmax and ymin <= ymax, got {sides}")
    return name, [left, top, right, bottom], (element.findtext("difficult") or "0").strip() == "1"


def _size(file: Path) -> tuple[int, int]:
    """The height and width of a picture."""
    with opened(file, file) as image:
        return image.height, image.width
