"""A stopped campaign resumes as if it had not been stopped, and only with the tested model and data."""

import json
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from digit_campaign import campaign
from interruptions import StopAt, assert_same_end
from nets import Conv
from torch import nn

import themis
from themis import DataError, ModelError, Perturbation, StoreError, Target, Theta, UsageError
from themis.campaign import loop
from themis.campaign.interrupt import SIGNALS
from themis.campaign.recorder import Interrupts
from themis.runs.store.reader import Reader
from themis.runs.store.writer import Writer
from themis.search.policy import Random

pytestmark = pytest.mark.xdist_group("campaign")


class StopsInside(nn.Module):
    """Ctrl-C in the middle of a forward pass, this many passes after the campaign has started."""

    def __init__(self, net, after):
        super().__init__()
        self.net, self.after, self.passes = net, after, None

    def forward(self, x):
        if self.passes is not None:
            self.passes += 1
            if self.passes == self.after:
                raise KeyboardInterrupt
        return self.net(x)


class StartCounting(themis.Callback):
    """Lets a model count its passes from the start of the campaign, whatever the preparations cost."""

    def __init__(self, model):
        self.model = model

    def on_start(self, start):
        self.model.passes = 0


KINDS = {
    "scheduled": {"policy": "scheduled"},
    "random": {"policy": "random"},
    "corners": {"policy": "corners"},
    "paper": {"policy": "paper", "round_size": 300},
    "attack": {"policy": "scheduled", "perturbation": "fgsm", "magnitude": 0.15},
    "gibbs, relative": {"judge": "gibbs", "scale": "relative"},
    "clean activations run again": {"clean_memory_gib": 0.001},
}


@pytest.mark.parametrize("name", KINDS)
def test_an_interrupted_campaign_ends_as_if_it_had_not_been_interrupted(trained, tmp_path, name):
    options = {"max_tests": 2000, "round_size": 500, **KINDS[name]}
    whole = campaign(trained, **options)
    stopped = campaign(trained, **options, out=tmp_path / "run", callbacks=[StopAt(2)])
    assert stopped.stop_reason == "user"
    model, digits = trained
    resumed = themis.resume(tmp_path / "run", model, digits)
    assert_same_end(whole, resumed)
    stored = Reader(tmp_path / "run").faults()
    for column, values in whole.faults.columns.items():
        np.testing.assert_array_equal(values, stored.columns[column], err_msg=column)


def test_a_run_is_resumed_with_another_memory_for_clean_activations(trained, tmp_path):
    options = {"max_tests": 1500, "round_size": 500}
    whole = campaign(trained, **options)
    campaign(trained, **options, clean_memory_gib=0.0, out=tmp_path / "run", callbacks=[StopAt(1)])
    model, digits = trained
    resumed = themis.resume(tmp_path / "run", model, digits, clean_memory_gib=4.0)
    assert resumed.start.n_kept == resumed.start.n_seeds > resumed.start.chunk
    assert resumed.rounds[-1].passes == whole.rounds[-1].passes
    for column in ("id", "seed_id", "theta", "noise_seed", "answer", "margin"):
        np.testing.assert_array_equal(whole.faults.columns[column], resumed.faults.columns[column], err_msg=column)


STOPPED_INSIDE = {"magnitude": 0.5, "max_seeds": 300, "max_tests": 2000}


@pytest.fixture(scope="module")
def whole(trained):
    model, digits = trained
    return themis.run(model, digits, "gaussian", **STOPPED_INSIDE)


@pytest.mark.quick
@pytest.mark.parametrize(("after", "n_tests"), [(2, 3), (5, 32), (8, 77)])
def test_an_interrupt_within_a_round_changes_nothing(trained, whole, tmp_path, after, n_tests):
    model, digits = trained
    stopping = StopsInside(model, after)
    counting = StartCounting(stopping)
    stopped = themis.run(stopping, digits, "gaussian", **STOPPED_INSIDE, out=tmp_path / "run", callbacks=[counting])
    assert stopped.stop_reason == "user"
    assert stopped.rounds[-1].tests == n_tests
    resumed = themis.resume(tmp_path / "run", stopping, digits)
    layers = resumed.judged.by_layer
    assert resumed.coverage == whole.coverage
    assert list(layers.values()) == list(whole.judged.by_layer.values())
    assert [fault.id for fault in resumed.faults] == [fault.id for fault in whole.faults]


