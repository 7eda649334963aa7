"""Steps that take long are shown with how far they are, even while a model never returns."""

import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from user_module import SMALL, go_to

import themis.cli
from themis.cli import main
from themis.data import rows
from themis.data.readers import read_data
from themis.data.seeds import from_reader
from themis.progress import Step, advance, shown_by, step

RUN = "run --model mine:net --data mine:data --perturb gaussian --max-tests 20 --out none --no-report"
SLOW = SMALL.replace("def net", "def quick").replace(
    "def data",
    """import time
class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = quick()

    def forward(self, x):
        time.sleep(0.2)
        return self.net(x)

def net():
    return Slow()

def data""",
)


@pytest.mark.parametrize(
    ("running", "text"),
    [
        (Step("reading"), "reading"),
        (Step("reading", 1_000, 0, "rows"), "reading: 1,000 rows"),
        (Step("reading", 1_000, 4_000, "rows"), "reading: 25% of 4,000 rows"),
    ],
)
def test_a_step_says_how_far_it_is(running, text):
    assert running.describe() == text


def steps_of(read):
    """The steps that ran, each as it was described at its end."""
    seen = []

    @contextmanager
    def show(running):
        yield
        seen.append(running.describe())

    with shown_by(show):
        read()
    return seen


def test_steps_are_shown_only_where_somebody_asks():
    def read():
        with step("a"), step("b"):
            advance(1, 4, "rows")

    read()
    advance(1, 2, "rows")  # without a step
    assert steps_of(read) == ["b: 25% of 4 rows", "a"]


def test_readers_say_how_far_they_are(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", inputs=np.zeros((9, 4), np.uint8))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")

    def read():
        for name in ("npz:a.npz", "csv:a.csv"):
            with step("reading"):
                read_data(name)

    monkeypatch.chdir(tmp_path)
    assert steps_of(read) == ["reading: 100% of 36 bytes", "reading: 2 rows"]
    monkeypatch.setattr(rows, "BLOCK_BYTES", 2 * 3 * 4)
    seeds = from_reader(lambda k: np.full(3, k), (3,), 5)
    read_into = []
    assert steps_of(lambda: read_into.append(seeds.in_memory())) == ["reading the inputs: 80% of 5 inputs"]
    assert read_into[0].inputs[:, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("option", ["", "--quiet", "--json"])
def test_the_command_line_prints_what_takes_long(tmp_path, monkeypatch, capsys, option):
    go_to(tmp_path, monkeypatch, SLOW)
    monkeypatch.setattr(themis.cli, "FIRST_STEP_SECONDS", 0.02)
    assert main([*RUN.split(), *option.split()]) == 0
    message = capsys.readouterr().err
    assert ("themis run: running the model on the first inputs (" in message) == (not option)
    assert not option or "running" not in message


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")
def test_an_endless_model_is_seen_to_run(tmp_path, monkeypatch):
    class Endless(torch.nn.Module):
        def forward(self, x):
            k = 0
            while k >= 0:
                k = (k + 1) % 7
            return x.flatten(1)

    go_to(tmp_path, monkeypatch, SMALL)
    torch.jit.save(torch.jit.script(Endless()), "endless.pt")
    words = RUN.replace("mine:net", "endless.pt").split()
    command = [sys.executable, "-m", "themis", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        deadline = time.monotonic() + 120
        try:
            lines = iter(process.stderr.readline, "")
            found = next(line for line in lines if "running" in line or time.monotonic() > deadline)
        finally:
            process.send_signal(signal.SIGKILL)
    assert found.startswith("themis run: running the model on the first inputs (")
