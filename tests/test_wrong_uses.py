"""Wrong uses of the command line: each gets one line that says what is wrong, and its exit code."""

import importlib
import pickle
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from themis.cli import main
from themis.store import Writer

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
        self.after, self.calls = after, calls

    def forward(self, x):
        self.calls -= 1
        if self.calls < 0:
            raise ZeroDivisionError("worn out\\nafter too many calls")
        return self.after(self.fc2(torch.relu(self.fc1(x.flatten(1)))))

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
def text_column(): return INPUTS, ["cat"] * 30
def words(): return ["cat", "dog"]
def ragged(): return [torch.rand(1, 4, 4), torch.rand(1, 5, 5)]
def stream(): return iter(INPUTS)
def number(): return 5

class Torn(Dataset):
    def __len__(self): return 3
    def __getitem__(self, k): raise OSError("disk gone")

def torn(): return Torn()
"""


class Harmful:
    def __reduce__(self):
        return exec, ("open('harm', 'w')",)


def write(name: str, content: str | bytes):
    """Sets a file up."""
    return lambda: Path(name).write_bytes(content.encode() if isinstance(content, str) else content)


def save(name: str, value, size: float = 1.0):
    """Sets a weights file up; `size` is the share of it that was written."""

    def setup():
        torch.save(value, name)
        content = Path(name).read_bytes()
        Path(name).write_bytes(content[: int(size * len(content))])

    return setup


def archive(size: float = 1.0, **arrays):
    """Sets `data.npz` up; `size` is the share of it that was written."""

    def setup():
        np.savez("data.npz", **arrays)
        content = Path("data.npz").read_bytes()
        Path("data.npz").write_bytes(content[: int(size * len(content))])

    return setup


def weights_of_a_net(change):
    def setup():
        import mine

        torch.save({name: change(value) for name, value in mine.net().state_dict().items()}, "net.pt")

    return setup


def one_array():
    np.save("one.npy", np.zeros((9, 1, 4, 4)))


def finished_run():
    assert main(run("--magnitude 0.9 --out done")) == 0


def run_with_weights():
    import mine

    torch.save(mine.net().state_dict(), "net.pt")
    assert main(run("--weights net.pt --magnitude 0.9 --out done")) == 0


def then(*steps):
    """Sets a finished run up, then does some steps."""

    def setup():
        finished_run()
        for step in steps:
            step()

    return setup


def cut(pattern: str, size: float = 0.5):
    """Leaves a share of a file, as a bad disk does."""

    def step():
        path = min(Path("done").glob(pattern))
        path.write_bytes(path.read_bytes()[: int(size * path.stat().st_size)])

    return step


def change_the_module(before: str, after: str):
    def step():
        Path("mine.py").write_text(MODULE.replace(before, after))
        sys.modules.pop("mine", None)
        importlib.invalidate_caches()

    return step


def remove_the_module():
    Path("mine.py").unlink()
    sys.modules.pop("mine", None)
    importlib.invalidate_caches()


def write_the_schema(version: int):
    def step():
        with closing(sqlite3.connect("done/run.sqlite")) as database:
            database.execute(f"PRAGMA user_version = {version}")

    return step


def run_from_python():
    import mine

    import themis

    themis.run(mine.net(), mine.data(), "gaussian", magnitude=0.9, max_tests=200, out="done")


def write_at_the_same_time():
    """Another writer holds the folder; it is kept from being collected until the test ends."""
    finished_run()
    HELD.append(Writer("done"))


HELD: list[Writer] = []


RUN = "run --model mine:net --data mine:data --perturb gaussian --max-tests 200 --quiet --out none"
FIRST = "the first fault"
"""Stands for its number."""
PICTURE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0"


def run(text: str) -> list[str]:
    return f"{RUN} {text}".split()


WRONG = {
    # commands
    "unknown command": (["rnu"], 2, "unknown command 'rnu': did you mean 'run'?"),
    "unlike any command": (["frobnicate"], 2, "unknown command 'frobnicate': known: "),
    "option before the command": (["--quiet", "run"], 2, "unknown command '--quiet'"),
    "completion for no shell": (["completion"], 2, "SHELL must be given"),
    "completion for an unknown shell": (["completion", "bsh"], 2, "did you mean 'bash'?"),
    "demo with an unknown perturbation": (["demo", "--perturb", "fgms"], 2, "did you mean 'fgsm'?"),
    "demo without a limit": (["demo", "--max-tests", "null"], 2, "max_tests must be a whole number, got 'null'"),
    # flags
    "unknown flag": (run("--max-test 5"), 2, "unknown option --max-test: did you mean --max-tests?"),
    "underscores": (run("--max_tests 5"), 2, "did you mean --max-tests?"),
    "unlike any flag": (run("--frobnicate"), 2, "unknown option --frobnicate: see themis run --help"),
    "flag of one dash": (run("-max-tests=5"), 2, "did you mean --max-tests?"),
    "no value": (run("--max-tests"), 2, "--max-tests must be followed by a value"),
    "a flag for a value": (run("--max-tests --quiet"), 2, "--max-tests must be followed by a value"),
    "a value for a flag": (run("--quiet=5"), 2, "ignored explicit argument '5'"),
    "one word too many": (run("--layers fc1 fc2"), 2, "unexpected argument 'fc2'"),
    "no model": (["run"], 2, "--model must be given: module:factory"),
    "no data": (["run", "--model", "mine:net"], 2, "--data must be given: READER"),
    "no perturbation": (["run", "--model", "mine:net", "--data", "mine:data"], 2, "--perturb must be given"),
    "an empty model": (["run", "--model", ""], 2, "--model must be given"),
    # values of the wrong type
    "text for a count": (run("--max-tests many"), 2, "max_tests must be a whole number or null, got 'many'"),
    "half a test": (run("--max-tests 1.5"), 2, "max_tests must be a whole number or null, got '1.5'"),
    "infinitely many": (run("--max-tests inf"), 2, "max_tests must be a whole number or null, got 'inf'"),
    "no random seed": (run("--random-seed null"), 2, "random_seed must be a whole number, got 'null'"),
    "text for a number": (run("--magnitude big"), 2, "magnitude must be a number or null, got 'big'"),
    "not a number": (run("--tolerance nan"), 2, "tolerance must be a number, got 'nan'"),
    "one bound": (run("--bounds 255"), 2, "bounds must be two numbers as 0,255, got '255'"),
    "three bounds": (run("--bounds 0,1,2"), 2, "bounds must be two numbers as 0,255, got '0,1,2'"),
    "a mean in words": (run("--mean grey --std 1"), 2, "mean must be numbers as 0.4,0.5,0.4 or null, got 'grey'"),
    "an empty layer": (run("--layers fc1,,fc2"), 2, "layers must be names as conv1,fc* or null"),
    # values out of range
    "coverage over one": (run("--coverage 2"), 2, "coverage must lie in (0, 1], or be None for no goal, got 2.0"),
    "no coverage": (run("--coverage 0"), 2, "coverage must lie in (0, 1], or be None for no goal, got 0.0"),
    "negative tolerance": (run("--tolerance -1"), 2, "tolerance must be a positive number, got -1.0"),
    "alpha of one": (run("--alpha 1"), 2, "alpha must lie in [0.5, 1)"),
    "odd draws": (run("--draws 4001"), 2, "draws must be at least 100 and a multiple of the 4 chains"),
    "no sample": (run("--sample 0"), 2, "sample must be at least 1, got 0"),
    "share over one": (run("--uniform-share 1.5"), 2, "uniform_share must lie in [0, 1], got 1.5"),
    "no tests": (run("--max-tests 0"), 2, "max_tests must be positive"),
    "negative time": (run("--max-seconds -5"), 2, "max_seconds must be positive"),
    "negative memory": (run("--clean-memory-gib -1"), 2, "clean_memory_gib must be 0 or more"),
    "negative random seed": (run("--random-seed -1"), 2, "random_seed must lie in 0..2**63 - 1, got -1"),
    "no magnitude": (run("--magnitude 0"), 2, "magnitude must be a positive number, got 0"),
    "too few passes": (run("--max-passes 10"), 2, "max_passes must leave room for a test after the clean sweep's"),
    "bounds upside down": (run("--bounds 1,0"), 2, "bounds must be finite and ascending"),
    "no spread": (run("--mean 0.5 --std 0"), 2, "std must be positive"),
    "mean alone": (run("--mean 0.5"), 2, "--mean and --std must be given together"),
    "means of other channels": (run("--mean 1,2,3 --std 1,2,3"), 3, "one a channel, got 3 for inputs with 1 channel"),
    # names
    "perturbation": (run("--perturb gausian"), 2, "did you mean 'gaussian'?"),
    "one of two perturbations": (run("--perturb rain+fogg"), 2, "did you mean 'fog'?"),
    "theta that the perturbation does not have": (run("--perturb rain(angel=1:2)"), 2, "did you mean 'angle'?"),
    "theta that is no range": (run("--perturb rain(angle=wide)"), 2, "must be NAME=LOW:HIGH"),
    "theta outside of what it means": (run("--perturb rain(density=0:3)"), 2, "'density' must lie in 0..1, got 3"),
    "magnitude that takes theta too far": (run("--perturb jpeg --magnitude 9"), 2, "'quality' must lie in 1..100"),
    "bracket that is not closed": (run("--perturb rain(angle=1:2"), 2, "must be names joined by +"),
    "perturbation of no module": (run("--perturb nowhere:BAND"), 2, "No module named 'nowhere'"),
    "perturbation that is something else": (run("--perturb mine:net"), 2, "must be a themis.Perturbation, got Net"),
    "picture perturbation on a table": (run("--data mine:rows --perturb rain"), 2, "'rain' needs pictures"),
    "table perturbation on pictures": (run("--perturb edit"), 2, "'edit' needs rows of a table"),
    "colours of grey pictures": (run("--perturb hue"), 2, "needs pictures with 3 channels, got 1"),
    "similarity of tiny pictures": (run("--min-ssim 0.9"), 2, "min_ssim needs pictures"),
    "similarity over one": (run("--min-ssim 1.5"), 2, "min_ssim must lie in (0, 1)"),
    "policy": (run("--policy schedule"), 2, "did you mean 'scheduled'?"),
    "judge": (run("--judge exakt"), 2, "did you mean 'exact'?"),
    "preset": (run("--preset papper"), 2, "preset must be 'paper'"),
    "scale": (run("--scale relativ"), 2, "scale must be 'absolute' or 'relative'"),
    "neurons": (run("--neurons pixel"), 2, "neurons must be 'element' or 'channel', got 'pixel'"),
    "oracle": (run("--oracle wronng"), 2, "did you mean 'wrong'?"),
    "layers": (run("--layers conv9"), 2, "'conv9' matches none"),
    "device": (run("--device cuda:77"), 2, "--device must be usable here, 'cuda:77' is not"),
    "device by a wrong name": (run("--device gpu"), 2, "--device must be usable here, 'gpu' is not"),
    "folder": (run("--folder nowhere"), 2, "--folder must be a folder that exists, nowhere is none"),
    # configuration files
    "config missing": (run("--config no.yaml"), 2, "the config file must exist, no.yaml does not"),
    "config is a folder": (run("--config ."), 2, "the config file must be one that can be read, .: Is a directory"),
    "config not YAML": (run("--config c.yaml"), 2, "c.yaml must be YAML, line 2", write("c.yaml", "a: 1\nb: c: d\n")),
    "config is a picture": (run("--config c.yaml"), 2, "c.yaml must be YAML", write("c.yaml", PICTURE)),
    "config is a list": (run("--config c.yaml"), 2, "must hold names and values", write("c.yaml", "- max_tests\n")),
    "config is a word": (run("--config c.yaml"), 2, "must hold names and values", write("c.yaml", "max_tests")),
    "unknown key": (
        run("--config c.yaml"),
        2,
        "unknown option 'max_test' in c.yaml: did you mean max_tests?",
        write("c.yaml", "max_test: 5"),
    ),
    "config in a config": (run("--config c.yaml"), 2, "unknown option 'config'", write("c.yaml", "config: d.yaml")),
    "wrong type in a file": (
        run("--config c.yaml"),
        2,
        "in c.yaml: draws must be a whole number, got 'many'",
        write("c.yaml", "draws: many"),
    ),
    "yes for a number": (run("--config c.yaml"), 2, "alpha must be a number or null", write("c.yaml", "alpha: yes")),
    "null in a file": (run("--config c.yaml"), 2, "draws must be a whole number", write("c.yaml", "draws: null")),
    "a mapping": (run("--config c.yaml"), 2, "judge must be text, got {'a': 1}", write("c.yaml", "judge: {a: 1}")),
    "text for yes": (run("--config c.yaml"), 2, "json must be true or false, got 1", write("c.yaml", "json: 1")),
    "out of range in a file": (run("--config c.yaml"), 2, "alpha must lie in [0.5, 1)", write("c.yaml", "alpha: 2")),
    # models
    "no such module": (run("--model nowhere:net"), 2, "No module named 'nowhere'"),
    "no factory": (run("--model mine"), 2, "--model must be module:factory, got 'mine'"),
    "no such factory": (run("--model mine:nett"), 2, "no attribute 'nett': did you mean 'net'?"),
    "a file for a module": (run("--model mine.py:net"), 2, "'mine.py:net'"),
    "module does not parse": (run("--model b:net"), 3, "importing it raised SyntaxError", write("b.py", "def net(:")),
    "module raises": (run("--model b:net"), 3, "importing it raised ZeroDivisionError", write("b.py", "1 / 0")),
    "module lacks a package": (run("--model b:net"), 2, "No module named 'absent'", write("b.py", "import absent")),
    "factory raises": (run("--model mine:raises"), 3, "raised ZeroDivisionError: no model today"),
    "factory leaves": (run("--model mine:leaves"), 3, "raised SystemExit: good bye"),
    "factory takes arguments": (run("--model mine:needs"), 3, "missing 1 required positional argument: 'width'"),
    "factory makes text": (run("--model mine:text"), 2, "Target needs an nn.Module, got str"),
    "factory makes nothing": (run("--model mine:nothing"), 2, "Target needs an nn.Module, got NoneType"),
    "a target has its own bounds": (run("--model mine:target --bounds 0,2"), 2, "--bounds must be left out"),
    "first call raises": (run("--model mine:narrow"), 3, "the model raised RuntimeError on inputs [1, 1, 4, 4]"),
    "mid-campaign call raises": (run("--model mine:worn_out"), 3, "raised ZeroDivisionError on inputs [256, 1, 4, 4]"),
    "outputs nothing": (run("--model mine:gives_none"), 3, "the model must return a tensor"),
    "outputs text": (run("--model mine:gives_text"), 3, "the model must return a tensor"),
    "outputs NaN": (run("--model mine:gives_nan"), 3, "finite outputs on clean inputs, 30 of 30 have a NaN"),
    "outputs one score": (
        run("--model mine:gives_one --oracle changed"),
        3,
        "scores [inputs, classes] with 2 classes or more",
    ),
    "outputs a mean": (run("--model mine:gives_a_mean"), 3, "the model must give one output an input"),
    "outputs too few rows": (run("--model mine:gives_fewer_rows"), 3, "the model must give one output an input"),
    # weights
    "weights missing": (run("--weights no.pt"), 3, "the weights file must exist, no.pt does not"),
    "weights in a folder": (run("--weights ."), 3, ". must be a state dict"),
    "weights of text": (run("--weights w.pt"), 3, "w.pt must be a state dict", write("w.pt", "hello\n")),
    "weights empty": (run("--weights w.pt"), 3, "w.pt must be a state dict", write("w.pt", "")),
    "weights half written": (
        run("--weights w.pt"),
        3,
        "w.pt must be a state dict",
        save("w.pt", {"a": torch.zeros(999)}, 0.5),
    ),
    "weights that run code": (
        run("--weights w.pt"),
        3,
        "w.pt must be a state dict",
        lambda: Path("w.pt").write_bytes(pickle.dumps(Harmful())),
    ),
    "weights are a tensor": (run("--weights w.pt"), 3, "must hold a state dict", save("w.pt", torch.zeros(3))),
    "weights of another net": (
        run("--weights w.pt"),
        3,
        "must fit the model, missing ['fc1.weight'",
        save("w.pt", {"conv": torch.zeros(3)}),
    ),
    "weights of other sizes": (
        run("--weights net.pt"),
        3,
        "must fit the model: ",
        weights_of_a_net(lambda value: value[:2]),
    ),
    "weights of NaN": (
        run("--weights net.pt"),
        3,
        "finite outputs on clean inputs",
        weights_of_a_net(lambda value: value * float("nan")),
    ),
    # data
    "unknown reader": (run("--data digit"), 2, "did you mean 'digits'?"),
    "no archive named": (run("--data npz"), 2, "write npz:PATH"),
    "archive missing": (run("--data npz:no.npz"), 3, "the data file must exist, no.npz does not"),
    "archive half written": (
        run("--data npz:data.npz"),
        3,
        "data.npz must be a NumPy archive",
        archive(0.5, inputs=np.zeros((99, 1, 4, 4))),
    ),
    "archive is a picture": (
        run("--data npz:data.npz"),
        3,
        "data.npz must be a NumPy archive",
        write("data.npz", PICTURE),
    ),
    "archive is empty": (run("--data npz:data.npz"), 3, "data.npz must be a NumPy archive", write("data.npz", "")),
    "archive of one array": (run("--data npz:one.npy"), 3, "named 'inputs', got one array", one_array),
    "archive of objects": (
        run("--data npz:data.npz"),
        3,
        "data.npz must be a NumPy archive",
        archive(inputs=np.array([{}, []], dtype=object)),
    ),
    "archive of text": (run("--data npz:data.npz"), 3, "data.npz", archive(inputs=np.array(["cat", "dog"]))),
    "archive without inputs": (
        run("--data npz:data.npz"),
        3,
        "must hold an array named 'inputs', got ['x']",
        archive(x=np.zeros(3)),
    ),
    "no data folder": (run("--data cifar10"), 2, "set THEMIS_DATA"),
    "pictures missing": (run("--data cifar10:nowhere"), 3, "nowhere/test_batch.webp does not"),
    "pictures of another kind": (
        run("--data cifar10:."),
        3,
        "test_batch.webp",
        write("test_batch.webp", "hello"),
    ),
    "NaN inputs": (run("--data mine:with_nan"), 3, "inputs must be finite, seed"),
    "infinite inputs": (run("--data mine:with_infinity"), 3, "inputs must be finite, seed"),
    "bytes": (run("--data mine:bytes_"), 3, "divide by 255 or pass"),
    "normalised inputs": (run("--data mine:normalised"), 3, "give raw inputs"),
    "no inputs": (run("--data mine:empty"), 3, "must hold at least one seed"),
    "flat inputs": (run("--data mine:flat"), 3, "as [seeds, ...], got shape [480]"),
    "inputs of another size": (run("--data mine:wide"), 3, "the model raised RuntimeError on inputs [1, 1, 9, 9]"),
    "labels too large": (run("--data mine:large_labels"), 3, "labels must lie in 0..2"),
    "negative labels": (run("--data mine:negative_labels"), 3, "labels must lie in 0..2"),
    "one-hot labels": (run("--data mine:one_hot"), 3, "give class numbers, not one-hot rows"),
    "labels between classes": (run("--data mine:half_labels"), 3, "labels must be class numbers, got 0.5"),
    "too few labels": (run("--data mine:few_labels"), 3, "labels must be one a seed: 30 inputs"),
    "labels all wrong": (run("--data mine:wrong_labels"), 3, "must answer some clean inputs rightly, got 0 of 30"),
    "labels of text": (run("--data mine:text_labels"), 3, "must give (input tensor, class number)"),
    "a column of text": (run("--data mine:text_column"), 3, "labels"),
    "words for inputs": (run("--data mine:words"), 3, "must give (input tensor, class number)"),
    "no labels for wrong": (run("--oracle wrong"), 3, "oracle 'wrong' needs labels, got none"),
    "ragged inputs": (run("--data mine:ragged"), 3, "all inputs must have one shape"),
    "a stream": (run("--data mine:stream"), 3, "an iterable without length"),
    "a number": (run("--data mine:number"), 3, "data must be"),
    "nothing": (run("--data mine:nothing"), 3, "data must be"),
    "data that cannot be read": (run("--data mine:torn"), 3, "item 0 raised OSError: disk gone"),
    "data that raises": (run("--data mine:raises"), 3, "raised ZeroDivisionError"),
    # the folder of the results
    "out is a file": (run("--out mine.py"), 2, "out must be a folder, mine.py is a file"),
    "out in a file": (run("--out mine.py/here"), 3, "mine.py/here cannot be written"),
    "out holds a run": (run("--out done"), 2, "done holds a run already", finished_run),
    "out in use": (run("--out done"), 3, "done must have one writer, process", write_at_the_same_time),
    "a negative number to keep": (run("--max-stored -1"), 2, "max_stored must be 0 or more, got -1"),
    # memory
    "out of memory": (run("--model mine:huge"), 3, "out of memory on cpu with 1 inputs at once"),
    # resume
    "resume nothing": (["resume"], 2, "RUN must be given"),
    "resume nowhere": (["resume", "nowhere"], 2, "a run must be a folder with run.sqlite, nowhere is none"),
    "resume a file": (["resume", "mine.py"], 2, "a run must be a folder with run.sqlite, mine.py is none"),
    "resume with another random seed": (
        ["resume", "done", "--random-seed", "1"],
        2,
        "unknown option --random-seed",
        finished_run,
    ),
    "resume to no tests": (["resume", "done", "--max-tests", "0"], 2, "max_tests must be positive", finished_run),
    "resume to many": (["resume", "done", "--max-tests", "many"], 2, "must be a whole number", finished_run),
    "resume without the module": (["resume", "done"], 2, "No module named 'mine'", then(remove_the_module)),
    "resume with another model": (
        ["resume", "done"],
        3,
        "the model must be the one that was tested",
        then(change_the_module("torch.manual_seed(0)", "torch.manual_seed(1)")),
    ),
    "resume with other data": (
        ["resume", "done"],
        3,
        "the data must be the one that was tested",
        then(change_the_module("RNG = torch.Generator().manual_seed(0)", "RNG = torch.Generator().manual_seed(1)")),
    ),
    "resume without the weights": (
        ["resume", "done"],
        3,
        "net.pt does not",
        run_with_weights,
        lambda: Path("net.pt").unlink(),
    ),
    "resume with other weights": (
        ["resume", "done", "--weights", "net.pt"],
        3,
        "the model must be the one that was tested",
        run_with_weights,
        weights_of_a_net(lambda value: value + 1),
    ),
    "resume what Python began": (["resume", "done"], 2, "it was started from Python", run_from_python),
    "resume what Python began, half": (
        ["resume", "done", "--model", "mine:net"],
        2,
        "--model and --data must both be given",
        run_from_python,
    ),
    "resume what another writes": (["resume", "done"], 3, "must have one writer, process", write_at_the_same_time),
    "resume a newer run": (["resume", "done"], 3, "it has 9: a newer Themis wrote it", then(write_the_schema(9))),
    "resume a damaged run": (["resume", "done"], 3, "run.sqlite cannot be read", then(cut("run.sqlite"))),
    "resume a damaged state": (["resume", "done"], 3, "it is damaged", then(cut("state/*"))),
    "resume an empty state": (["resume", "done"], 3, "it is damaged", then(cut("state/*", 0))),
    # faults
    "faults of nothing": (["faults"], 2, "must be given: see themis faults --help"),
    "faults of nowhere": (["faults", "nowhere"], 2, "nowhere is none: check the path"),
    "a fault that is none": (["faults", "done", "99999"], 2, "FAULT must be one that the run has", finished_run),
    "a fault in words": (["faults", "done", "first"], 2, "FAULT must be a whole number", finished_run),
    "unknown column": (["faults", "done", "--where", "anser = 3"], 2, "did you mean 'answer'", finished_run),
    "half a condition": (
        ["faults", "done", "--where", "answer ="],
        2,
        "must be chosen by an SQL condition",
        finished_run,
    ),
    "a harmful condition": (["faults", "done", "--where", "1; DROP TABLE faults"], 2, "syntax error", finished_run),
    "unknown order": (["faults", "done", "--sort", "distanc"], 2, "did you mean 'distance'", finished_run),
    "unknown stream": (["faults", "done", "--stream", "serch"], 2, "did you mean 'search'", finished_run),
    "export of an unknown kind": (["faults", "done", "--export", "a.xlsx"], 2, "known: ", finished_run),
    "export over a file": (["faults", "done", "--export", "a.csv"], 2, "exist", finished_run, write("a.csv", "mine")),
    "export to nowhere": (["faults", "done", "--export", "no/where/a.csv"], 2, "no/where does not", finished_run),
    "faults of a newer run": (["faults", "done"], 3, "a newer Themis wrote it", then(write_the_schema(9))),
    "faults of a damaged run": (["faults", "done"], 3, "run.sqlite cannot be read", then(cut("run.sqlite"))),
    "a summary cut short": (["faults", "done"], 3, "summary.json must be JSON", then(cut("summary.json"))),
    # replay
    "replay nothing": (["replay", "done"], 2, "FAULT must be given", finished_run),
    "replay what is no fault": (["replay", "done", "99999"], 2, "FAULT must be one that the run has", finished_run),
    "replay without the module": (["replay", "done", FIRST], 2, "No module named 'mine'", then(remove_the_module)),
    "replay what Python began": (["replay", "done", FIRST], 2, "it was started from Python", run_from_python),
    "replay with data of another size": (
        ["replay", "done", FIRST, "--data", "mine:wide"],
        3,
        "the model raised RuntimeError",
        finished_run,
    ),
    "replay with no data": (["replay", "done", FIRST, "--data", "mine:empty"], 3, "at least one seed", finished_run),
    "replay a damaged tensor": (["replay", "done", FIRST], 3, "it is damaged", then(cut("tensors/*"))),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delenv("THEMIS_DATA", raising=False)
    for name in ("mine", "b"):
        sys.modules.pop(name, None)
    return tmp_path


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_use_gets_one_line_and_its_exit_code(here, capsys, name):
    words, code, message, *setup = WRONG[name]
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
    assert message in said.err
    assert "Traceback" not in said.err
    assert "please report it" not in said.err
    assert said.out == ""
    assert not (here / "harm").exists()
    for writer in HELD:
        writer.close()
    HELD.clear()
    assert stored_rows() == rows, "nothing that was found is lost"


def stored_rows():
    """The faults in `done`, if they can be read at all."""
    if not Path("done/run.sqlite").exists():
        return []
    with closing(sqlite3.connect("done/run.sqlite")) as database:
        try:
            return database.execute("SELECT * FROM faults ORDER BY id").fetchall()
        except sqlite3.DatabaseError:
            return []  # damaged on purpose


def test_the_table_is_long():
    assert len(WRONG) >= 60
