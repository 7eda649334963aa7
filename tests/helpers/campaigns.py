"""Forks campaigns on request: each is a real process that may be killed, without importing torch anew each time.

Reads one JSON request a line and answers with the child's wait status and the number of file operations it made. A
request: path and job; acknowledged, the file for the faults that callbacks heard of; seconds, after which the child is
killed; kill, the file operation at which it is, and the moment; log, the file for all operations.
"""

import ctypes
import json
import os
import signal
import sys
import tempfile
import time

import torch

import themis
from themis.campaign import recorder
from themis.runs.store import writer

torch.set_num_threads(1)
WATCHED = "LD_PRELOAD" in os.environ


class Wavering(torch.nn.Module):
    """A small net whose answer breaks often."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        torch.nn.init.zeros_(self.net[0].bias)
        torch.nn.init.zeros_(self.net[2].bias)

    def forward(self, x):
        return self.net(x - 0.5)


NET = Wavering()
DATA = torch.rand(40, 8, generator=torch.Generator().manual_seed(0))
ENDLESS = {"tolerance": 1e-12, "plateau": None}
JOBS = {
    "noise": ("gaussian", {"magnitude": 0.3, "max_tests": 900, "round_size": 100, "max_stored": 25, **ENDLESS}),
    "attack": ("fgsm", {"magnitude": 0.2, "max_tests": 600, "round_size": 100, "policy": "paper", **ENDLESS}),
    "small": ("gaussian", {"magnitude": 0.8, "max_tests": 16, "round_size": 8, "max_stored": 3, **ENDLESS}),
    "long": ("gaussian", {"magnitude": 0.3, "max_tests": 60_000, "max_stored": 300, **ENDLESS}),
}


class Acknowledge(themis.Callback):
    """Writes down every fault it hears of; the system keeps that when the process is killed."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_fault(self, fault):
        os.write(self.file, f"{fault.id}\n".encode())
        if WATCHED:
            ctypes.CDLL(None).shim_note(ctypes.c_long(fault.id))


def work(request):
    perturbation, options = JOBS[request["job"]]
    callbacks = [Acknowledge(request["acknowledged"])]
    writer.FIRST_CHECKPOINT_SECONDS = 0.0
    if request["job"] in ("noise", "small"):  # inputs that will not be stored are sorted out at once
        recorder.MIN_SELECTED_BYTES = 0
    if request.get("always"):  # a flush and a checkpoint after every chunk: the same operations in every run
        writer.WRITING_SHARE = float("inf")
        note = writer.Writer.note
        writer.Writer.note = lambda self, **values: (note(self, **values), self.wait())
    shim = ctypes.CDLL(None)
    if WATCHED:
        at, moment = request.get("kill") or (-1, 0)
        shim.shim_count.restype = ctypes.c_long
        shim.shim_arm(request["path"].encode(), ctypes.c_long(at), moment, (request.get("log") or "").encode())
    if os.path.exists(os.path.join(request["path"], "run.sqlite")):
        themis.resume(request["path"], NET, DATA, callbacks=callbacks)
    else:
        themis.run(NET, DATA, perturbation, out=request["path"], callbacks=callbacks, **options)
    return shim.shim_count() if WATCHED else 0


def main():
    with tempfile.TemporaryDirectory() as folder:  # imports all that a campaign needs, before the first fork
        themis.run(NET, DATA, "gaussian", max_tests=50, out=f"{folder}/run")
        themis.resume(f"{folder}/run", NET, DATA, max_tests=60)
    for line in sys.stdin:
        request = json.loads(line)
        answers, answer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(answer, str(work(request)).encode())
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        os.close(answer)
        if request["seconds"] is not None:
            time.sleep(request["seconds"])
            os.kill(child, signal.SIGKILL)  # one that has ended is still there until it is waited for
        _, status = os.waitpid(child, 0)
        count = os.read(answers, 32).decode() or "0"
        os.close(answers)
        print(json.dumps([status, int(count)]), flush=True)


if __name__ == "__main__":
    main()
