"""Weights carry a ledger of what they were trained on: in their file, in memory, and into what is made of them."""

import copy
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

import themis
from themis import BlackBox, DataError, ModelError, StoreError, Target, UsageError
from themis.data.seeds import from_arrays
from themis.target.loaders import load_weights
from themis.runs.source import Origin
from themis.runs.ledger import Ledger, ledger_of, read_about, read_ledger, remember, write_weights
from themis.runs.parts import seed_hashes, split
from themis.zoo import lenet5

ABOUT = {"made_by": "a test", "what": "LeNet-5, öfter trainiert"}


def seeds_of(n: int, random_seed: int = 0):
    return from_arrays(torch.rand(n, 1, 28, 28, generator=torch.Generator().manual_seed(random_seed)))


def numbers(*values: int) -> Ledger:
    return Ledger(np.array(values, np.uint64))


def test_a_ledger_is_a_set():
    both = numbers(5, 1, 2**64 - 1).merge(numbers(5, 7))
    assert both.hashes.tolist() == [1, 5, 7, 2**64 - 1]
    assert both.hashes.dtype == np.uint64
    assert len(numbers(3, 3, 3)) == 1
    assert len(Ledger().merge(Ledger())) == len(Ledger.of()) == 0
    seeds = seeds_of(6)
    some = Ledger.of(seeds[:2], seeds.inputs[4:])
    assert some.knows(seeds).tolist() == [True, True, False, False, True, True]
    assert Ledger.of(seeds).hashes.tolist() == sorted(seed_hashes(seeds).tolist())


def test_it_refuses_what_it_knows_and_says_which():
    seeds = seeds_of(20)
    ledger = Ledger.of(seeds[3:11])
    ledger.refuse(seeds[:3], "the judge seeds")
    rest = ledger.knows(seeds[11:])
    assert not rest.any()
    with pytest.raises(
        DataError, match=r"the judge seeds must be seeds .* 8 of 20 were \(seeds 3, 4, 5, 6, 7, \.\.\.\)"
    ):
        ledger.refuse(seeds, "the judge seeds")
    with pytest.raises(DataError, match=r"1 of 1 were \(seed 10\): take the judge part"):
        ledger.refuse(seeds[10:11], "the judge seeds")


def test_weights_come_back_with_their_ledger_and_load_as_any_others(tmp_path):
    path = tmp_path / "new.safetensors"
    net, ledger = lenet5(), Ledger.of(seeds_of(1000))
    write_weights(path, net, ledger, ABOUT)
    assert read_ledger(path).hashes.tolist() == ledger.hashes.tolist()
    about = read_about(path)
    assert {name: about[name] for name in ABOUT} == ABOUT
    assert about["themis_seeds"] == "1000"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = lenet5()
        load_weights(again, path)
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    target = Origin(model="themis.zoo:lenet5", weights=str(path)).target()
    assert target.fingerprint() == Target(net).fingerprint()


def test_the_same_weights_make_the_same_bytes_and_keep_every_type(tmp_path):
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


def test_nothing_is_known_of_weights_from_elsewhere(tmp_path):
    from safetensors.torch import save_file

    net = nn.Linear(2, 2)
    torch.save(net.state_dict(), tmp_path / "plain.pt")
    save_file(net.state_dict(), tmp_path / "plain.safetensors")
    save_file(net.state_dict(), tmp_path / "said.safetensors", {"format": "pt"})
    for name in ("plain.pt", "plain.safetensors", "said.safetensors"):
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
        lambda said: said.pop("themis_ledger"),
        lambda said: said.pop("themis_seeds"),
        lambda said: said.update(themis_seeds="0", themis_ledger="AAAA"),
        lambda said: said.update(themis_ledger=""),
        lambda said: said.update(themis_ledger=said["themis_ledger"][:16]),
        lambda said: said.update(themis_ledger="!!!"),
        lambda said: said.update(themis_seeds="many"),
        lambda said: said.update(themis_ledger="AgAAAAAAAAABAAAAAAAAAA==", themis_seeds="2"),
    ],
)
def test_a_ledger_that_was_cut_is_no_empty_one(tmp_path, edit):
    path = tmp_path / "new.safetensors"
    write_weights(path, nn.Linear(2, 2), Ledger.of(seeds_of(10)), {})
    change(path, edit)
    with pytest.raises(DataError, match="its ledger is damaged"):
        read_ledger(path)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path):
    for content in (b"", b"12345678", b"\xff" * 40, (2).to_bytes(8, "little") + b"[]" + b"0" * 9):
        (tmp_path / "bad.safetensors").write_bytes(content)
        with pytest.raises(DataError, match="must be a safetensors file"):
            read_ledger(tmp_path / "bad.safetensors")


