"""Retraining at its defaults on real digits: a gain on those that nobody has used, which costs little."""

import pytest
import torch

import themis
from themis import Target
from themis.runs.parts import read_parts
from themis_integrations.data.digits import read_digits
from themis_lab.cli.demo import split

pytestmark = pytest.mark.xdist_group("retrain_digits")

SPLIT_SEEDS = [(7,), pytest.param((8, 9), marks=pytest.mark.slow)]
"""The defaults were chosen mainly on other splits, but with results on these in view."""


@pytest.fixture(scope="module", params=SPLIT_SEEDS, ids=str)
def retrained(trained, request):
    """The digits' model retrained on splits, half of its own training data mixed in: runs with their results."""
    model, digits = trained
    clean = split(read_digits())[0][torch.arange(0, 4000, 2)]
    found = []
    for split_seed in request.param:
        how = {"magnitude": 0.8, "max_tests": 800, "split": (0.45, 0.05, 0.5), "split_seed": split_seed}
        run = themis.run(Target(model), digits, "gaussian", tolerance=1e-9, plateau=None, **how)
        measured = {"random_seeds": 1, "draws": 3, "passes": 1500}
        found.append((run, themis.retrain(run, data=digits, train=clean, **measured)))
    return found


def test_digits_that_nobody_has_used_are_read_better(retrained):
    for _, result in retrained:
        change = result.outcomes[0].change
        assert result.gain == change.disturbed.difference
        assert change.disturbed.over_seeds.low > 0
        assert not change.words.endswith("elsewhere.")
        assert change.distinct_faults.over_seeds.high < 0
        assert change.failing_seeds.over_seeds.high < 0
        assert change.held.over_seeds.low > 0
        assert change.disturbed.difference > 3 * -change.clean.difference  # what it costs is small beside it


def test_the_model_given_back_is_the_one_that_was_judged(trained, retrained):
    model, digits = trained
    (run, result), *_ = retrained
    judge = read_parts(run, digits).judge
    with torch.no_grad():
        right = (result.target.module(judge.inputs).argmax(1) == judge.labels).double().mean()
        before = (model(judge.inputs).argmax(1) == judge.labels).double().mean()
    outcome = result.outcomes[0]
    assert float(right) == pytest.approx(outcome.after[result.chosen].clean.mean())
    assert float(before) == pytest.approx(outcome.before.clean.mean())  # the one given is as it came
    own, theirs = (list(each.parameters()) for each in (model, result.target.module))
    assert any(not torch.equal(a, b) for a, b in zip(own, theirs, strict=True))
