"""Write a configuration file and a test for your project. The configuration is a themis.yaml with comments, for themis
run and themis check; the test is for pytest. Without --model and --data, also write model_under_test.py, a small model
to replace with yours, so that everything runs at once. No file is ever overwritten.

themis init
themis init --model mine:make_net --data mine:make_data --perturb 'rain + fog'
themis init robustness --model net.onnx --data images:photos
"""

import json
from importlib.resources import files
from pathlib import Path
from shlex import quote

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser, add_option
from themis.cli.source import PERTURB_HELP
from themis.errors import UsageError
from themis.runs.store.files import explained
from themis.text import print_text

MODEL_FILE = "model_under_test.py"
FILES = ("themis.yaml", "test_robustness.py", MODEL_FILE)
"""The files to write, from the templates in this folder."""


def add_arguments(parser: Parser) -> None:
    text = "where to write, and where the model and the data are looked up (default: the current folder)"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help=text)
    add_option(parser, "model", str | None, None, "the model, as in themis run")
    add_option(parser, "data", str | None, None, "the data, as in themis run")
    add_option(parser, "perturb", str, "gaussian", PERTURB_HELP)


def execute(arguments: CommandLine) -> int:
    if (arguments.model is None) != (arguments.data is None):
        missing = "--data" if arguments.data is None else "--model"
        raise UsageError(f"--model and --data must be given together, but {missing} is missing: give both, or neither")
    folder = Path(arguments.folder or ".")
    texts = project_files(arguments.model, arguments.data, arguments.perturb)
    existing = [name for name in texts if (folder / name).exists()]
    if existing:
        raise UsageError(
            f"nothing is overwritten, but {' and '.join(existing)} exist{'s' * (len(existing) == 1)} in "
            f"{folder.absolute()}: choose another FOLDER, or move them away"
        )

    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        with explained(folder / name), (folder / name).open("x", encoding="utf-8") as file:
            file.write(text)
    *others, last = texts
    print_text(f"Wrote {', '.join(others)} and {last}{'' if arguments.folder is None else f' in {folder}'}")
    if arguments.model is None:
        print_text(f"Replace the functions in {MODEL_FILE} with those of your model and data. Then, or now:")
    if arguments.folder is not None:
        print_text(f"  cd {quote(str(folder))}")
    print_text("  themis check --config themis.yaml     # inspect the model and the data")
    print_text("  themis run --config themis.yaml       # search for faults")
    print_text("  pytest test_robustness.py             # the same as a test")
    return DONE


def project_files(model: str | None, data: str | None, perturb: str) -> dict[str, str]:
    """The text of each file by its name."""
    stem = MODEL_FILE.removesuffix(".py")
    values = {"model": model or f"{stem}:make_model", "data": data or f"{stem}:make_data", "perturb": perturb}
    texts = {name: (files("themis_integrations.project") / f"{name}.in").read_text("utf-8") for name in FILES}
    texts["themis.yaml"] = texts["themis.yaml"].format(**{name: json.dumps(value) for name, value in values.items()})
    return {name: text for name, text in texts.items() if model is None or name != MODEL_FILE}