def test_what_cannot_be_written_is_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"any": "thing"}

        def set_extra_state(self, state):
            pass

    net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"must end in \.safetensors, got new\.pt"):
        write_weights(tmp_path / "new.pt", net, Ledger(), {})
    with pytest.raises(UsageError, match=r"must be those of an nn\.Module, got BlackBox"):
        write_weights(tmp_path / "new.safetensors", BlackBox(lambda x: x), Ledger(), {})
    with pytest.raises(UsageError, match="about must leave the names of the ledger free"):
        write_weights(tmp_path / "new.safetensors", net, Ledger(), {"themis_ledger": ""})
    with pytest.raises(ModelError, match="weights must be tensors, _extra_state is a dict"):
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
        "from themis.runs.ledger import Ledger, write_weights\n"
        "os.replace = lambda *names: os.kill(os.getpid(), 9)\n"
        "write_weights(Path(sys.argv[1]), nn.Linear(2, 2), Ledger(), {})"
    )
    ended = subprocess.run([sys.executable, "-c", text, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert read_ledger(path).hashes.tolist() == [1]


def test_a_module_in_memory_remembers_and_so_do_its_copies(tmp_path):
    net = lenet5()
    remember(net, numbers(4))
    remember(net, numbers(2))
    wrapped = nn.Sequential(nn.Identity(), copy.deepcopy(net))
    for each in (net, Target(net), wrapped, Target(wrapped), nn.DataParallel(net)):
        assert ledger_of(each).hashes.tolist() == [2, 4]
    assert Target(net).fingerprint() == Target(copy.deepcopy(net)).fingerprint()
    assert "_themis_ledger" not in net.state_dict()
    write_weights(tmp_path / "new.safetensors", net, numbers(9), {})
    assert read_ledger(tmp_path / "new.safetensors").hashes.tolist() == [2, 4, 9]
    assert ledger_of(lenet5(), tmp_path / "new.safetensors").hashes.tolist() == [2, 4, 9]
    assert len(ledger_of(BlackBox(lambda x: x))) == len(ledger_of(lenet5())) == 0


def test_a_campaign_on_seeds_that_were_trained_on_says_so(trained, tmp_path):
    model, digits = trained
    few = {"magnitude": 0.3, "max_tests": 640}
    some = digits[:200]
    parts = split(some, (0.5, 0.2, 0.3))
    write_weights(tmp_path / "new.safetensors", model, Ledger.of(parts.search, parts.train), {})
    origin = Origin(model="themis.zoo:lenet5", weights=str(tmp_path / "new.safetensors"), data="digits")
    n = len(parts.search) + len(parts.train)
    with pytest.warns(RuntimeWarning, match=f"{n} of 200 seeds are ones that the weights were retrained on"):
        themis.run(origin.target(), some, "gaussian", origin=origin, **few)
    retrained = copy.deepcopy(model)
    remember(retrained, Ledger.of(parts.search))
    with pytest.warns(RuntimeWarning, match=f"{len(parts.search)} of {len(parts.search)} seeds"):
        themis.run(retrained, parts.search, "gaussian", **few)
    with pytest.warns(RuntimeWarning, match=f"{len(parts.search)} of {len(parts.search)} seeds"):
        known = themis.run(retrained, some, "gaussian", split=(0.5, 0.2, 0.3), **few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet = themis.run(origin.target(), parts.judge, "gaussian", origin=origin, **few)
    assert quiet.start.n_seeds == len(parts.judge)
    assert known.start.n_seeds == len(parts.search)
