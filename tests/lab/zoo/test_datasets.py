"""The readers of the zoo's data sets, which the laboratory adds by entry points."""

import os
import zipfile

import numpy as np
import pytest
import torch
from data_files import FEATURES, PIXELS, RNG, assert_reads, idx, save_pictures
from PIL import Image

from themis import UsageError
from themis.data.readers import READERS, read_data


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_mosaics_are_read(here):
    tiles = RNG.integers(0, 256, (100, 100, 32, 32, 3), dtype=np.uint8)
    Image.fromarray(tiles.transpose(0, 2, 1, 3, 4).reshape(3200, 3200, 3)).save(
        "test_batch.webp", lossless=True, method=0
    )
    np.save("test_batch_labels.npy", np.arange(10_000, dtype=np.uint8) % 10)
    seeds = read_data("cifar10:.")
    assert seeds.shape == (10_000, 3, 32, 32)
    np.testing.assert_array_equal(seeds.inputs[205], tiles[2, 5].transpose(2, 0, 1) / np.float32(255))
    assert seeds.labels[205] == 5


def test_features_of_files_and_apps_are_read(here):
    sources = np.array(["contagio-ben", "google-ben", "contagio-mal"])
    np.savez("pdf_features.npz", X=FEATURES, y=np.array([0, 0, 1], "u1"), source=sources)
    assert_reads("pdf:.", FEATURES, [0, 0, 1])
    assert assert_reads("pdf:.?split=contagio", FEATURES[[0, 2]], [0, 1]).seed_id.tolist() == [0, 2]
    bits = RNG.integers(0, 2, (5, 11), dtype=np.uint8)
    names = np.array([f"f{k}" for k in range(11)])
    np.savez("drebin215.npz", X=np.packbits(bits, axis=1), y=np.array([0, 1, 0, 1, 1], "u1"), feature_names=names)
    assert_reads("drebin:.", bits, [0, 1, 0, 1, 1])
    (here / "weights").mkdir()
    np.save("weights/test_rows.npy", np.array([1, 4]))
    assert assert_reads("drebin:.?split=test", bits[[1, 4]], [1, 1]).seed_id.tolist() == [1, 4]


def test_a_drive_is_read_with_its_angles(here):
    save_pictures(here / "center", PIXELS, "bmp")
    with zipfile.ZipFile("frames_100x100.zip", "w") as archive:
        for k in range(6):
            archive.write(f"center/{k:02}.bmp", f"center/{k:02}.jpg")
    angles = RNG.normal(size=6).round(3)
    rows = [f"{k:02},{angle},0" for k, angle in enumerate(angles)][::-1]
    (here / "CH2_final_evaluation.csv").write_text("\n".join(["frame_id,steering_angle,public", *rows]))
    seeds = assert_reads("udacity:.", PIXELS / np.float32(255), torch.tensor(angles).float().tolist())
    assert seeds.labels.dtype == torch.float32


def test_pictures_with_a_table_of_labels_are_read(here):
    save_pictures(here / "images")
    (here / "labels.csv").write_text("file,class_index,name\n03.png,7,tench\n01.png,2,owl\n")
    assert_reads("imagenet:.", PIXELS[[3, 1]] / np.float32(255), [7, 2])


def test_the_folder_of_known_data_sets_comes_from_the_environment(here, monkeypatch):
    monkeypatch.delenv("THEMIS_DATA", raising=False)
    for name in ("mnist", "cifar10", "pdf", "drebin", "udacity", "imagenet"):
        with pytest.raises(UsageError, match="set THEMIS_DATA, or write READER:PATH"):
            read_data(name)
    (here / "mnist").mkdir()
    (here / "mnist" / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS[:, 0]))
    monkeypatch.setenv("THEMIS_DATA", str(here))
    assert len(read_data("mnist")) == len(read_data("mnist?split=test")) == 6


@pytest.mark.slow
@pytest.mark.skipif("THEMIS_DATA" not in os.environ, reason="needs the data folder")
@pytest.mark.parametrize(
    ("spec", "shape", "sum_of_labels"),
    [
        ("mnist", (10_000, 1, 28, 28), 44_434),
        ("cifar10", (10_000, 3, 32, 32), 45_000),
        ("pdf", (27_205, 135), 16_153),
        ("drebin", (15_031, 215), 5_555),
        ("udacity", (5_614, 3, 100, 100), None),
        ("imagenet", (1_000, 3, 224, 224), 499_500),
    ],
)
def test_the_real_data_sets_are_read(spec, shape, sum_of_labels):
    seeds = read_data(spec)
    assert seeds.shape == shape
    assert sum_of_labels is None or int(seeds.labels.sum()) == sum_of_labels
    assert seeds.take(torch.arange(0, shape[0], 100)).isfinite().all()


def test_they_need_no_trust_and_a_known_split():
    for name in ("mnist", "cifar10", "imagenet", "pdf", "drebin", "udacity"):
        assert READERS.is_own(name)
    with pytest.raises(UsageError, match="split must be 'all' or 'contagio' or 'other'"):
        read_data("pdf:.?split=big")
