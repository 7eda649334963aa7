"""Pictures with boxes, read from the formats of COCO, YOLO and Pascal VOC."""

import json

import numpy as np
import pytest
from PIL import Image

from themis import DataError, UsageError
from themis.data.readers import read_data

PIXELS = np.random.default_rng(0).integers(0, 255, (3, 20, 30, 3), dtype=np.uint8)


def coco(folder, **changes):
    """A folder in COCO's format: three pictures, the last one without objects."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "val2017").mkdir()
    for k, pixels in enumerate(PIXELS):
        Image.fromarray(pixels).save(folder / "val2017" / f"{k}.png")
    content = {
        "images": [{"id": 10 + k, "file_name": f"{k}.png", "width": 30, "height": 20} for k in range(3)],
        "annotations": [
            {"id": 1, "image_id": 11, "category_id": 3, "bbox": [2, 4, 10, 6], "iscrowd": 0},
            {"id": 2, "image_id": 10, "category_id": 1, "bbox": [0, 0, 30, 20.5], "iscrowd": 1},
            {"id": 3, "image_id": 11, "category_id": 1, "bbox": [5, 5, 5, 5]},
        ],
        "categories": [{"id": 3, "name": "dog"}, {"id": 1, "name": "cat"}],
        **changes,
    }
    (folder / "annotations" / "instances_val2017.json").write_text(json.dumps(content))
    return folder


def yolo(folder, text="1 0.5 0.5 0.2 0.4\n\n0 0.1 0.1 0.3 0.1 0.3 0.5 0.1 0.5\n"):
    for part in ("images", "labels"):
        (folder / part / "val").mkdir(parents=True)
    for k, pixels in enumerate(PIXELS[:2]):
        Image.fromarray(pixels).save(folder / "images" / "val" / f"{k}.png")
    (folder / "labels" / "val" / "1.txt").write_text(text)
    (folder / "data.yaml").write_text("names: {0: cat, 1: dog}\nval: images/val\n")
    return folder


EMPTY = [0, 0, 0, 0, -1]


def test_a_folder_of_coco(tmp_path):
    seeds = read_data(f"coco:{coco(tmp_path)}")
    assert seeds.inputs.shape == (3, 3, 20, 30)
    np.testing.assert_array_equal(seeds.inputs[1], PIXELS[1].transpose(2, 0, 1).astype(np.float32) / 255)
    assert seeds.classes == ("class 0", "cat", "class 2", "dog")
    assert seeds.labels.tolist() == [
        [[0, 0, 30, 20.5, -3], EMPTY],
        [[2, 4, 12, 10, 3], [5, 5, 10, 10, 1]],
        [EMPTY, EMPTY],
    ]
    numbered = read_data(f"coco:{tmp_path / 'annotations' / 'instances_val2017.json'}?numbers=index")
    assert numbered.classes == ("cat", "dog")
    assert numbered.labels[..., 4].tolist() == [[-2, -1], [1, 0], [-1, -1]]


def test_a_folder_of_yolo(tmp_path):
    seeds = read_data(f"yolo:{yolo(tmp_path)}")
    assert seeds.classes == ("cat", "dog")
    assert seeds.labels[0].tolist() == [EMPTY, EMPTY]
    assert seeds.labels[1].tolist() == [pytest.approx([12, 6, 18, 14, 1]), pytest.approx([3, 2, 9, 10, 0])]


def test_pictures_of_another_size_are_scaled_with_their_boxes(tmp_path):
    folder = coco(tmp_path / "coco")
    Image.fromarray(PIXELS[2]).resize((20, 40)).save(folder / "val2017" / "2.png")
    with pytest.raises(DataError, match=r"2\.png is \[3, 40, 20\] and the first is .*: scale them with \?size="):
        read_data(f"coco:{folder}").inputs[2]
    seeds = read_data(f"coco:{folder}?size=60")
    assert seeds.inputs.shape == (3, 3, 60, 60)
    grey = seeds.inputs[1][:, :10]  # twice as large, with ten rows of grey above and below
    assert float(grey.min()) == float(grey.max()) == pytest.approx(114 / 255)
    assert seeds.labels[1].tolist() == [[4, 18, 24, 30, 3], [10, 20, 20, 30, 1]]
    wide = read_data(f"coco:{folder}?size=60x40&mode=grey")
    assert wide.inputs.shape == (3, 1, 40, 60)
    assert wide.labels[1].tolist() == [[4, 8, 24, 20, 3], [10, 10, 20, 20, 1]]
    scaled = read_data(f"yolo:{yolo(tmp_path / 'yolo')}?size=60")
    assert scaled.labels[1, 0].tolist() == pytest.approx([24, 22, 36, 38, 1])


def annotation(**changes):
    return [{"image_id": 10, "category_id": 1, "bbox": [0, 0, 5, 5], **changes}]


HOSTILE_COCO = {
    "no pictures": ({"images": []}, "must list pictures"),
    "another form": ({"images": {}}, "images must be a list, got an object"),
    "a missing picture": ({"images": [{"id": 1, "file_name": "x.png"}]}, r"x\.png is in none of .*images=FOLDER"),
    "an outside picture": (
        {"images": [{"id": 10, "file_name": "0.png"}, {"id": 11, "file_name": "../../secret.png"}]},
        "must be in the folder of the pictures",
    ),
    "an unknown picture": ({"annotations": annotation(image_id=99)}, "picture 99 or category 1 is missing"),
    "an unknown category": ({"annotations": annotation(category_id=7)}, "category 7 is missing"),
    "a huge category": ({"annotations": annotation(category_id=10**9)}, "whole number from 0 to 9,999"),
    "a box of text": ({"annotations": annotation(bbox=["a", 0, 1, 1])}, r"bbox\[0\] must be a finite number"),
    "a short box": ({"annotations": annotation(bbox=[0, 0, 1])}, "bbox must be a list of 4, got a list of 3"),
    "a negative box": ({"annotations": annotation(bbox=[0, 0, -1, 1])}, "at least 0, got"),
    "a category twice": ({"categories": [{"id": 1, "name": "a"}] * 2}, "an id occurs twice"),
}


@pytest.mark.parametrize("name", HOSTILE_COCO)
def test_hostile_coco_is_refused_in_one_line(name, tmp_path):
    changes, message = HOSTILE_COCO[name]
    with pytest.raises(DataError, match=message) as caught:
        read_data(f"coco:{coco(tmp_path, **changes)}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"images": NaN}', b"null"])
def test_damaged_json_is_refused_in_one_line(content, tmp_path):
    file = coco(tmp_path) / "annotations" / "instances_val2017.json"
    file.write_bytes(content)
    with pytest.raises(DataError, match="must be a JSON file of COCO") as caught:
        read_data(f"coco:{tmp_path}")
    assert "\n" not in str(caught.value)


HOSTILE_YOLO = {
    "text": ("one 0 0 1 1", "must be `class x y width height`, got 'one 0 0 1 1'"),
    "too few": ("1 0.5 0.5", "must be `class"),
    "not finite": ("1 0.5 0.5 nan 0.1", "must be `class"),
    "pixels": ("1 12 6 18 14", "shares of the picture, 0..1, got 18: divide"),
    "an unknown class": ("2 0.5 0.5 0.1 0.1", "whole, from 0 to 1, got 2"),
    "half a class": ("0.5 0.5 0.5 0.1 0.1", "must be whole"),
}


@pytest.mark.parametrize("name", HOSTILE_YOLO)
def test_hostile_labels_of_yolo_are_refused_with_their_line(name, tmp_path):
    text, message = HOSTILE_YOLO[name]
    with pytest.raises(DataError, match=rf"1\.txt, line 2: .*{message}"):
        read_data(f"yolo:{yolo(tmp_path, f'0 0.5 0.5 0.1 0.1{chr(10)}{text}')}")


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match="file of annotations must exist"):
        read_data(f"coco:{tmp_path / 'nowhere'}")
    with pytest.raises(DataError, match="one JSON file of annotations, got none: name it"):
        read_data(f"coco:{tmp_path}")
    with pytest.raises(DataError, match="must have folders 'images' and 'labels'"):
        read_data(f"yolo:{tmp_path}")
    with pytest.raises(DataError, match="for the split 'test'"):
        read_data(f"yolo:{yolo(tmp_path / 'yolo')}?split=test")
    with pytest.raises(UsageError, match="numbers must be 'ids' or 'index'"):
        read_data(f"coco:{tmp_path}?numbers=names")
    with pytest.raises(UsageError, match=r"got '0x9': write \?size=640x480"):
        read_data(f"coco:{coco(tmp_path / 'coco')}?size=0x9")
    (tmp_path / "yolo" / "data.yaml").write_text("names: 3")
    with pytest.raises(DataError, match="'names' must be a list"):
        read_data(f"yolo:{tmp_path / 'yolo'}")


DOG = "<object><name>dog</name><bndbox><xmin>3</xmin><ymin>5</ymin><xmax>12</xmax><ymax>10</ymax></bndbox>"
PART = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>"


def voc(folder, text=f"<annotation>{DOG}{PART}</object></annotation>"):
    """A folder in the format of Pascal VOC; the second picture of the split `val` has annotations of `text`."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True)
    cat = DOG.replace("dog", "cat") + "<difficult>1</difficult></object>"
    for k, content in enumerate((f"<annotation>{cat}</annotation>", text, "<annotation/>")):
        Image.fromarray(PIXELS[k]).save(folder / "JPEGImages" / f"2007_{k}.jpg")
        content = content if isinstance(content, bytes) else content.encode()
        (folder / "Annotations" / f"2007_{k}.xml").write_bytes(content)
    (folder / "ImageSets" / "Main" / "val.txt").write_text("2007_0  1\n2007_1 -1\n")
    return folder


