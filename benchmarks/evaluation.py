"""The measured part of docs/evaluation.md, made from benchmarks/results/evaluation.json.

    python benchmarks/evaluation.py [FOLDER] [--truth FOLDER]

FOLDER is that of a finished `themis evaluate`; its results and figures replace the stored ones first. Known faults come
from an evaluation of their own, with benchmarks/truth.yaml: --truth replaces those.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from themis.experiments.evaluation.page import evaluation_tables, opening
from themis.experiments.evaluation.summary import Evaluation
from themis.experiments.evaluation.truth_tables import KNOWN_FAULTS

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMAGES = ROOT / "benchmarks/results/evaluation.json", ROOT / "docs/evaluation.md", ROOT / "docs/images"
COMMAND = "themis evaluate benchmarks/evaluation.yaml --data evaluation_data --out runs/evaluation"
TRUTH_COMMAND = "themis evaluate benchmarks/truth.yaml --data ~/data --out runs/truth"
MARK = "<!-- What follows is written by benchmarks/evaluation.py. -->"
FIGURES = {
    "correlations": "Correlations of error rate and distinct faults by technique, at equal passes",
    "shares-at-full-coverage": "Share of a reference run's distinct faults found when a campaign could stop",
}


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


def measured(evaluation: Evaluation) -> str:
    """Everything below the mark."""
    parts = ["## Results", f"```sh\n{evaluation.content['command']}\n```", *opening(evaluation)]
    for title, tables in evaluation_tables(evaluation).items():
        own = evaluation.content.get("truth_command") if title == KNOWN_FAULTS else None
        parts += [f"## {title}", *([f"```sh\n{own}\n```"] if own else []), *(table.markdown() for table in tables)]
    parts += [f"![{text}](images/evaluation-{name}.png)" for name, text in FIGURES.items()]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--truth", type=Path)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        store(arguments.folder)
    if arguments.truth is not None:
        store_truth(arguments.truth)
    text = PAGE.read_text().partition(MARK)[0]
    evaluation = Evaluation(json.loads(RESULTS.read_text()))
    PAGE.write_text(f"{text}{MARK}\n\n{measured(evaluation)}\n")


if __name__ == "__main__":
    main()
