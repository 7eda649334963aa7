"""A single campaign is a series of one: started, stopped and resumed in the same way, with the same results."""

import pytest
import torch
from interruptions import StopAt, assert_same_end
from suites import classifier, pictures

import themis
from themis import ModelError
from themis.campaign.recorder import Callbacks
from themis.campaign.series import open_series, open_stored
from themis.campaign.setup import CampaignPlan, read_tested
from themis.perturb import choose_perturbation
from themis.runs.store.writer import Writer
from themis.search import choose_policy
from themis.settings import Settings

OPTIONS = {"max_tests": 300, "round_size": 100, "coverage": None, "plateau": None}
NAMES = ["gaussian", "brightness"]


@pytest.fixture(scope="module")
def net():
    return classifier()


def plan(name):
    settings = Settings.of(**OPTIONS)
    return CampaignPlan(choose_perturbation(name, None), choose_policy(settings.policy), settings)


def series(net):
    plans = [plan(name) for name in NAMES]
    perturbations = [each.perturbation for each in plans]
    tested = read_tested(net, pictures(net), perturbations, plans[0].settings, None, None, None)
    return open_series(tested, plans[0])


def test_campaigns_of_one_series_are_those_that_are_run_alone(net):
    with series(net) as campaigns:
        runs = [campaigns.run(plan(name), None, Callbacks(())) for name in NAMES]
    for name, run in zip(NAMES, runs, strict=True):
        assert_same_end(themis.run(net, pictures(net), name, **OPTIONS), run)


def test_a_stored_campaign_is_resumed_alone_or_in_a_series(net, tmp_path):
    whole = themis.run(net, pictures(net), "gaussian", out=tmp_path / "whole", **OPTIONS)
    with series(net) as campaigns:
        for out in ("alone", "again"):
            writer = Writer(tmp_path / out)
            campaigns.run(plan("gaussian"), writer, Callbacks([StopAt(1)]))
            writer.close()
        with open_stored(tmp_path / "again") as (run, store):
            assert_same_end(whole, campaigns.resume(plan("gaussian"), run, store, Callbacks(()), signs=True))
    assert_same_end(whole, themis.resume(tmp_path / "alone", net, pictures(net)))


def test_another_model_is_refused_before_its_clean_inputs_are_run(net, tmp_path):
    themis.run(net, pictures(net), "gaussian", out=tmp_path / "run", **OPTIONS)
    themis.run_suite(net, pictures(net), NAMES, out=tmp_path / "suite", max_tests=100)
    other, n_inputs = classifier(9), []
    other.register_forward_hook(lambda module, inputs, outputs: n_inputs.append(len(outputs)))
    for resume, folder in ((themis.resume, "run"), (themis.resume_suite, "suite")):
        with pytest.raises(ModelError, match=f"the model must be the same as in the {folder}, but its hash is"):
            resume(tmp_path / folder, other, pictures(net))
    assert n_inputs == []


def test_a_suite_goes_on_with_the_threads_that_it_began_with(net, tmp_path):
    n_threads = torch.get_num_threads()
    seen = []

    class Notes(themis.Callback):
        def on_round(self, round):
            seen.append(torch.get_num_threads())

    try:
        torch.set_num_threads(1)
        themis.run_suite(net, pictures(net), NAMES, out=tmp_path, max_tests=300, callbacks=[StopAt(1)])
        torch.set_num_threads(2)
        themis.run_suite(net, pictures(net), NAMES, out=tmp_path, max_tests=300, callbacks=[Notes()])
    finally:
        torch.set_num_threads(n_threads)
    assert set(seen) == {1}
