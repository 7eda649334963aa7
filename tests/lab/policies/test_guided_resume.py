"""Campaigns with a criterion that are stopped and resumed: they end as if never stopped, or are rejected."""

import signal

import numpy as np
import pytest
import torch
from guided import QUICK, SPECS, Seen, labelled

import themis
import themis.campaign.loop as judging
from themis import DataError, ModelError, Target, UsageError
from themis.criteria import choose_criterion
from themis.measure.runner import TestRunner
from themis_lab.criteria import NC
from themis_lab.criteria.view import fit_to


@pytest.fixture
def net():
    return Seen()


@pytest.fixture
def data(net):
    return labelled(net)


@pytest.fixture
def interrupted(monkeypatch):
    """Sends Ctrl-C when the calculator measures its k-th chunk, which is finished first."""

    def at(k):
        measure, left = TestRunner.measure, [k]

        def counted(self, *arguments):
            left[0] -= 1
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            return measure(self, *arguments)

        monkeypatch.setattr(TestRunner, "measure", counted)

    return at


def assert_same_end(whole, resumed):
    first, second = ({**each.summary(), "seconds": 0} for each in (whole, resumed))
    assert first == second
    assert [each.criterion_score for each in whole.rounds] == [each.criterion_score for each in resumed.rounds]
    for name, column in whole.faults.columns.items():
        np.testing.assert_array_equal(column, resumed.faults.columns[name], err_msg=name)


@pytest.mark.parametrize("spec", SPECS)
def test_a_resumed_guided_campaign_ends_as_if_it_had_not_been_stopped(net, data, spec, tmp_path, interrupted):
    whole = themis.run(net, data, "gaussian", criterion=spec, **QUICK)
    interrupted(4)
    stopped = themis.run(net, data, "gaussian", criterion=spec, out=tmp_path, **QUICK)
    assert stopped.stop_reason == "user"
    assert stopped.rounds[-1].tests < 300
    assert_same_end(whole, themis.resume(tmp_path, net, data))


@pytest.mark.parametrize("spec", SPECS)
def test_an_interrupt_while_judging_changes_nothing(net, data, spec, tmp_path, monkeypatch):
    whole = themis.run(net, data, "gaussian", criterion=spec, **QUICK)
    judge, left = judging.cover, [3]

    def counted(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return judge(*arguments, **options)

    monkeypatch.setattr(judging, "cover", counted)
    stopped = themis.run(net, data, "gaussian", criterion=spec, out=tmp_path, **QUICK)
    assert stopped.stop_reason == "user"
    assert stopped.rounds[-1].tests < 640
    assert_same_end(whole, themis.resume(tmp_path, net, data))


def test_a_criterion_built_in_python_must_be_passed_again(net, data, tmp_path, interrupted):
    interrupted(2)
    themis.run(net, data, "gaussian", criterion=NC(0.7), out=tmp_path, **QUICK)
    with pytest.raises(UsageError, match=r"<nc\(threshold=0.7\)> was created in Python: pass the same one"):
        themis.resume(tmp_path, net, data)
    with pytest.raises(UsageError, match="criterion must be the run's"):
        themis.resume(tmp_path, net, data, criterion=NC(0.6))
    resumed = themis.resume(tmp_path, net, data, criterion=NC(0.7))
    whole = themis.run(net, data, "gaussian", criterion=NC(0.7), **QUICK)
    assert resumed.rounds[-1].criterion_score == whole.rounds[-1].criterion_score


def test_resuming_rejects_a_criterion_that_learnt_from_other_data(net, data, tmp_path, interrupted):
    fitted = fit_to(choose_criterion("kmnc(k=20)"), Target(net), data)
    interrupted(2)
    themis.run(net, data, "gaussian", criterion=fitted, out=tmp_path, **QUICK)
    with pytest.raises(UsageError, match="criterion must be the same as in the run"):
        themis.resume(tmp_path, net, data, criterion=fit_to(choose_criterion("kmnc(k=20)"), Target(net), data[0] * 0.5))
    resumed = themis.resume(tmp_path, net, data, criterion=fitted)
    assert resumed.rounds[-1].criterion_score == themis.run(
        net, data, "gaussian", criterion=fitted, **QUICK
    ).rounds[-1].criterion_score  # fmt: skip


def test_resuming_rejects_other_rivals(net, data, tmp_path, interrupted):
    options = {**QUICK, "magnitude": None, "policy": "deepxplore"}
    rival = Seen()
    interrupted(2)
    themis.run(net, data, "brightness", rivals=[rival], out=tmp_path, **options)
    other = Seen()
    with torch.no_grad():
        other.last.weight += 1
    with pytest.raises(ModelError, match="rivals must be the same as in the run"):
        themis.resume(tmp_path, net, data, rivals=[other])
    resumed = themis.resume(tmp_path, net, data, rivals=[rival])
    whole = themis.run(net, data, "brightness", rivals=[rival], **options)
    assert resumed.summary()["policy"] == whole.summary()["policy"]


def test_resuming_rejects_other_training_data(net, data, tmp_path, interrupted):
    options = {**QUICK, "criterion": "nbc", "out": tmp_path, "train": (data[0] * 0.1, data[1])}
    interrupted(2)
    themis.run(net, data, "gaussian", **options)
    with pytest.raises(UsageError, match="learned from training data that cannot be read again: pass train="):
        themis.resume(tmp_path, net, data)
    with pytest.raises(DataError, match="training data must be the same as in the run"):
        themis.resume(tmp_path, net, data, train=data)
    assert themis.resume(tmp_path, net, data, train=options["train"]).rounds[-1].tests == 640
