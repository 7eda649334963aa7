"""Check the installation: versions, devices, folders and optional packages. Then run a tiny campaign on each kind of
device and replay a fault. The exit code is 0 if everything that is required works, and 3 otherwise.

themis doctor
themis doctor --quick --json
"""

import os
import platform
import re
import shutil
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from themis.cli import DONE
from themis.cli.options import CommandLine, Parser
from themis.errors import ThemisError
from themis.text import counted, one_line, print_columns, print_json, print_text
from themis.version import __version__

DEVELOPMENT_EXTRAS = ("test", "check", "docs", "dev", "coco", "integrations")
"""Extras that are only for the development of Themis."""
UNSET_FOLDERS = {
    "THEMIS_DATA": "data sets must be given by path, such as cifar10:PATH",
    "THEMIS_CACHE": "the demo keeps its model in ~/.cache/themis",
    "THEMIS_STATE": "the key that signs your runs is in ~/.local/state/themis, or in themis in XDG_STATE_HOME",
}
"""Environment variables that name folders, and what applies if they are not set."""
GIB = 2**30


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--quick", action="store_true", help="skip the campaign")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def execute(arguments: CommandLine) -> int:
    sections, problems = examine(is_quick=arguments.quick)
    if arguments.json:
        print_json({"themis": __version__, **sections, "problems": problems})
    else:
        system = f"{platform.system()} {platform.release()} {platform.machine()}"
        print_text(f"themis {__version__}, Python {platform.python_version()}, {system}")
        for title, rows in sections.items():
            if rows:
                print_text(f"\n{title}")
                print_columns([*rows.items()], [True, True], indent="  ")
    if problems:
        raise ThemisError("; ".join(problems))
    return DONE


def examine(*, is_quick: bool) -> tuple[dict[str, dict[str, str]], list[str]]:
    """The findings in words, by section and name, and the problems."""
    packages, missing = _packages()
    problems = [f"{name} is required but not installed: pip install {name}" for name in missing]
    devices, campaigns = {}, {}
    if not missing:
        try:
            devices = _devices()
            kinds = {name.partition(":")[0] for name in devices} & {"cpu", "cuda"}
            campaigns = {kind: _try_campaign(kind) for kind in sorted(kinds) if not is_quick}
        except Exception as error:  # a broken installation may raise anything
            problems.append(f"the test campaign failed with {type(error).__name__}: {one_line(str(error))}")
    return {"packages": packages, "devices": devices, "folders": _folders(), "self-check": campaigns}, problems


def _packages() -> tuple[dict[str, str], list[str]]:
    """The version of every package that Themis can use, or how to install it, and the missing required packages."""
    found, missing = {}, []
    for requirement in requires("themis-dl") or ():
        name = re.split(r"[^\w.-]", requirement)[0]
        extra = re.search(r'extra == "([\w-]+)"', requirement)
        if extra is not None and extra[1] in DEVELOPMENT_EXTRAS:
            continue
        installed = _version(name)
        if installed is None and extra is None:
            missing.append(name)
        package = name if extra is None else f'"themis-dl[{extra[1]}]"'
        found[name] = installed or f"not installed: pip install {package}"
    return found, missing


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> dict[str, str]:
    import torch

    from themis.compute.native import library
    from themis.data.files import available_bytes
    from themis.runs.environment import mkl_cbwr

    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores, threads = counted(n_cores, "core"), counted(torch.get_num_threads(), "thread")
    devices = {"cpu": f"{cores}, {threads}, {available_bytes() / GIB:.1f} GiB free"}
    for k in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(k)
        devices[f"cuda:{k}"] = f"{torch.cuda.get_device_name(k)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    slower = "not built: campaigns on a CPU are slower; reinstall Themis with a C compiler"
    devices["C library"] = slower if library() is None else "in use"
    if (mode := mkl_cbwr()) is not None:
        is_strict = mode == "COMPATIBLE" or mode.endswith(",STRICT")
        remedy = "import themis before torch is used, and leave MKL_CBWR unset"
        devices["MKL"] = mode if is_strict else f"{mode}: the last bits of results may vary; {remedy}"
    return devices


def _folders() -> dict[str, str]:
    folders = {}
    for name, otherwise in UNSET_FOLDERS.items():
        path = os.environ.get(name, "")
        known = path if os.path.isdir(path) else f"{path}, which does not exist"
        folders[name] = known if path else f"not set: {otherwise}"
    runs = Path("runs").absolute()
    existing = next(folder for folder in (runs, *runs.parents) if folder.is_dir())
    free = f"{shutil.disk_usage(existing).free / GIB:.1f} GiB free"
    folders["runs"] = f"{runs}, {free if os.access(existing, os.W_OK) else 'which is not writable'}"
    return folders


def _try_campaign(device: str) -> str:
    """Run a real campaign on a tiny net in a temporary folder, and replay one of its faults."""

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
