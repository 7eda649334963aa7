"""Write the measured part of docs/lab/evaluation.md, and evaluation-cells.md, from benchmarks/results/evaluation.json.

    python benchmarks/evaluation.py [FOLDER] [--merge FOLDER ...] [--truth FOLDER]
    python benchmarks/evaluation.py --sample DATA

FOLDER is that of a finished `themis evaluate`; its results and figures replace the stored ones first. --merge takes
folders of evaluations of some cells, and replaces only what these have finished. Known faults come from an evaluation
of their own, with benchmarks/truth.yaml: --truth replaces those. --sample writes the folder
evaluation_data, which both plans read: samples of the data in DATA, a folder with the layout of THEMIS_DATA, and the
weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from merging import merge_evaluations

from themis.data import Seeds
from themis_lab.evaluation.figures import draw_evaluation
from themis_lab.evaluation.page import CELLS_PAGE, FIGURES, cells_page, evaluation_page
from themis_lab.evaluation.plan import EvaluationPlan
from themis_lab.evaluation.summary import Evaluation
from themis_lab.zoo.datasets import read_cifar10, read_mnist, read_udacity

ROOT = Path(__file__).parents[1]
PLAN = ROOT / "benchmarks/evaluation.yaml"
RESULTS, IMAGES = ROOT / "benchmarks/results/evaluation.json", ROOT / "docs/images"
PAGE = ROOT / "docs/lab/evaluation.md"
COMMAND = "themis evaluate benchmarks/evaluation.yaml --data evaluation_data --out runs/evaluation"
TRUTH_COMMAND = "themis evaluate benchmarks/truth.yaml --data evaluation_data --out runs/truth"
MARKS = "<!-- benchmarks/evaluation.py writes what follows, from the results. -->", "<!-- End of the results. -->"


def store(folder: Path) -> None:
    """Replace the stored results and figures by those in the folder of an evaluation."""
    content, stored = (json.loads(path.read_text()) for path in (folder / "evaluation.json", RESULTS))
    truth = {name: stored[name] for name in ("truth", "truth_command") if name in stored}
    RESULTS.write_text(json.dumps({"command": COMMAND, **content, **truth}) + "\n")
    for name in FIGURES:
        if (folder / f"{name}.png").is_file():
            shutil.copyfile(folder / f"{name}.png", IMAGES / f"evaluation-{name}.png")


def merge(folder: Path) -> None:
    """Replace what the folder of an evaluation has finished in the stored results, and draw the figures again."""
    part, origin, stored = (
        json.loads(path.read_text()) for path in (folder / "evaluation.json", folder / "plan.json", RESULTS)
    )
    evaluation = merge_evaluations(stored, part, EvaluationPlan.read(PLAN), origin["environment"])
    RESULTS.write_text(json.dumps(evaluation.content) + "\n")
    with TemporaryDirectory() as drawn:
        for path in draw_evaluation(evaluation, Path(drawn)):
            shutil.copyfile(path, IMAGES / f"evaluation-{path.name}")


def store_truth(folder: Path) -> None:
    """Replace the stored results on known faults by those in the folder of an evaluation."""
    content, stored = (json.loads(path.read_text()) for path in (folder / "evaluation.json", RESULTS))
    truth = {"truth": content["truth"], "truth_command": TRUTH_COMMAND}
    RESULTS.write_text(json.dumps({**stored, **truth}) + "\n")


SAMPLES: tuple[tuple[str, Callable[..., Seeds], str, int], ...] = (
    ("cifar10", read_cifar10, "test", 1800),
    ("cifar10", read_cifar10, "train", 1500),
    ("mnist", read_mnist, "train", 4000),
    ("udacity_driving", read_udacity, "test", 500),
    ("udacity_driving", read_udacity, "train", 300),
)
"""Folder, reader and split of what is sampled, and the inputs to keep."""
N_PICTURES = 400
"""Pictures of ImageNet to keep."""
WEIGHTS = ("cifar10", "mnist", "udacity_driving", "pdf_contagio", "drebin215", "imagenet_samples")
"""Folders with weights."""
WHOLE = (
    "mnist/t10k-*",
    *(f"{folder}/weights/*" for folder in WEIGHTS),
    "pdf_contagio/*.npz",
    "drebin215/*.npz",
)
"""Files that are copied."""


def sample_data(data: Path, out: Path) -> None:
    """Write evenly spaced samples of the large data sets, and copies of the small ones and of all weights."""
    for pattern in WHOLE:
        for file in data.glob(pattern):
            copy = out / file.relative_to(data)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    sample_pictures(data / "imagenet_samples", out / "imagenet_samples")
    for folder, read, split, n in SAMPLES:
        seeds = read(data / folder, split=split)
        rows = torch.arange(n) * len(seeds) // n
        write_idx(seeds[rows], out / folder, f"sample-{split}")


def sample_pictures(data: Path, out: Path) -> None:
    """Copy evenly spaced pictures of ImageNet, and their lines of the table of labels, if there are any."""
    if not (data / "labels.csv").is_file():
        return
    head, *rows = (data / "labels.csv").read_text().splitlines()
    kept = [rows[k * len(rows) // N_PICTURES] for k in range(N_PICTURES)]
    (out / "images").mkdir(parents=True, exist_ok=True)
    (out / "labels.csv").write_text("\n".join([head, *kept]) + "\n")
    for row in kept:
        name = row.partition(",")[0]
        shutil.copyfile(data / "images" / name, out / "images" / name)


def write_idx(seeds: Seeds, folder: Path, name: str) -> None:
    """Pictures in 0..1 as bytes, and labels as bytes, or as 64-bit floats if they are angles, as MNIST has them."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = (seeds.take(torch.arange(len(seeds))) * 255).round().to(torch.uint8).numpy()
    assert seeds.labels is not None  # the data sets have them
    labels = seeds.labels.double().numpy()
    is_whole = (labels == labels.round()).all()
    code, kind = (0x08, "u1") if is_whole else (0x0E, ">f8")
    for file, values, type_code in (
        (f"{name}-images-idx4-ubyte.gz", inputs, 0x08),
        (f"{name}-labels-idx1-ubyte.gz", labels.astype(kind), code),
    ):
        head = struct.pack(f">4B{values.ndim}I", 0, 0, type_code, values.ndim, *values.shape)
        (folder / file).write_bytes(gzip.compress(head + values.tobytes(), mtime=0))


def write_page(text: str, evaluation: Evaluation) -> str:
    """The page with what is between its marks replaced."""
    (head, _, rest), (start, end) = text.partition(MARKS[0]), MARKS
    figures = {name: f"../images/evaluation-{name}.png" for name in FIGURES}
    return f"{head}{start}\n\n{evaluation_page(evaluation, figures)}\n\n{end}{rest.partition(end)[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--merge", nargs="+", default=[], type=Path, metavar="FOLDER")
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--sample", type=Path, metavar="DATA")
    arguments = parser.parse_args()
    if arguments.sample is not None:
        sample_data(arguments.sample, Path("evaluation_data"))
        return
    if arguments.folder is not None:
        store(arguments.folder)
    for folder in arguments.merge:
        merge(folder)
    if arguments.truth is not None:
        store_truth(arguments.truth)
    evaluation = Evaluation(json.loads(RESULTS.read_text()))
    PAGE.write_text(write_page(PAGE.read_text(), evaluation))
    PAGE.with_name(CELLS_PAGE).write_text(f"{cells_page(evaluation)}\n")


if __name__ == "__main__":
    main()