def test_a_folder_of_pascal_voc(tmp_path):
    seeds = read_data(f"voc:{voc(tmp_path)}?split=val")
    assert seeds.inputs.shape == (2, 3, 20, 30)
    assert seeds.classes is not None
    assert len(seeds.classes) == 20
    assert (seeds.classes[7], seeds.classes[11]) == ("cat", "dog")
    assert seeds.labels.tolist() == [[[2, 4, 12, 10, -2 - 7]], [[2, 4, 12, 10, 11]]]
    assert read_data(f"voc:{tmp_path}?size=60").labels[1].tolist() == [[4, 18, 24, 30, 11]]
    (tmp_path / "classes.txt").write_text("dog\ncat\n")
    (tmp_path / "ImageSets" / "Main" / "val.txt").unlink()
    everything = read_data(f"voc:{tmp_path}")
    assert everything.classes == ("dog", "cat")
    assert everything.labels.tolist() == [[[2, 4, 12, 10, -3]], [[2, 4, 12, 10, 0]], [EMPTY]]


def test_classes_of_ones_own_are_numbered_in_sorted_order(tmp_path):
    seeds = read_data(f"voc:{voc(tmp_path, f'<annotation>{DOG}</object></annotation>'.replace('dog', 'axolotl'))}")
    assert seeds.classes == ("axolotl", "cat")


