"""The measured part of docs/evaluation.md, made from benchmarks/results/evaluation.json.

    python benchmarks/evaluation.py [FOLDER]

FOLDER is that of a finished `themis evaluate`; its results and figures replace the stored ones first.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from themis.experiments.evaluation.page import evaluation_tables, opening
from themis.experiments.evaluation.summary import Evaluation

ROOT = Path(__file__).parents[1]
RESULTS, PAGE, IMAGES = ROOT / "benchmarks/results/evaluation.json", ROOT / "docs/evaluation.md", ROOT / "docs/images"
COMMAND = "themis evaluate benchmarks/evaluation.yaml --data evaluation_data --out runs/evaluation"
MARK = "<!-- What follows is written by benchmarks/evaluation.py. -->"
FIGURES = {
    "correlations": "Correlations of error rate and distinct faults by technique, at equal passes",
    "shares-at-full-coverage": "Share of a reference run's distinct faults found when a campaign could stop",
}


def store(folder: Path) -> None:
    """Replace the stored results and figures by those in the folder of an evaluation."""
    content = json.loads((folder / "evaluation.json").read_text())
    RESULTS.write_text(json.dumps({"command": COMMAND, **content}) + "\n")
    for name in FIGURES:
        if (folder / f"{name}.png").is_file():
            shutil.copyfile(folder / f"{name}.png", IMAGES / f"evaluation-{name}.png")


def measured(evaluation: Evaluation) -> str:
    """Everything below the mark."""
    parts = ["## Results", f"```sh\n{evaluation.content['command']}\n```", *opening(evaluation)]
    for title, tables in evaluation_tables(evaluation).items():
        parts += [f"## {title}", *(table.markdown() for table in tables)]
    parts += [f"![{text}](images/evaluation-{name}.png)" for name, text in FIGURES.items()]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        store(arguments.folder)
    text = PAGE.read_text().partition(MARK)[0]
    evaluation = Evaluation(json.loads(RESULTS.read_text()))
    PAGE.write_text(f"{text}{MARK}\n\n{measured(evaluation)}\n")


if __name__ == "__main__":
    main()
