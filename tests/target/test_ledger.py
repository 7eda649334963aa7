"""A ledger lists what weights were trained on; modules in memory carry one, and so do their copies."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import BlackBox, DataError, Target
from themis.data.groups import seed_hashes
from themis.data.seeds import from_arrays
from themis.runs.parts import split
from themis.runs.source import Origin
from themis.runs.store.tensors import write_weights
from themis.target.ledger import Ledger, ledger_of, read_ledger, remember
from themis_lab.cli.demo import lenet5


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


def test_a_ledger_refuses_known_seeds_and_lists_them():
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


def test_a_module_in_memory_and_its_copies_share_the_ledger(tmp_path):
    net = lenet5()
    remember(net, numbers(4))
    remember(net, numbers(2))
    wrapped = nn.Sequential(nn.Identity(), copy.deepcopy(net))
    for model in (net, Target(net), wrapped, Target(wrapped), nn.DataParallel(net)):
        assert ledger_of(model).hashes.tolist() == [2, 4]
    assert Target(net).fingerprint() == Target(copy.deepcopy(net)).fingerprint()
    assert "_themis_ledger" not in net.state_dict()
    write_weights(tmp_path / "new.safetensors", net, numbers(9), {})
    assert read_ledger(tmp_path / "new.safetensors").hashes.tolist() == [2, 4, 9]
    assert ledger_of(lenet5(), tmp_path / "new.safetensors").hashes.tolist() == [2, 4, 9]
    assert len(ledger_of(BlackBox(lambda x: x))) == len(ledger_of(lenet5())) == 0


def test_a_campaign_on_seeds_that_were_trained_on_warns(trained, tmp_path):
    model, digits = trained
    few = {"magnitude": 0.3, "max_tests": 640}
    some = digits[:200]
    parts = split(some, (0.5, 0.2, 0.3))
    write_weights(tmp_path / "new.safetensors", model, Ledger.of(parts.search, parts.train), {})
    origin = Origin(model="themis_lab.cli.demo:lenet5", weights=str(tmp_path / "new.safetensors"), data="digits")
    n = len(parts.search) + len(parts.train)
    with pytest.warns(RuntimeWarning, match=f"the weights were retrained on {n} of 200 seeds"):
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
