"""Run the tests as other machines would: other kernels, threads, addresses and Pythons, and no C compiler.

    python tests/portable.py [--only NAME ...] [arguments of pytest]

Each configuration is one run of pytest; together they cover what results may depend on. The last lines are a table.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parents[1]
VERSION = ".".join(platform.python_version_tuple()[:2])
OFFSETS = {"THEMIS_TEST_OFFSETS": "1"}
PARALLEL = ["-n", "2", "--dist", "loadgroup"]
NEEDED = "import torch, pytest, xdist, hypothesis, themis"


@dataclass(frozen=True)
class Configuration:
    """A kind of machine. conftest.py reads the variables THEMIS_TEST_*."""

    name: str
    variables: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    has_compiler: bool = True
    python: str = VERSION
    without: tuple[str, ...] = ()
    """Tests that it does not apply to."""


BETWEEN_PROCESSES = (
    "test_a_signal_stops_a_campaign_and_everything_is_kept",
    "test_two_workers_find_what_one_finds_even_after_a_kill",
)
"""Tests that continue in their own process what another has begun, whose weights are not rounded otherwise."""
CONFIGURATIONS = (
    Configuration(
        "old CPU",
        {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE", **OFFSETS},
        threads=2,
    ),
    Configuration("no compiler", OFFSETS, has_compiler=False),
    Configuration("AVX2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", **OFFSETS}),
    Configuration("other rounding", {"THEMIS_TEST_ROUNDING": "1"}, without=BETWEEN_PROCESSES),
    Configuration("MKL unset", {"MKL_CBWR": ""}, threads=4),  # empty: Themis leaves it, and MKL reads nothing
    *(Configuration(f"Python {each}", python=each) for each in ("3.11", "3.12", "3.13") if each != VERSION),
)


def interpreter(version: str) -> tuple[str | None, str]:
    """A Python of this version that has what the tests need; or why there is none."""
    name, reason = f"python{version}", "not installed"
    here = sys.executable if version == VERSION else None
    found = [here, shutil.which(name), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}"))]
    for python in filter(None, found):
        tried = subprocess.run([python, "-c", NEEDED], capture_output=True, text=True)
        if tried.returncode == 0:
            return python, ""
        reason = tried.stderr.strip().splitlines()[-1]
    return None, reason


def run(configuration: Configuration, arguments: list[str]) -> tuple[str, bool]:
    """The last line of pytest, or why it was not run; and whether that is good."""
    python, reason = interpreter(configuration.python)
    if python is None:
        return f"skipped: {reason}", True
    variables = {"THEMIS_TEST_THREADS": str(configuration.threads), **configuration.variables}
    if configuration.threads > 1:
        variables["OMP_WAIT_POLICY"] = "passive"  # threads that spin would keep each other from the cores
    with tempfile.TemporaryDirectory(prefix="themis-portable-") as folder:
        if not configuration.has_compiler:
            shutil.copytree(ROOT / "src", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so", "*.c"))
            variables["PYTHONPATH"] = folder
        apart = ["-k", f"not ({' or '.join(configuration.without)})"] if configuration.without else []
        command = [python, "-m", "pytest", "-q", *PARALLEL, *apart, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        last = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        return last, process.wait() == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.name for each in CONFIGURATIONS]
    parser.add_argument("--only", action="append", choices=names, help="one of the configurations; can be repeated")
    options, arguments = parser.parse_known_args()
    rows, are_good = [], True
    for configuration in CONFIGURATIONS:
        if options.only and configuration.name not in options.only:
            continue
        print(f"== {configuration.name}", flush=True)
        began = monotonic()
        outcome, is_good = run(configuration, arguments)
        are_good = are_good and is_good
        rows.append(f"{configuration.name:<12} {(monotonic() - began) / 60:5.1f} min  {outcome}")
    print("", *rows, sep="\n")
    return 0 if are_good else 1


if __name__ == "__main__":
    sys.exit(main())
