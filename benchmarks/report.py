"""The report of a campaign with more than 10,000 faults: its size, and the time until it is usable in a browser.

    python benchmarks/report.py [--no-quick] [--repeats N] [--json FILE]

LeNet-5 on digits under strong noise. The report is usable when the gallery has drawn its pictures and a filter has
responded; the time starts when the address is passed to a browser with empty caches, and includes driving the
browser. Needs Chromium and playwright; without them only writing is measured. `--quick` is the
default: the page is opened twice.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete

import themis
from themis.report.page import write_report
from themis.runs.environment import describe_environment
from themis_lab.cli.demo import make_data, make_model

AIM_SECONDS, AIM_BYTES = 2.0, 20e6


def measure_opening(report: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds until the gallery is drawn, and until filtering and sorting have responded after that."""
    from playwright.sync_api import sync_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    seconds: dict[str, list[float]] = {"drawn": [], "filtered": [], "sorted": [], "usable": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for _ in range(repeats):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            page = context.new_page()
            times = [perf_counter()]
            page.goto(report.resolve().as_uri())
            page.wait_for_function("() => document.querySelector('#cards img')?.naturalWidth > 1")
            times.append(perf_counter())
            for choice, value in (("answer", "8"), ("sort", "ssim")):
                page.select_option(f"#filter-{choice}", value)
                page.wait_for_selector("#cards article")
                times.append(perf_counter())
            spans = [after - before for before, after in pairwise(times)]
            for name, span in zip(seconds, [*spans, times[2] - times[0]], strict=True):
                seconds[name].append(span)
            context.close()
        browser.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--repeats", type=int, help="how often the page is opened")
    parser.add_argument("--json", type=Path)
    arguments = complete(parser.parse_args(), {"repeats": 2}, {"repeats": 7})
    with tempfile.TemporaryDirectory() as folder:
        limits: dict[str, Any] = {"coverage": None, "max_tests": 16_000}
        out = Path(folder) / "run"
        run = themis.run(make_model(), make_data(), "gaussian", magnitude=1.0, policy="corners", **limits, out=out)
        start = perf_counter()
        report = write_report(out)
        result: dict[str, Any] = {
            "faults": len(run.faults),
            "bytes": report.stat().st_size,
            "written": perf_counter() - start,
        }
        try:
            opening = measure_opening(report, arguments.repeats)
        except (ImportError, StopIteration):
            opening = {}
    result["opening"] = {name: statistics.median(times) for name, times in opening.items()}
    result["slowest"] = {name: max(times) for name, times in opening.items()}
    table = Table("a report of", "size", "written in", *(f"{name} after" for name in opening))
    seconds = [f"{result['opening'][name]:.2f} s (at most {result['slowest'][name]:.2f})" for name in opening]
    table.add_row(
        f"{result['faults']:,} faults", f"{result['bytes'] / 1e6:.1f} MB", f"{result['written']:.1f} s", *seconds
    )
    Console().print(table)
    if not opening:
        print("No browser: install Chromium and playwright to measure opening.")
    else:
        is_met = result["slowest"]["usable"] < AIM_SECONDS and result["bytes"] < AIM_BYTES
        print(f"Aim: under {AIM_BYTES / 1e6:.0f} MB, usable within {AIM_SECONDS:g} s: {'met' if is_met else 'missed'}")
    if arguments.json:
        content = {"environment": describe_environment(torch.device("cpu")), "results": result}
        arguments.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
