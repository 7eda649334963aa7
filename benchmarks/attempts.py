"""Every kind of model and data that people bring, tried as a new user would: the command, its time, what it prints.

    python benchmarks/attempts.py [--no-quick] [--only WORD] [--json FILE] [--table FILE]

Each attempt starts in an empty folder with `mine.py`, a file of models and data (`benchmarks/attempting/mine.py`). What
a command needs is written first; then the command runs in a process of its own, and its whole time counts: imports,
checks, the campaign, the report. An attempt that must be refused ends with a line that says why. `--table` writes the
results of this call into a Markdown file such as docs/support.md. Packages come from the extras `test` and
`integrations`; an attempt whose package is missing, or fails when it is imported, is listed as such. `--quick` is the
default: five attempts that differ most.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from searching.arguments import add_quick, complete
from searching.files import write_results

MINE = Path(__file__).parent / "attempting" / "mine.py"
TABLE_START, TABLE_END = "<!-- attempts -->", "<!-- end of attempts -->"
WARNINGS = ("the answer to an input depends", "the model was compiled")
"""How notes begin that the table repeats."""
SHOWN_LINES = 14
SECONDS = 300


@dataclass(frozen=True)
class Attempt:
    """One kind of model or data. Options follow `themis run`."""

    name: str
    options: str
    write: str = ""
    """Function of mine.py that writes the files first."""
    package: str = ""
    """Module that must be importable."""
    is_refused: bool = False
    """Whether one line that says why is the right answer."""


def net_and(options: str) -> str:
    return f"--model mine:net --data mine:digits {options}"


GAUSSIAN = "--perturb gaussian"
BOTH = "--data mine:digits_and_places --perturb gaussian"
ATTEMPTS = (
    Attempt("PyTorch module", net_and(GAUSSIAN)),
    Attempt("timm", f"--model 'timm:resnet10t(pretrained=False)' --data mine:colour_digits {GAUSSIAN}", "", "timm"),
    Attempt(
        "transformers", f"--model hf:vit --data mine:colour_digits {GAUSSIAN}", "write_transformer", "transformers"
    ),
    Attempt("Keras", "--model net.keras --data npz:digits.npz --perturb rotate", "write_keras", "keras"),
    Attempt("ONNX", f"--model net.onnx --data npz:digits.npz {GAUSSIAN}", "write_onnx", "onnxruntime"),
    Attempt(
        "Lightning checkpoint",
        f"--model mine:untrained_net --weights last.ckpt --data mine:digits {GAUSSIAN}",
        "write_lightning",
        "pytorch_lightning",
    ),
    Attempt("scikit-learn forest", "--model mine:forest --data mine:flowers --perturb edit", "", "sklearn"),
    Attempt("scikit-learn pipeline", "--model mine:pipeline --data mine:flowers --perturb edit", "", "sklearn"),
    Attempt("XGBoost", "--model mine:xgboost --data mine:numbered_flowers --perturb edit", "", "xgboost"),
    Attempt("LightGBM", "--model mine:lightgbm --data mine:flowers --perturb edit", "", "lightgbm"),
    Attempt(
        "Hugging Face data set", "--model mine:net --data 'hf:digits[test]' --perturb fog", "write_data_set", "datasets"
    ),
    Attempt("MindSpore cell", f"--model mine:cell --data mine:digits {GAUSSIAN}", "", "mindspore"),
    Attempt("int8 dynamic quantisation", f"--model mine:quantised --data mine:digits {GAUSSIAN}"),
    Attempt("half precision", f"--model mine:half --data mine:digits {GAUSSIAN}"),
    Attempt("autocast", net_and(f"{GAUSSIAN} --autocast bfloat16")),
    Attempt("torch.compile", f"--model mine:compiled --data mine:digits {GAUSSIAN}"),
    Attempt("pandas", "--model mine:net_of_rows --data mine:flowers --bounds auto --perturb edit", "", "pandas"),
    Attempt(
        "polars", "--model mine:net_of_rows --data mine:flowers_of_polars --bounds auto --perturb edit", "", "polars"
    ),
    Attempt("CSV table", "--model mine:net_of_rows --data csv:flowers.csv --bounds auto --perturb edit", "write_table"),
    Attempt("TorchScript", f"--model net.ts --data npz:digits.npz {GAUSSIAN}", "write_script"),
    Attempt("torch.export", f"--model net.pt2 --trust net.pt2 --data npz:digits.npz {GAUSSIAN}", "write_export"),
    Attempt("function of arrays", f"--model mine:service --data mine:digits {GAUSSIAN}"),
    Attempt("several inputs", f"--model mine:net_of_both {BOTH}"),
    Attempt("several inputs, function", f"--model mine:service_of_both {BOTH}"),
    Attempt("several inputs, TorchScript", f"--model both.ts {BOTH}", "write_script_of_both"),
    Attempt("several inputs, torch.export", f"--model both.pt2 --trust both.pt2 {BOTH}", "write_export_of_both"),
    Attempt("object detection", "--model mine:Detector --data mine:squares_with_boxes --perturb rotate"),
    Attempt("segmentation", "--model mine:Segmenter --data mine:squares_with_maps --perturb shift"),
    Attempt("signals", "--model mine:net_of_tones --data mine:tones --perturb signal_noise"),
    Attempt("clips", "--model mine:net_of_clips --data mine:clips --perturb 'over_time(brightness)'"),
    Attempt("more outputs than labels", f"--model mine:ManyOutputs --data mine:digits {GAUSSIAN}", is_refused=True),
    Attempt("several scores, one named", f"--model mine:TwoHeads --output digit --data mine:digits {GAUSSIAN}"),
    Attempt("several scores", f"--model mine:TwoHeads --data mine:digits {GAUSSIAN}", is_refused=True),
    Attempt("text, sentences", f"--model mine:net_of_text --data mine:sentences {GAUSSIAN}", is_refused=True),
    Attempt("text, token ids", f"--model mine:net_of_text --data mine:token_ids {GAUSSIAN}", is_refused=True),
    Attempt("text, a CSV file", f"--model mine:net_of_text --data csv:reviews.csv {GAUSSIAN}", "write_text", "", True),
)
QUICK = ("PyTorch module", "ONNX", "scikit-learn forest", "several inputs", "text, sentences")


def attempt(row: Attempt, folder: Path) -> dict[str, Any]:
    """Try one row in a new folder."""
    shutil.copy(MINE, folder / "mine.py")
    command = f"themis run {row.options} --max-tests 500"
    result: dict[str, Any] = {"name": row.name, "command": command}
    missing = _why_missing(row.package, folder) if row.package else None
    if missing is not None:
        return {**result, "outcome": "package missing", "printed": [missing], "seconds": None}
    if row.write:
        written = _call(["-c", f"import mine; mine.{row.write}()"], folder)
        if written.returncode:
            sys.exit(f"{row.name}: mine.{row.write} failed:\n{written.stdout}")
    began = time.perf_counter()
    process = _call(["-m", "themis", *shlex.split(command)[1:]], folder)
    seconds = time.perf_counter() - began
    lines = [line for line in process.stdout.replace(str(folder), ".").splitlines() if line.strip()]
    outcome = {0: "tested", 2: "refused", 3: "refused"}.get(process.returncode, f"exit code {process.returncode}")
    is_expected = outcome == ("refused" if row.is_refused else "tested")
    return {
        **result,
        "outcome": outcome,
        "is_expected": is_expected,
        "seconds": round(seconds, 1),
        "printed": lines,
    }


def _call(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def _why_missing(package: str, folder: Path) -> str | None:
    """The last line of the error when a package is imported; None if there is none."""
    process = _call(["-c", f"import {package}"], folder)
    return process.stdout.strip().splitlines()[-1] if process.returncode else None


def table(results: list[dict[str, Any]]) -> str:
    """The attempts as a table in Markdown: what was tried, its command, its time and its last word."""
    lines = ["| | `themis run ... --max-tests 500` | time | answer |", "|---|---|---:|---|"]
    for result in results:
        options = result["command"].removeprefix("themis run ").removesuffix(" --max-tests 500")
        seconds = "" if result["seconds"] is None else f"{result['seconds']:.0f} s"
        answer = _answer(result).replace("|", "\\|")
        lines.append(f"| {result['name']} | `{options}` | {seconds} | {answer} |")
    return "\n".join(lines)


def _answer(result: dict[str, Any]) -> str:
    """The line that a reader looks for: what was found and what was warned of, or why not."""
    notes = [line.removeprefix("themis run: ") for line in result["printed"] if line.startswith("themis run: ")]
    if result["outcome"] == "tested":
        found = next(line.removeprefix("faults").strip() for line in result["printed"] if line.startswith("faults "))
        warning = next((note.partition(":")[0] for note in notes if note.startswith(WARNINGS)), None)
        return found if warning is None else f"{found}; warned: {warning}"
    return f"refused: {notes[-1]}" if result["outcome"] == "refused" else f"not tried: {result['printed'][-1]}"


def _merged(path: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of this call, and of an earlier one in the file for other attempts."""
    known = json.loads(Path(path).read_text())["results"]["rows"] if Path(path).exists() else []
    rows = {row["name"]: row for row in [*known, *results]}
    return [rows[row.name] for row in ATTEMPTS if row.name in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="attempts whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="results; with --only, those of other attempts are kept")
    parser.add_argument("--table", metavar="FILE", help=f"Markdown file with the lines {TABLE_START} and {TABLE_END}")
    add_quick(parser)
    arguments = parser.parse_args()
    if arguments.only is None:
        arguments = complete(arguments, {"only": QUICK}, {"only": [row.name for row in ATTEMPTS]})
    else:
        arguments.only = [row.name for row in ATTEMPTS if arguments.only in row.name]
    results = []
    for row in ATTEMPTS:
        if row.name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            result = attempt(row, Path(folder))
        results.append(result)
        seconds = "-" if result["seconds"] is None else f"{result['seconds']} s"
        print(f"\n== {result['name']}: {result['outcome']}, {seconds}\n$ {result['command']}", flush=True)
        lines = result["printed"]
        print("\n".join(lines[:SHOWN_LINES]), *["..."] * (len(lines) > SHOWN_LINES), sep="\n", flush=True)
    if arguments.json is not None:
        results = _merged(arguments.json, results)
        write_results(arguments.json, "cpu", {"rows": results})
    if arguments.table is not None:
        path = Path(arguments.table)
        before, _, rest = path.read_text().partition(TABLE_START)
        path.write_text(f"{before}{TABLE_START}\n\n{table(results)}\n\n{TABLE_END}{rest.partition(TABLE_END)[2]}")
    if unexpected := [result["name"] for result in results if not result.get("is_expected", True)]:
        sys.exit(f"not as expected: {', '.join(unexpected)}")


if __name__ == "__main__":
    main()
