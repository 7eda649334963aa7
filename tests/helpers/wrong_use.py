"""A folder with a user's module, wrong uses of the command line in it, and what every one of them must come to."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import torch
from user_module import go_to

from themis.cli import main
from themis.runs.store.writer import Writer

RUN = "run --model mine:net --data mine:data --perturb gaussian --max-tests 200 --quiet --out none"
FIRST = "the first fault"
"""Stands for its number."""
PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0"
HELD: list[Writer] = []
"""Writers of other processes; kept from being collected until the test ends."""
MODULE = """
import torch
from torch import nn
from torch.utils.data import Dataset
from themis import Target

RNG = torch.Generator().manual_seed(0)
INPUTS = torch.rand(30, 1, 4, 4, generator=RNG)

class Net(nn.Module):
    def __init__(self, after=lambda scores: scores, calls=10**9):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(16, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.fc2.bias -= self.fc2(torch.relu(self.fc1(4 * torch.rand(90, 16) - 2))).mean(0)  # no class is usual
        self.after, self.calls = after, calls

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise ZeroDivisionError("worn out\\nafter too many calls")
        return self.after(self.fc2(torch.relu(self.fc1(4 * x.flatten(1) - 2))))

def net(): return Net()
def target(): return Target(Net(), bounds=(0, 1))
def raises(): raise ZeroDivisionError("no model today")
def leaves(): raise SystemExit("good bye")
def needs(width): return Net()
def text(): return "resnet18"
def nothing(): return None
def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
def huge():
    def run_out(scores): raise torch.OutOfMemoryError("CUDA out of memory.\\nTried to allocate 20.00 GiB")
    return Net(run_out)
def worn_out(): return Net(calls=4)
def gives_none(): return Net(lambda scores: None)
def gives_text(): return Net(lambda scores: "cat")
def gives_nan(): return Net(lambda scores: scores * float("nan"))
def gives_one(): return Net(lambda scores: scores[:, :1])
def gives_a_mean(): return Net(lambda scores: scores.mean())
def gives_fewer_rows(): return Net(lambda scores: scores[:1])

def data(): return INPUTS
def rows(): return INPUTS.flatten(1)
def labelled(labels): return INPUTS, torch.as_tensor(labels)
def with_nan(): return torch.where(INPUTS > 0.99, float("nan"), INPUTS)
def with_infinity(): return torch.where(INPUTS > 0.99, float("inf"), INPUTS)
def bytes_(): return (INPUTS * 255).byte()
def normalised(): return (INPUTS - 0.5) / 0.25
def empty(): return INPUTS[:0]
def flat(): return INPUTS.flatten()
def wide(): return torch.rand(30, 1, 9, 9, generator=RNG)
def large_labels(): return labelled([7] * 30)
def negative_labels(): return labelled([-1] * 30)
def one_hot(): return labelled(torch.eye(3)[torch.arange(30) % 3])
def half_labels(): return labelled([0.5] * 30)
def few_labels(): return labelled([0, 1])
def wrong_labels(): return INPUTS, (Net()(INPUTS).argmax(1) + 1) % 3
def text_labels(): return [(each, "cat") for each in INPUTS]
def words(): return ["cat", "dog"]
def ragged(): return [torch.rand(1, 4, 4), torch.rand(1, 5, 5)]
def stream(): return iter(INPUTS)
def number(): return 5

class Torn(Dataset):
    def __len__(self): return 3
    def __getitem__(self, k): raise OSError("disk gone")

def torn(): return Torn()
"""


def run(text: str) -> list[str]:
    return f"{RUN} {text}".split()


def write(name: str, content: str | bytes):
    """Sets a file up."""
    return lambda: Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def weights_of_a_net(change):
    def setup():
        import mine

        torch.save({name: change(value) for name, value in mine.net().state_dict().items()}, "net.pt")

    return setup


def finished_run():
    assert main(run("--magnitude 0.9 --out done")) == 0


def enter(folder, monkeypatch):
    """Work in a folder that holds the module, without a data folder."""
    go_to(folder, monkeypatch, MODULE)
    monkeypatch.delenv("THEMIS_DATA", raising=False)
    sys.modules.pop("b", None)


def refused(words, code, setup, capsys):
    """The one line that the user is told; checks the exit code, and that nothing was done."""
    for each in setup:
        each()
    before = capsys.readouterr()
    assert before.err == ""
    rows = stored_rows()
    words = [str(rows[0][0]) if word == FIRST else word for word in words]
    assert main(words) == code
    said = capsys.readouterr()
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("themis")
    assert "Traceback" not in said.err
    assert "please report it" not in said.err
    assert said.out == ""
    assert not Path("harm").exists()
    for writer in HELD:
        writer.close()
    HELD.clear()
    assert stored_rows() == rows, "nothing that was found is lost"
    return said.err


def stored_rows():
    """The faults in `done`, if they can be read at all."""
    if not Path("done/run.sqlite").exists():
        return []
    with closing(sqlite3.connect("done/run.sqlite")) as database:
        try:
            return database.execute("SELECT * FROM faults ORDER BY id").fetchall()
        except sqlite3.DatabaseError:
            return []  # damaged on purpose
