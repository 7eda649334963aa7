"""The measured part of docs/evaluation.md, made from benchmarks/results/evaluation.json.

    python benchmarks/evaluation.py [FOLDER] [--truth FOLDER]
    python benchmarks/evaluation.py --sample DATA

FOLDER is that of a finished `themis evaluate`; its results and figures replace the stored ones first. Known faults come
from an evaluation of their own, with benchmarks/truth.yaml: --truth replaces those. --sample writes the folder
evaluation_data, which both plans read: samples of the data in DATA, a folder with the layout of THEMIS_DATA, and the
weights.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import struct
from pathlib import Path

import torch

from themis.data import Seeds
from themis.experiments.evaluation.page import FIGURES, evaluation_tables, opening, verdicts
from themis.experiments.evaluation.summary import Evaluation
from themis.experiments.evaluation.truth_tables import KNOWN_FAULTS
from themis.zoo.splits import read_cifar10, read_mnist, read_udacity

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMAGES = ROOT / "benchmarks/results/evaluation.json", ROOT / "docs/evaluation.md", ROOT / "docs/images"
COMMAND = "themis evaluate benchmarks/evaluation.yaml --data evaluation_data --out runs/evaluation"
TRUTH_COMMAND = "themis evaluate benchmarks/truth.yaml --data evaluation_data --out runs/truth"
SUMMARY = "<!-- benchmarks/evaluation.py writes this summary from the results. -->", "<!-- End of the summary. -->"
MARK = "<!-- What follows is written by benchmarks/evaluation.py. -->"


def store(folder: Path) -> None:
    """Replace the stored results and figures by those in the folder of an evaluation."""
    content, stored = (json.loads(path.read_text()) for path in (folder / "evaluation.json", RESULTS))
    truth = {name: stored[name] for name in ("truth", "truth_command") if name in stored}
    RESULTS.write_text(json.dumps({"command": COMMAND, **content, **truth}) + "\n")
    for name in FIGURES:
        if (folder / f"{name}.png").is_file():
            shutil.copyfile(folder / f"{name}.png", IMAGES / f"evaluation-{name}.png")


def store_truth(folder: Path) -> None:
    """Replace the stored results on known faults by those in the folder of an evaluation."""
    content, stored = (json.loads(path.read_text()) for path in (folder / "evaluation.json", RESULTS))
    truth = {"truth": content["truth"], "truth_command": TRUTH_COMMAND}
    RESULTS.write_text(json.dumps({**stored, **truth}) + "\n")


SAMPLES = (
    ("cifar10", read_cifar10, "test", 1800),
    ("cifar10", read_cifar10, "train", 1500),
    ("mnist", read_mnist, "train", 4000),
    ("udacity_driving", read_udacity, "test", 500),
    ("udacity_driving", read_udacity, "train", 300),
)
"""Folder, reader and split of what is sampled, and the inputs to keep."""
N_PICTURES = 400
"""Pictures of ImageNet to keep."""
WHOLE = (
    "mnist/t10k-*",
    *(f"{folder}/weights/*" for folder in ("cifar10", "mnist", "udacity_driving", "pdf_contagio", "drebin215")),
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
        seeds = read(data / folder, split)
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
    """The page with its summary and its results replaced."""
    start, end = SUMMARY
    head, _, rest = text.partition(start)
    rest = rest.partition(end)[2].partition(MARK)[0]
    return f"{head}{start}\n\n{summarised(evaluation)}\n\n{end}{rest}{MARK}\n\n{measured(evaluation)}\n"


def summarised(evaluation: Evaluation) -> str:
    """Everything between the marks of the summary."""
    return "\n\n".join(verdicts(evaluation))


def measured(evaluation: Evaluation) -> str:
    """Everything below the last mark."""
    parts = ["## Results", f"```sh\n{evaluation.content['command']}\n```", *opening(evaluation)]
    for title, tables in evaluation_tables(evaluation).items():
        own = evaluation.content.get("truth_command") if title == KNOWN_FAULTS else None
        parts += [f"## {title}", *([f"```sh\n{own}\n```"] if own else []), *(table.markdown() for table in tables)]
        figures = [(name, text) for name, (section, text) in FIGURES.items() if section == title]
        parts += [f"![{text}](images/evaluation-{name}.png)" for name, text in figures]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--sample", type=Path, metavar="DATA")
    arguments = parser.parse_args()
    if arguments.sample is not None:
        sample_data(arguments.sample, Path("evaluation_data"))
        return
    if arguments.folder is not None:
        store(arguments.folder)
    if arguments.truth is not None:
        store_truth(arguments.truth)
    PAGE.write_text(write_page(PAGE.read_text(), Evaluation(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