LAUGHS = '<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "&a;&a;">]><annotation><object><name>&b;</name></object></annotation>'
HOSTILE_VOC = {
    "entities": (LAUGHS, "no document type and no entities"),
    "entities in UTF-16": (LAUGHS.encode("utf-16"), "no document type and no entities"),
    "a file to include": ('<!DOCTYPE a SYSTEM "file:///etc/passwd"><annotation/>', "no document type"),
    "a huge file": ("<annotation>" + " " * (1 << 22) + "</annotation>", "it has more than 4,194,304 bytes"),
    "a truncated file": (f"<annotation>{DOG}", "cannot be read: "),
    "no XML": (b"\xff\x00", "cannot be read: "),
    "no box": ("<annotation><object><name>dog</name></object></annotation>", "a name of at most .* and a bndbox"),
    "no name": (f"<annotation>{DOG.replace('dog', '')}</object></annotation>", "a name of at most"),
    "text": (f"<annotation>{DOG.replace('12', 'x')}</object></annotation>", "could not convert"),
    "not finite": (f"<annotation>{DOG.replace('12', 'inf')}</object></annotation>", "xmin <= xmax"),
    "a turned box": (f"<annotation>{DOG.replace('12', '1')}</object></annotation>", "xmin <= xmax"),
}


@pytest.mark.parametrize("name", HOSTILE_VOC)
def test_hostile_annotations_of_pascal_voc_are_refused_in_one_line(name, tmp_path):
    text, message = HOSTILE_VOC[name]
    with pytest.raises(DataError, match=rf"2007_1\.xml must be an XML file of Pascal VOC, .*{message}") as caught:
        read_data(f"voc:{voc(tmp_path, text)}")
    assert "\n" not in str(caught.value)


def test_what_is_missing_of_pascal_voc_is_named(tmp_path):
    with pytest.raises(DataError, match="must have folders 'JPEGImages' and 'Annotations'"):
        read_data(f"voc:{tmp_path}")
    folder = voc(tmp_path / "voc")
    with pytest.raises(DataError, match=r"must be a file of ImageSets/Main, but .*test\.txt does not exist"):
        read_data(f"voc:{folder}?split=test")
    for listed, message in (("2007_9", r"2007_9\.jpg does not: repair"), ("../x", "must be in the folder")):
        (folder / "ImageSets" / "Main" / "val.txt").write_text(listed)
        with pytest.raises(DataError, match=message):
            read_data(f"voc:{folder}")
    (folder / "ImageSets" / "Main" / "val.txt").write_text("2007_0")
    (folder / "classes.txt").write_text("dog")
    with pytest.raises(DataError, match="known ones, but 'cat' is not"):
        read_data(f"voc:{folder}")
