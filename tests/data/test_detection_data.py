"""Pictures with boxes, read from the formats of COCO and YOLO."""

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
    with pytest.raises(DataError, match=r"2\.png is 20x40 and the first is 30x20: scale them with \?size=20"):
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
    "text": ("one 0 0 1 1", "must be numbers `class x y width height`, got 'one 0 0 1 1'"),
    "too few": ("1 0.5 0.5", "must be numbers"),
    "not finite": ("1 0.5 0.5 nan 0.1", "must be numbers"),
    "pixels": ("1 12 6 18 14", "shares of the picture, from 0 to 1, got 18: divide"),
    "an unknown class": ("2 0.5 0.5 0.1 0.1", "a whole number from 0 to 1, got 2"),
    "half a class": ("0.5 0.5 0.5 0.1 0.1", "a whole number"),
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