@pytest.mark.parametrize("after", [15, 16, 17, 18, 20, 21])
def test_tests_proposed_ahead_are_run_after_an_interrupt(trained, tmp_path, written_at_once, monkeypatch, after):
    monkeypatch.setattr(loop, "AHEAD_FROM", 600)
    model, digits = trained
    whole = themis.run(StopsInside(model, 0), digits, "gaussian", **STOPPED_INSIDE, out=tmp_path / "whole")
    stopping = StopsInside(model, after)
    counting = StartCounting(stopping)
    stopped = themis.run(stopping, digits, "gaussian", **STOPPED_INSIDE, out=tmp_path / "run", callbacks=[counting])
    assert 500 < stopped.rounds[-1].tests < 2000
    assert len(Reader(tmp_path / "run").checkpoint().values["proposals"]) > 1
    assert_same_end(whole, themis.resume(tmp_path / "run", stopping, digits))
    first, second = (Reader(tmp_path / name).checkpoint().arrays for name in ("whole", "run"))
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def test_a_campaign_that_was_ahead_continues_with_a_larger_budget(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "AHEAD_FROM", 600)
    model, digits = trained
    campaign(trained, max_tests=1280, round_size=640, out=tmp_path / "run")
    further = themis.resume(tmp_path / "run", model, digits, max_tests=2560)
    assert_same_end(campaign(trained, max_tests=2560, round_size=640), further)


@pytest.mark.parametrize(("max_tests", "n_tests"), [(1, 77), (80, 80), (300, 300)])
def test_a_round_that_was_interrupted_keeps_to_a_smaller_budget(trained, tmp_path, written_at_once, max_tests, n_tests):
    model, digits = trained
    stopping = StopsInside(model, 8)
    counting = StartCounting(stopping)
    themis.run(stopping, digits, "gaussian", **STOPPED_INSIDE, out=tmp_path / "run", callbacks=[counting])
    resumed = themis.resume(tmp_path / "run", stopping, digits, max_tests=max_tests)
    assert (resumed.stop_reason, resumed.rounds[-1].tests) == ("tests", n_tests)
    further = themis.resume(tmp_path / "run", stopping, digits, max_tests=2000)
    assert further.rounds[-1].tests == 2000


@pytest.mark.quick
def test_a_finished_campaign_continues_only_if_a_limit_is_raised(trained, tmp_path):
    model, digits = trained
    first = campaign(trained, max_tests=1280, round_size=640, out=tmp_path / "run")
    again = themis.resume(tmp_path / "run", model, digits)
    assert_same_end(first, again)
    further = themis.resume(tmp_path / "run", model, digits, max_tests=2560)
    assert_same_end(campaign(trained, max_tests=2560, round_size=640), further)
    assert json.loads((tmp_path / "run/summary.json").read_text())["tests"] == 2560
    assert "max_tests: 2560" in (tmp_path / "run/config.yaml").read_text()


class Learns(Random):
    """A later version of a policy, which keeps more state."""

    def init(self, space):
        super().init(space)
        self.state = {**self.state, "more": np.zeros(1)}


def test_resuming_rejects_a_policy_whose_state_lacks_something(trained, tmp_path):
    model, digits = trained
    campaign(trained, max_tests=640, policy=Random(), out=tmp_path / "run")
    summary = (tmp_path / "run/summary.json").read_bytes()
    with pytest.raises(StoreError, match="this run was created by another version of Themis"):
        themis.resume(tmp_path / "run", model, digits, policy=Learns(), max_tests=1280)
    assert (tmp_path / "run/summary.json").read_bytes() == summary


def test_time_and_passes_continue_to_be_counted(trained, tmp_path):
    model, digits = trained
    stopped = campaign(trained, max_tests=2560, out=tmp_path / "run", callbacks=[StopAt(1)])
    resumed = themis.resume(tmp_path / "run", model, digits)
    assert resumed.seconds.total > stopped.seconds.total
    assert resumed.rounds[-1].passes == campaign(trained, max_tests=2560).rounds[-1].passes


def test_a_perturbation_of_the_user_is_not_confused_with_one_of_the_same_name(tmp_path):
    def other(inputs, theta, rng, context):
        return inputs + theta[:, :1]

    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    own = Perturbation("gaussian", (Theta("sigma", 0.0, 0.1),), other)
    themis.run(net, data, own, max_tests=100, tolerance=1e-9, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"'gaussian' is not known by name here: pass perturbation=.*another"):
        themis.resume(tmp_path / "run", net, data, max_tests=200)
    assert themis.resume(tmp_path / "run", net, data, perturbation=own, max_tests=200).rounds[-1].tests == 200


