"""Weights are written together with the ledger of what they were trained on, and both are read back."""

import json
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from themis import DataError, ModelError, StoreError, Target
from themis.data.seeds import from_arrays
from themis.runs.source import Origin
from themis.runs.store.tensors import write_weights
from themis.target.ledger import Ledger, read_ledger, read_metadata
from themis.target.loaders import load_weights
from themis_lab.zoo import lenet5

ABOUT = {"made_by": "a test", "what": "LeNet-5, öfter trainiert"}


def seeds_of(n: int, random_seed: int = 0):
    return from_arrays(torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(random_seed)))


def numbers(*values: int) -> Ledger:
    return Ledger(np.array(values, np.uint64))


def test_weights_are_read_back_with_their_ledger_and_load_like_any_others(tmp_path):
    path = tmp_path / "new.safetensors"
    net, ledger = lenet5(), Ledger.of(seeds_of(1000))
    write_weights(path, net, ledger, ABOUT)
    assert read_ledger(path).hashes.tolist() == ledger.hashes.tolist()
    about = read_metadata(path)
    assert {name: about[name] for name in ABOUT} == ABOUT
    assert about["themis_seeds"] == "1000"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = lenet5()
        load_weights(again, path)
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    target = Origin(model="themis_lab.zoo:lenet5", weights=str(path)).target()
    assert target.fingerprint() == Target(net).fingerprint()


def test_the_same_weights_give_the_same_bytes_and_keep_their_types(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.second = nn.Linear(3, 3)
            self.second.weight = self.first.weight  # shared
            self.norm = nn.BatchNorm1d(3)  # a whole number among its buffers
            self.register_buffer("ones", torch.ones(2, 3, dtype=torch.bfloat16).T)

    net = Odd()
    for name in ("a", "b", "c"):
        write_weights(tmp_path / f"{name}.safetensors", net, numbers(1, 2), ABOUT)
    contents = {(tmp_path / f"{name}.safetensors").read_bytes() for name in ("a", "b", "c")}
    assert len(contents) == 1
    again = Odd()
    load_weights(again, tmp_path / "a.safetensors")
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert value.dtype == again.state_dict()[name].dtype
    assert [each.name for each in tmp_path.glob("*.part")] == []


def test_weights_from_elsewhere_have_an_empty_ledger(tmp_path):
    from safetensors.torch import save_file

    net = nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "plain.pt")
    save_file(net.state_dict(), tmp_path / "plain.safetensors")
    save_file(net.state_dict(), tmp_path / "labelled.safetensors", {"format": "pt"})
    for name in ("plain.pt", "plain.safetensors", "labelled.safetensors"):
        assert len(read_ledger(tmp_path / name)) == 0
    with pytest.raises(DataError, match="the weights file must exist"):
        read_ledger(tmp_path / "none.safetensors")


def change(path, edit):
    """Write a file of weights again with its metadata edited."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    edit(header["__metadata__"])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


@pytest.mark.parametrize(
    "edit",
    [
        lambda metadata: metadata.pop("themis_ledger"),
        lambda metadata: metadata.pop("themis_seeds"),
        lambda metadata: metadata.update(themis_seeds="0", themis_ledger="AAAA"),
        lambda metadata: metadata.update(themis_ledger=""),
        lambda metadata: metadata.update(themis_ledger=metadata["themis_ledger"][:16]),
        lambda metadata: metadata.update(themis_ledger="!!!"),
        lambda metadata: metadata.update(themis_seeds="many"),
        lambda metadata: metadata.update(themis_ledger="AgAAAAAAAAABAAAAAAAAAA==", themis_seeds="2"),
    ],
)
def test_a_damaged_ledger_is_not_taken_for_an_empty_one(tmp_path, edit):
    path = tmp_path / "new.safetensors"
    write_weights(path, nn.Linear(2, 2), Ledger.of(seeds_of(10)), {})
    change(path, edit)
    with pytest.raises(DataError, match="its ledger is damaged"):
        read_ledger(path)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path):
    for content in (b"", b"12345678", b"\xff" * 40, (2).to_bytes(8, "little") + b"[]" + b"0" * 9):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(DataError, match="must be a safetensors file"):
            read_ledger(tmp_path / "bad.safetensors")


def test_weights_that_cannot_be_written_are_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"any": "thing"}

        def set_extra_state(self, state):
            pass

    net = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="weights must be tensors, but _extra_state is a dict"):
        write_weights(tmp_path / "new.safetensors", Extra(2, 2), Ledger(), {})
    with pytest.raises(StoreError, match="cannot be written"):
        write_weights(tmp_path / "none" / "new.safetensors", net, Ledger(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="a kill")
def test_a_writer_that_is_killed_leaves_the_old_weights(tmp_path):
    path = tmp_path / "new.safetensors"
    write_weights(path, nn.Linear(2, 2), numbers(1), {})
    before = path.read_bytes()
    text = (
        "import os, sys; from pathlib import Path; import numpy as np; from torch import nn\n"
        "from themis.runs.store.tensors import write_weights; from themis.target.ledger import Ledger\n"
        "os.replace = lambda *names: os.kill(os.getpid(), 9)\n"
        "write_weights(Path(sys.argv[1]), nn.Linear(2, 2), Ledger(), {})"
    )
    ended = subprocess.run([sys.executable, "-c", text, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert read_ledger(path).hashes.tolist() == [1]
