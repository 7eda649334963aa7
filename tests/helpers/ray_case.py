"""A campaign that workers on Ray can run, and processes of Ray."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import themis

PICTURES = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1))
OPTIONS = {"magnitude": 0.3, "round_size": 600, "tolerance": 1e-12, "plateau": None, "random_seed": 5}


class Slow(nn.Module):
    """A small net that takes its time, so that something can happen while it runs."""

    def __init__(self, seconds=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3, bias=False))
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.net(x - 0.5)


class Crashing(Slow):
    """Ends its process when it sees a very bright picture, unless that is the process that created it."""

    def __init__(self):
        super().__init__()
        self.home = os.getpid()

    def forward(self, x):
        if os.getpid() != self.home and float(x.amax()) >= 1.0:
            os._exit(11)
        return super().forward(x)


class Raising(Crashing):
    """Raises an error instead."""

    def forward(self, x):
        if os.getpid() != self.home and float(x.amax()) >= 1.0:
            raise ArithmeticError("too bright")
        return self.net(x - 0.5)


def slow_net():
    return Slow(0.02)


def pictures():
    return PICTURES


def campaign(seconds=0.0, **options):
    return themis.run(Slow(seconds), PICTURES, "gaussian", **{"max_tests": 2400, **OPTIONS, **options})


def fault_set(run):
    """What identifies every fault, and its margin to the last bit."""
    columns = run.faults.columns
    return {
        (int(k), int(seed), int(answer), float(margin), theta.tobytes())
        for k, seed, answer, margin, theta in zip(
            *(columns[name] for name in ("id", "seed_id", "answer", "margin", "theta")), strict=True
        )
    }


def processes(file, part):
    """The ids of other processes that have this part in a file of theirs, such as `environ`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if int(folder.name) != os.getpid() and part.encode() in (folder / file).read_bytes():
                found.append(int(folder.name))
    return found


def workers(mark):
    """The ids of the processes of workers whose raylet has this mark in its environment; others are left alone."""
    raylets = processes("environ", mark)
    return [pid for pid in processes("cmdline", "ray::WorkerHost") if _parent(pid) in raylets]


def _parent(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