def test_campaigns_with_objects_of_the_user_can_be_resumed(tmp_path):
    def shift(inputs, theta, rng, context):
        return inputs + theta[:, :1]

    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    own = Perturbation("shift", (Theta("by", -0.5, 0.5),), shift, is_random=False)
    options = {"policy": Random(), "max_tests": 600, "round_size": 100, "tolerance": 1e-9}
    whole = themis.run(net, data, own, **options)
    themis.run(net, data, own, **options, out=tmp_path / "run", callbacks=[StopAt(2)])
    with pytest.raises(UsageError, match=r"policy 'Random' is not one of Themis's own: pass policy="):
        themis.resume(tmp_path / "run", net, data, perturbation=own)
    with pytest.raises(UsageError, match=r"perturbation 'shift' is not known by name here: pass perturbation="):
        themis.resume(tmp_path / "run", net, data, policy=Random())
    with pytest.raises(UsageError, match="the run's perturbation is 'shift'"):
        themis.resume(tmp_path / "run", net, data, policy=Random(), perturbation=own.at(0.5))
    assert_same_end(whole, themis.resume(tmp_path / "run", net, data, policy=Random(), perturbation=own))


@pytest.mark.quick
def test_only_the_tested_model_and_data_can_be_resumed(tmp_path):
    torch.manual_seed(0)
    net, data = Conv(), torch.rand(30, 1, 8, 8)
    themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "run")
    before = sorted((path.name, path.read_bytes()) for path in (tmp_path / "run").glob("*.*") if path.is_file())
    cases = [
        ((Conv(), data), {}, ModelError, "the model must be the same as in the run, but its hash is"),
        ((net, data * 0.5), {}, DataError, "the data must be the same as in the run"),
        ((net, data), {"random_seed": 1}, UsageError, "resume cannot change 'random_seed', which changes tests"),
        ((net, data), {"max_test": 1}, UsageError, "did you mean 'max_tests'"),
        ((net, data), {"max_tests": 0}, UsageError, "max_tests must be positive"),
        ((), {}, UsageError, "does not record how to create its target, because it was started from Python"),
        ((net,), {}, UsageError, "does not record how to create its data"),
    ]
    for arguments, options, error, message in cases:
        with pytest.raises(error, match=message):
            themis.resume(tmp_path / "run", *arguments, **options)
    after = sorted((path.name, path.read_bytes()) for path in (tmp_path / "run").glob("*.*") if path.is_file())
    names = {"config.yaml", "environment.json", "summary.json"}
    assert [each for each in before if each[0] in names] == [each for each in after if each[0] in names]


def test_something_that_is_not_a_run_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"a run must be a folder with run.sqlite, .*nothing is not one"):
        themis.resume(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "run.sqlite").write_text("not a database, but long enough to be read as one" * 100)
    with pytest.raises(StoreError, match="file is not a database"):
        themis.resume(tmp_path)


def test_a_different_environment_causes_a_warning(tmp_path, monkeypatch):
    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "run")
    monkeypatch.setattr(torch, "__version__", "9.9")
    with pytest.warns(RuntimeWarning, match=r"another environment.*: torch 2\..* then, 9\.9 now"):
        themis.resume(tmp_path / "run", net, data)


