"""On an accelerator: runs go on to the same end, faults replay, chunks shrink when memory runs out."""

import warnings
from contextlib import closing

import numpy as np
import pytest
import torch
from interruptions import StopAt

import themis
from themis import Target
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader
from themis_lab.zoo import resnet56

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    net = resnet56()
    with torch.no_grad():
        for _ in range(30):
            net.train()(torch.rand(64, 3, 32, 32))
    net.eval().cuda()
    with torch.no_grad():
        usual = net(torch.rand(256, 3, 32, 32, device="cuda")).mean(0)
    return Target(net, output=lambda scores: scores - usual)  # answers that hang on the input, and so break


@pytest.fixture(scope="module")
def data():
    return torch.rand(600, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("perturbation", "policy"), [("gaussian", "scheduled"), ("fgsm", "paper")])
def test_a_resumed_campaign_ends_like_an_uninterrupted_one(
    target, data, tmp_path, written_at_once, perturbation, policy
):
    options = {"policy": policy, "max_tests": 6000, "round_size": 1000, "tolerance": 1e-9, "magnitude": 0.2}
    whole = themis.run(target, data, perturbation, **options)
    stopped = themis.run(target, data, perturbation, **options, out=tmp_path / "run", callbacks=[StopAt(2)])
    assert stopped.rounds[-1].tests < 6000
    resumed = themis.resume(tmp_path / "run", target, data)
    assert {**whole.summary(), "seconds": 0} == {**resumed.summary(), "seconds": 0}
    assert len(whole.faults) > 20
    for name, column in whole.faults.columns.items():
        np.testing.assert_array_equal(column, resumed.faults.columns[name], err_msg=name)
    with closing(Reader(tmp_path / "run")) as run:
        replayer = Replayer(run, target, data)
        for fault in run.faults("tensors IS NOT NULL", limit=5):
            again = replayer.replay(fault)
            assert again.is_same
            assert again.changes == []
            assert again.input_gap == again.output_gap == 0


def test_the_chunk_is_halved_if_memory_runs_out(target, data):
    free, _ = torch.cuda.mem_get_info()
    too_many = int(free / 500_000)  # a test takes more than a megabyte
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = themis.run(target, data[:50], "gaussian", batch_size=too_many, max_tests=100)
    assert any("out of memory on cuda" in str(each.message) for each in said)
    assert any("continuing with" in str(each.message) for each in said)
    assert result.rounds[-1].tests == 100
    assert len(themis.run(target, data[:50], "gaussian", max_tests=100).rounds) >= 1  # without a warning
    assert torch.rand(8, device="cuda").std() > 0
