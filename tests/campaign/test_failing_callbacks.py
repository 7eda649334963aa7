"""A failing callback neither loses a fault nor stops the campaign; Ctrl-C in a callback stops it."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

import themis
from themis import Callback, Target, UsageError
from themis.runs.store.reader import Reader

pytestmark = pytest.mark.xdist_group("failing_callbacks")

EVENTS = ("on_start", "on_round", "on_fault", "on_end")


def campaign(**rest):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    options = {"magnitude": 0.5, "max_tests": 2560, "policy": "random", "random_seed": 1, **rest}
    return themis.run(Target(net), torch.rand(50, 8), "gaussian", **options)


def failing(event, error):
    """A callback that raises in one event and counts its calls."""

    def fail(self, value):
        self.times += 1
        raise error

    return type("Bad", (Callback,), {"times": 0, event: fail})()


@pytest.fixture(scope="module")
def undisturbed():
    return campaign()


@pytest.mark.parametrize("event", EVENTS)
def test_a_failing_callback_is_reported_once_and_not_called_again(undisturbed, event):
    bad, heard = failing(event, ZeroDivisionError("oops")), []
    good = SimpleNamespace(on_fault=heard.append)
    said = f"callback Bad raised ZeroDivisionError in {event} and was dropped: oops"
    with pytest.warns(RuntimeWarning, match=said) as seen:
        run = campaign(callbacks=[bad, good])
    assert len(seen) == 1
    assert bad.times == 1
    assert list(run.faults) == list(undisturbed.faults) == heard
    assert run.summary()["coverage"] == undisturbed.summary()["coverage"]


def test_a_callback_that_fails_in_on_error_does_not_hide_the_error():
    bad = failing("on_error", ZeroDivisionError("oops"))
    net = torch.nn.Sequential(torch.nn.Linear(8, 3))

    class Shrinks(Callback):
        def on_round(self, round):
            net[0].weight.data = net[0].weight.data[:, :3]

    with (
        pytest.warns(RuntimeWarning, match="raised ZeroDivisionError in on_error"),
        pytest.raises(themis.ModelError),
    ):
        themis.run(
            net,
            torch.rand(50, 8),
            "gaussian",
            max_tests=5120,
            policy="random",
            coverage=None,
            callbacks=[bad, Shrinks()],
        )
    assert bad.times == 1


def test_warnings_that_are_errors_do_not_stop_the_campaign(undisturbed, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = campaign(callbacks=[failing("on_fault", ZeroDivisionError("oops"))])
    assert list(run.faults) == list(undisturbed.faults)
    assert "themis: callback Bad raised ZeroDivisionError in on_fault and was dropped: oops" in capsys.readouterr().err


def test_an_error_without_a_message_is_also_reported(undisturbed):
    class MuteError(Exception):
        def __str__(self):
            raise ValueError

    with pytest.warns(RuntimeWarning, match="callback Bad raised MuteError in on_round"):
        run = campaign(callbacks=[failing("on_round", MuteError())])
    assert list(run.faults) == list(undisturbed.faults)


def test_of_two_equal_callbacks_only_the_one_that_failed_is_dropped():
    class Same(Callback):
        def __init__(self, is_bad):
            self.is_bad, self.rounds = is_bad, 0

        def __eq__(self, other):
            return True

        __hash__ = None

        def on_round(self, round):
            self.rounds += 1
            if self.is_bad:
                raise ZeroDivisionError

    good, bad = Same(False), Same(True)
    with pytest.warns(RuntimeWarning, match="was dropped"):
        run = campaign(callbacks=[good, bad])
    assert (good.rounds, bad.rounds) == (len(run.rounds), 1)


@pytest.mark.parametrize("event", ["on_round", "on_fault"])
def test_ctrl_c_in_a_callback_stops_the_campaign_and_keeps_what_was_found(event, tmp_path):
    run = campaign(callbacks=[failing(event, KeyboardInterrupt())], out=tmp_path / "run", max_tests=512_000)
    assert run.stop_reason == "user"
    assert run.rounds[-1].tests < 512_000
    kept = Reader(tmp_path / "run")
    assert kept.count() == len(run.faults) > 0
    kept.close()


def test_ctrl_c_at_the_end_ends_the_callback_and_not_the_result(undisturbed):
    ended = []
    with pytest.warns(RuntimeWarning, match="callback Bad raised KeyboardInterrupt in on_end.*: Ctrl-C was pressed"):
        run = campaign(callbacks=[failing("on_end", KeyboardInterrupt()), SimpleNamespace(on_end=ended.append)])
    assert ended == [run]
    assert list(run.faults) == list(undisturbed.faults)


def test_an_exit_ends_the_process_and_the_run_can_be_resumed(undisturbed, tmp_path):
    out = tmp_path / "run"
    heard = []

    class Leave(Callback):
        def on_fault(self, fault):
            heard.append(fault.id)

        def on_round(self, round):
            sys.exit(7)

    with pytest.raises(SystemExit) as left:
        campaign(callbacks=[Leave()], out=out)
    assert left.value.code == 7
    kept = Reader(out)
    assert {id for (id,) in kept.select("id")} >= set(heard) > set()
    kept.close()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    run = themis.resume(out, Target(net), torch.rand(50, 8))
    assert [each.id for each in run.faults] == [each.id for each in undisturbed.faults]


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([print], "an object with methods such as on_round, got print: pass an instance"),
        ([Callback], "an object with methods such as on_round, got Callback: pass an instance"),
        (Callback(), r"callbacks must be a list of callbacks, got Callback: write \[callback\]"),
    ],
)
def test_what_can_never_be_called_is_refused_before_anything_runs(callbacks, message):
    with pytest.raises(UsageError, match=message):
        campaign(callbacks=callbacks)