def test_a_run_has_one_writer_at_a_time(tmp_path):
    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "run")
    code = f"""
import sys
from themis.runs.store.writer import Writer
held = Writer({str(tmp_path / "run")!r})
print("locked", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    with pytest.raises(StoreError, match=rf"must have one writer, but process {other.pid} writes to it: wait"):
        themis.resume(tmp_path / "run", net, data)
    with pytest.raises(StoreError, match="must have one writer"):
        themis.run(net, data, "gaussian", out=tmp_path / "run")
    assert Reader(tmp_path / "run").rounds(), "reading needs no lock"
    other.communicate("")
    assert themis.resume(tmp_path / "run", net, data).rounds[-1].tests == 100


def test_a_second_run_in_the_same_folder_is_rejected(tmp_path):
    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "run")
    with pytest.raises(UsageError, match=r"holds a run: choose another, or resume it with `themis resume .*run`"):
        themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "run")
    assert Reader(tmp_path / "run").summary()["tests"] == 100


def test_a_campaign_that_never_started_leaves_no_folder(tmp_path):
    with pytest.raises(ModelError):
        themis.run(nn.Linear(9, 3), torch.rand(30, 4), "gaussian", out=tmp_path / "a/run")
    assert not (tmp_path / "a/run").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b/notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"new or empty folder, .*b contains other files \(notes.txt\)"):
        themis.run(nn.Linear(9, 3), torch.rand(30, 4), "gaussian", out=tmp_path / "b")
    assert [each.name for each in (tmp_path / "b").iterdir()] == ["notes.txt"]
    (tmp_path / "c").mkdir()
    with pytest.raises(ModelError):
        themis.run(nn.Linear(9, 3), torch.rand(30, 4), "gaussian", out=tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == [], "only what the run created is removed"


def test_a_run_that_was_killed_before_its_first_test_can_be_started_again(tmp_path):
    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "whole")
    record = {**Reader(tmp_path / "whole").record}
    del record["start"]
    store = Writer(tmp_path / "run")
    store.create(record, 10)
    store._claim.is_begun = True  # as if the process had been killed here
    store.close()
    assert themis.resume(tmp_path / "run", net, data).rounds[-1].tests == 100


@pytest.mark.parametrize(("presses", "done"), [(1, ["begun", "ended"]), (2, ["begun"])])
def test_ctrl_c_waits_for_the_end_of_a_block_and_a_second_one_does_not(presses, done):
    did = []

    def work():
        interrupts = Interrupts()
        with interrupts.handled(), interrupts.deferred():
            did.append("begun")
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
            did.append("ended")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert did == done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", range(6))
def test_a_signal_that_arrives_while_handlers_are_set_or_restored_leaves_them_as_they_were(moment, monkeypatch):
    """Handlers of three signals are set, and restored after the block."""
    set_handler, calls, received = signal.signal, [], []

    def stop(number, frame):
        received.append(number)
        raise KeyboardInterrupt

    def set_and_send(number, handler):
        set_handler(number, handler)
        calls.append(number)
        if len(calls) == moment + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        set_handler(number, stop)
    try:
        monkeypatch.setattr(signal, "signal", set_and_send)
        interrupts = Interrupts()
        with pytest.raises(KeyboardInterrupt), interrupts.handled(), interrupts.deferred():
            pass
        assert [signal.getsignal(number) for number in SIGNALS] == [stop] * len(SIGNALS)
    finally:
        for number, handler in before.items():
            set_handler(number, handler)
    assert received == [signal.SIGTERM]


class Small(nn.Module):
    """A model on a device whose memory holds a limited number of inputs."""

    def __init__(self, most):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.most = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), most

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 GiB. GPU 0 has 16.00 GiB in all")
        return self.net(x - 0.5)


def test_out_of_memory_halves_the_chunk_and_names_the_batch_size_that_fits(tmp_path):
    data = torch.rand(100, 8, generator=torch.Generator().manual_seed(0))
    options = {"magnitude": 0.5, "max_tests": 1000, "tolerance": 1e-9, "round_size": 500}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tight = themis.run(Small(100), data, "gaussian", **options)
    assert "with 128 tests per forward pass: continuing with 64; pass batch_size=64" in str(said[-1].message)
    roomy = themis.run(Small(10**6), data, "gaussian", **options)
    assert tight.start.chunk == 64
    assert [fault.id for fault in tight.faults] == [fault.id for fault in roomy.faults] != []
    assert all(fault.replay().is_same for fault in tight.faults[:20])


def test_nothing_is_lost_if_memory_runs_out_later(tmp_path):
    class Shrinking(Small):
        """Run out of memory after some passes, as if another program had taken it."""

        def forward(self, x):
            self.passes = getattr(self, "passes", 0) + 1
            self.most = 10**6 if self.passes < 20 else 40
            return super().forward(x)

    net = Shrinking(0)
    data = torch.rand(100, 8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        options = {"magnitude": 0.5, "max_tests": 4000, "tolerance": 1e-9}
        run = themis.run(net, data, "gaussian", **options, out=tmp_path / "run", callbacks=[StopAt(2)])
        resumed = themis.resume(tmp_path / "run", net, data)
    chunks = resumed.faults.columns["chunk"]
    assert chunks.max() > 40
    assert chunks[-20:].max() == 32
    assert resumed.rounds[-1].tests == 4000
    assert len(run.faults) <= len(resumed.faults)
    assert resumed.faults[-1].replay().is_same


def test_a_model_too_large_for_one_input_is_reported():
    with pytest.raises(ModelError, match="out of memory on cpu with a batch of 1:"):
        themis.run(Target(Small(1)), torch.rand(10, 8), "gaussian")
