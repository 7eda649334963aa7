"""TorchScript programs that hide what they do: none of them writes a file unless it is trusted."""

import warnings
import zipfile
from pathlib import Path

import model_files as files
import pytest
import torch
from torch import Tensor, nn

from themis.errors import DataError
from themis.target.loaders import Trust, load_model
from themis.target.loaders.script import find_doubtful

HIDDEN = {
    "two strings": 'getattr(torch, "from_" "file")("harm", True, 4)',
    "octal escapes": 'getattr(torch, "\\146rom_file")("harm", True, 4)',
    "spaces": 'torch . from_file ("harm", True, 4)',
    "the namespace of operators": 'ops.aten.from_file("harm", True, 4)',
}


def write_file(x: Tensor) -> Tensor:
    return x + torch.from_file("harm", True, 4).fill_(1.0)


class Writer:
    def __init__(self) -> None:
        self.n = 1

    def __lt__(self, other: "Writer") -> bool:
        return write_file(torch.zeros(4)).sum().item() > 0

    def write(self, x: Tensor) -> Tensor:
        return write_file(x)


class Plain(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4] + torch.from_file("harm", True, 4)


class CallsAFunction(nn.Module):
    def forward(self, x):
        return write_file(x.flatten(1)[:, :4])


class CallsAMethod(nn.Module):
    def forward(self, x):
        return Writer().write(x.flatten(1)[:, :4])


class Sorts(nn.Module):
    """The operator that sorts calls a method that is not in the graph."""

    def forward(self, x):
        writers = [Writer(), Writer()]
        writers.sort()
        return x.flatten(1)[:, :4]


class Forks(nn.Module):
    def forward(self, x):
        return torch.jit.wait(torch.jit.fork(write_file, x.flatten(1)[:, :4]))


class Branches(nn.Module):
    def forward(self, x):
        x = x.flatten(1)[:, :4]
        for k in range(3):
            if k == 2:
                x = write_file(x)
        return x


class HasASubmodule(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(CallsAFunction())

    def forward(self, x):
        return self.inner(x)


class HasAnotherMethod(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4]

    @torch.jit.export
    def other(self, x: Tensor) -> Tensor:
        return write_file(x)


class HasAProperty(nn.Module):
    @property
    def weight(self) -> Tensor:
        return write_file(torch.zeros(4))

    def forward(self, x):
        return x.flatten(1)[:, :4]


class RunsOnLoading(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :4]

    @torch.jit.export
    def __getstate__(self) -> tuple[int, bool]:
        return 0, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[int, bool]) -> None:
        self.training = state[1]
        torch.save(torch.zeros(2), "harm")


def hook(self, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return write_file(output)


def hooked():
    net = nn.Identity()
    net.register_forward_hook(hook)
    return net


def quantized():
    net = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    return torch.ao.quantization.quantize_dynamic(net, {nn.Linear})


MODELS = {
    "plainly": Plain,
    "in a function": CallsAFunction,
    "in a method of an object": CallsAMethod,
    "in the comparison of two objects": Sorts,
    "in another thread": Forks,
    "in a branch of a loop": Branches,
    "in a submodule": HasASubmodule,
    "in another method": HasAnotherMethod,
    "in a property": HasAProperty,
    "in a hook": hooked,
    "on loading": RunsOnLoading,
    "in an object of a C++ class": quantized,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def save(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(make().eval()), "net.pt")
    Path("harm").unlink(missing_ok=True)  # Python evaluates a property when it is compiled


def load(*trusted):
    return load_model("net.pt", Trust(trusted)).model


@pytest.mark.parametrize("place", MODELS)
def test_a_program_that_may_do_more_than_compute_is_refused_before_it_runs(place):
    save(MODELS[place])
    with pytest.raises(
        DataError, match=r"net\.pt must be trusted, but it is TorchScript that .*: pass --trust net\.pt"
    ):
        load()
    assert not Path("harm").exists()


@pytest.mark.parametrize("way", HIDDEN)
def test_an_operator_whose_name_is_hidden_is_found(way):
    save(Plain)
    with zipfile.ZipFile("net.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = (name for name, content in members.items() if b"torch.from_file(" in content and name.endswith(".py"))
    before = members[name].decode()
    start = before.index("torch.from_file(")
    members[name] = (before[:start] + HIDDEN[way] + before[before.index(")", start) + 1 :]).encode()
    with zipfile.ZipFile("net.pt", "w") as archive:
        for member, content in members.items():
            if not member.endswith(".debug_pkl"):
                archive.writestr(member, content)
    with pytest.raises(DataError, match=r"net\.pt must be"):
        load()
    assert not Path("harm").exists()
    if way in ("two strings", "octal escapes"):  # PyTorch itself accepts these
        load("net.pt")(torch.zeros(1, 1, 6, 6))
        assert Path("harm").exists()


def test_a_trusted_program_runs_on_loading():
    """Without this, the refusals above might refuse nothing."""
    save(RunsOnLoading)
    load("net.pt")
    assert Path("harm").exists()


class Ordinary(nn.Module):
    """Everything that models do: layers of all kinds, branches, loops, text, dictionaries and optional values."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 4, 3, padding="same"), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.1))
        self.pool, self.up = nn.AdaptiveAvgPool2d(4), nn.Upsample(scale_factor=2, mode="bilinear")
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.rnn, self.norm, self.out = nn.LSTM(16, 16, batch_first=True), nn.LayerNorm(16), nn.Linear(16, 4)
        self.heads = nn.ModuleList([nn.PReLU(), nn.Softmax(-1)])
        self.names = ["a", "b"]

    def forward(self, x, scale: float | None = None):
        x = self.pool(self.up(self.conv(x)))
        tokens = x.reshape(x.shape[0], 4, 16)
        tokens = self.norm(self.rnn(self.encoder(tokens))[0])
        result = {name: tokens.mean(1) for name in self.names}
        y = self.out(result["a"])
        for head in self.heads:
            y = head(y)
        if scale is not None and y.shape[0] > 3:
            y = torch.where(y > 0, y * scale, torch.einsum("ij,ij->ij", y, y))
        if y.dim() != 2:
            raise ValueError(f"unexpected shape {y.shape}")
        return torch.nn.functional.pad(y, [0, 0], mode="constant")


@pytest.mark.parametrize("make", [files.make_net, Ordinary])
@pytest.mark.parametrize("is_traced", [False, True])
def test_an_ordinary_program_needs_no_trust(make, is_traced):
    torch.manual_seed(0)
    net, inputs = make().eval(), files.inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.jit.trace(net, inputs[:2], check_trace=False) if is_traced else torch.jit.script(net)
        torch.jit.save(program, "net.pt")
    assert find_doubtful(load()) == []
    assert torch.allclose(load()(inputs), net(inputs), atol=1e-4)
