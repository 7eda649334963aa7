"""Writes small data folders with the layout that the zoo expects."""

import csv
import gzip
import io
import struct
import zipfile

import numpy as np
from PIL import Image

from themis_integrations.data.digits import read_digits


def write_idx(path, array):
    """Bytes in LeCun's format, gzipped."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header + array.astype(np.uint8).tobytes())


def write_mnist(root, n_train=2000, n_test=400):
    """Real digits, as many of each class: `mnist` with its four files."""
    folder = root / "mnist"
    folder.mkdir(parents=True)
    digits = read_digits()
    rows = np.random.default_rng(0).permutation(len(digits))[: n_train + n_test]
    for name, some in (("train", rows[:n_train]), ("t10k", rows[n_train:])):
        pixels = (digits.inputs[some, 0] * 255).round().numpy()
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", pixels)
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", digits.labels[some].numpy())
    return folder


def write_pdf(root, n=60):
    """A table with columns of different reach: `pdf_contagio`. The first half is Contagio's."""
    folder = root / "pdf_contagio"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    table = np.floor(np.exp(rng.uniform(0, np.linspace(0.1, 25, 135), (n, 135)))) - 2
    table[:, 5] = 7  # a feature that says nothing
    source = np.array(["contagio-ben", "contagio-mal"] * (n // 4) + ["google-ben", "virustotal-mal"] * (n // 4))
    np.savez(
        folder / "pdf_features.npz", X=table, y=np.arange(n) % 2, source=source, feature_names=np.array(["f"] * 135)
    )
    return folder, table


def write_drebin(root, n=40):
    """Packed bits: `drebin215`. Every fourth row is to test with."""
    folder = root / "drebin215"
    (folder / "weights").mkdir(parents=True)
    bits = np.random.default_rng(0).integers(0, 2, (n, 215), dtype=np.uint8)
    names = np.array([f"f{k}" for k in range(215)])
    np.savez(folder / "drebin215.npz", X=np.packbits(bits, axis=1), y=np.arange(n) % 2, feature_names=names)
    np.save(folder / "weights" / "test_rows.npy", np.arange(0, n, 4))
    return folder, bits


def write_udacity(root, n=510):
    """A drive of flat grey frames, brighter from one to the next: `udacity_driving`."""
    folder = root / "udacity_driving"
    folder.mkdir(parents=True)
    with (folder / "CH2_final_evaluation.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["frame_id", "steering_angle", "public"])
        writer.writerows([1000 + k, k / 1000, 0] for k in range(n))
    with zipfile.ZipFile(folder / "frames_100x100.zip", "w") as archive:
        for k in range(n):
            content = io.BytesIO()
            Image.new("RGB", (100, 100), (k // 2,) * 3).save(content, "JPEG")
            archive.writestr(f"center/{1000 + k}.jpg", content.getvalue())
    return folder


def write_imagenet(root, n=3):
    """Pictures of one colour each: `imagenet_samples`."""
    folder = root / "imagenet_samples"
    (folder / "images").mkdir(parents=True)
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "class_index", "wnid", "name"])
        for k in range(n):
            Image.new("RGB", (224, 224), (60 * k, 120, 30)).save(folder / "images" / f"{k}.jpg")
            writer.writerow([f"{k}.jpg", 10 * k, "n0", "thing"])
    return folder
