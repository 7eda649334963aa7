"""The table of the performance page is the one that its benchmark makes from the stored results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_is_made_from_the_results():
    command = [sys.executable, "benchmarks/throughput.py", "--table", "benchmarks/results/throughput.json"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert len(made.splitlines()) == 11
    assert made in (ROOT / "docs" / "performance.md").read_text()
