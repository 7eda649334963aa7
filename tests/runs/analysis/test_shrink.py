"""Shrinking: models whose smallest breaking theta is known in closed form."""

import json
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis import Perturbation, Target, Theta, UsageError
from themis.perturb.perturbation import column
from themis.progress import shown_by
from themis.runs.analysis.shrink import BISECTIONS, MAX_SWEEPS, PROBE_SHARE, shrink
from themis.runs.replay import Replayer, read_run
from themis.runs.store.reader import Reader

RANGE = 0.3
OPTIONS = {"coverage": None, "tolerance": 1e-9, "policy": "random"}
SLACK = 2.0**-BISECTIONS
"""A bisection stops so near above the boundary, as a share of the fault's own theta."""


class Mean(nn.Module):
    """Says 1 where an input's mean is over a half; `band`: where it lies in a narrow band instead."""

    def __init__(self, band=None):
        super().__init__()
        self.calls, self.band = 0, band
        self.relu = nn.ReLU()

    def forward(self, x):
        self.calls += 1
        mean = self.relu(x).flatten(1).mean(1)
        over = mean - 0.5 if self.band is None else self.band[1] - (mean - self.band[0]).abs()
        return torch.stack([-over, over], 1)


def shifted(inputs, theta, rng, context):
    """All values moved."""
    return inputs + column(theta, 0, inputs)


def three(inputs, theta, rng, context):
    """Up by one, down by half of another, and a third that does nothing."""
    return inputs + column(theta, 0, inputs) - 0.5 * column(theta, 1, inputs) + 0 * column(theta, 2, inputs)


def noisy(inputs, theta, rng, context):
    """Noise around a shift: the noise of a test stays its own."""
    return inputs + column(theta, 0, inputs) * (1 + 0.5 * rng.uniform(*inputs.shape[1:]))


SHIFT = Perturbation("shifted", (Theta("shift", -RANGE, RANGE),), shifted, is_random=False)
THREE = Perturbation(
    "three",
    (Theta("up", 0, RANGE), Theta("down", 0, 0.2), Theta("idle", 1.0, 3.0, 1.0)),
    three,
    is_random=False,
)
NOISY = Perturbation("noisy", (Theta("shift", 0, RANGE),), noisy)


def seeds(n=40):
    """Whose means lie between 0.35 and 0.45, so that a shift of 0.05 to 0.15 breaks them and nothing is clipped."""
    rng = torch.Generator().manual_seed(0)
    inputs = 0.4 + 0.04 * (torch.rand(n, 1, 6, 6, generator=rng) - 0.5)
    inputs += torch.linspace(-0.03, 0.03, n).view(-1, 1, 1, 1)
    return inputs, torch.zeros(n, dtype=torch.long)


def campaign(perturbation, net=None, n=40, tests=600, **options):
    return themis.run(Target(net or Mean()), seeds(n), perturbation, max_tests=tests, **{**OPTIONS, **options})


def needed(each):
    """The shift that brings a seed's mean to a half."""
    return 0.5 - float(seeds()[0][each.seed_id].mean())


def test_one_dimension_ends_at_the_boundary_in_closed_form():
    run = campaign(SHIFT)
    shrunk = shrink(run, most=1000)
    assert len(shrunk) == len(run.faults.most_telling(1000)) > 20
    by_id = {fault.id: fault for fault in run.faults}
    for each in shrunk:
        before, after = each.before["shift"], each.after["shift"]
        assert before == by_id[each.id].theta["shift"]
        assert needed(each) <= after + 1e-6 <= needed(each) + before * SLACK + 2e-6
        assert each.strength == pytest.approx(after / RANGE, rel=1e-5)
        assert each.weakest == each.strength
        assert each.strength_before == pytest.approx(before / RANGE, rel=1e-5)
        assert each.distance == pytest.approx(6 * after, rel=1e-4)
        assert each.linf == pytest.approx(after, rel=1e-4)
        assert each.margin < 0
        assert (each.answer, each.is_same, each.not_needed) == (1, True, ())
        assert each.passes == 2 + BISECTIONS
        assert each.sentence == f"shift {after:.4g} instead of {before:.4g} is enough"


def test_the_shrunk_test_is_a_fault_and_a_slightly_weaker_one_is_not():
    run = campaign(NOISY)
    shrunk = shrink(run)
    assert len(shrunk) == 20
    faults = {fault.id: fault for fault in run.faults}
    for each in shrunk:
        fault = faults[each.id]
        assert each.noise_seed == fault.noise_seed
        smaller = {"shift": each.after["shift"] - 2 * SLACK * each.before["shift"]}
        for theta, is_fault in ((each.after, True), (smaller, False)):
            moved = type(fault)(**{**vars(fault), "theta": theta})
            assert moved.replay().is_fault is is_fault


def test_dimensions_that_do_not_matter_go_back_to_their_identity():
    for each in shrink(campaign(THREE, tests=1200), most=100):
        assert each.not_needed == ("down", "idle")
        assert each.after["down"] == 0
        assert each.after["idle"] == 1
        assert needed(each) <= each.after["up"] + 1e-6 <= needed(each) * (1 + 2 * PROBE_SHARE)
        assert each.sentence.startswith(f"up {each.after['up']:.4g} instead of ")
        assert each.sentence.endswith(" is enough; down and idle are not needed")
        assert each.passes < 60


def test_a_dimension_that_was_at_its_identity_has_not_gone_back_there():
    run = campaign(THREE)
    fault = run.faults.most_telling(1)[0]
    fault = type(fault)(**{**vars(fault), "theta": {"up": 0.25, "down": 0.1, "idle": 1.0}})
    [each] = shrink(run, [fault])
    assert each.not_needed == ("down",)
    assert each.sentence.endswith("; down and idle are not needed")


def test_entire_dimensions_can_be_dropped_first():
    def either(inputs, theta, rng, context):
        """Two shifts that add up."""
        return inputs + column(theta, 0, inputs) + column(theta, 1, inputs)

    perturbation = Perturbation("either", (Theta("a", 0, RANGE), Theta("b", 0, RANGE)), either, is_random=False)
    run = campaign(perturbation)
    faults = [fault for fault in run.faults if fault.theta["b"] > 0.2 > 0.1 > fault.theta["a"] > 0.02]
    assert len(faults) > 5
    for weakest, simplest in zip(shrink(run, faults), shrink(run, faults, is_simplest=True), strict=True):
        assert weakest.not_needed == ()
        assert simplest.not_needed == ("a",)
        assert simplest.after["b"] == pytest.approx(needed(simplest), rel=0.01)
        assert sum(weakest.after.values()) == pytest.approx(needed(weakest), rel=0.01)
        assert weakest.weakest <= weakest.strength < simplest.strength


def test_dimensions_that_are_needed_together_each_end_at_a_boundary():
    class Both(nn.Module):
        """Says 1 where both halves of an input are over a half on average."""

        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x):
            over = torch.minimum(*(half.flatten(1).mean(1) for half in self.relu(x).chunk(2, dim=2))) - 0.5
            return torch.stack([-over, over], 1)

    def halves(inputs, theta, rng, context):
        """Each half moved on its own."""
        upper, lower = inputs.chunk(2, dim=2)
        return torch.cat([upper + column(theta, 0, inputs), lower + column(theta, 1, inputs)], 2)

    perturbation = Perturbation("halves", (Theta("a", 0, RANGE), Theta("b", 0, RANGE)), halves, is_random=False)
    shrunk = shrink(campaign(perturbation, Both()), most=100)
    assert len(shrunk) > 20
    for each in shrunk:
        for name, half in zip("ab", seeds()[0][each.seed_id].chunk(2, dim=1), strict=True):
            least = 0.5 - float(half.mean())
            assert least <= each.after[name] + 1e-6 <= least * (1 + 2 * PROBE_SHARE)
        assert each.sentence.endswith(" are enough")


def test_the_wrong_answer_may_change_and_is_reported():
    class Steps(nn.Module):
        """Says 0, 2 or 1 as the mean grows."""

        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x):
            mean = self.relu(x).flatten(1).mean(1)
            return torch.stack([0.5 - mean, mean - 0.6, 0.05 - (mean - 0.55).abs()], 1)

    shrunk = shrink(campaign(SHIFT, Steps()), most=100)
    assert {(each.answer_before, each.answer) for each in shrunk} == {(1, 2), (2, 2)}
    assert all(each.is_same is (each.answer_before == 2) for each in shrunk)


def test_a_black_box_is_shrunk_like_any_target():
    net = Mean()
    box = themis.BlackBox(lambda inputs: net(torch.as_tensor(inputs)).detach().numpy())
    run = themis.run(box, seeds(), SHIFT, max_tests=300, **OPTIONS)
    shrunk = shrink(run, most=5)
    assert len(shrunk) == 5
    assert all(each.after["shift"] == pytest.approx(needed(each), rel=0.01) for each in shrunk)


def test_shrinking_in_a_failing_band_ends_at_a_real_fault():
    net = Mean(band=(0.62, 0.02))
    shrunk = shrink(campaign(SHIFT, net, tests=3000), most=100)
    assert len(shrunk) > 20
    for each in shrunk:
        mean = float(seeds()[0][each.seed_id].mean()) + each.after["shift"]
        assert abs(mean - 0.62) < 0.02 + 1e-6
        assert each.after["shift"] <= each.before["shift"]


def test_a_theta_that_breaks_the_model_at_its_identity_needs_nothing():
    def always(inputs, theta, rng, context):
        """A shift whatever theta is."""
        return inputs + 0.3 + 0 * column(theta, 0, inputs)

    perturbation = Perturbation("always", (Theta("none", 0, 1),), always, is_random=False, has_identity=False)
    shrunk = shrink(campaign(perturbation, tests=100))
    assert len(shrunk) == 20
    for each in shrunk:
        assert (each.after["none"], each.strength, each.passes) == (0, 0, 2)
        assert each.sentence == "the identity of theta is enough: none of its dimensions is needed"


def test_an_attack_shrinks_to_its_radius_and_pays_its_own_passes():
    run = campaign("fgsm", magnitude=0.3, tests=200)
    shrunk = shrink(run, most=5)
    assert len(shrunk) == 5
    for each in shrunk:
        assert each.after["radius"] == pytest.approx(needed(each), abs=each.before["radius"] * SLACK + 1e-5)
        assert each.passes == 4 * (2 + BISECTIONS)


@pytest.mark.parametrize("perturbation", ["edit", "edit(count=0:9.7)"])
def test_counts_end_at_whole_numbers(perturbation):
    class Sum(nn.Module):
        """Says 1 from three ones on."""

        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()

        def forward(self, x):
            over = self.relu(x).sum(1) - 2.5
            return torch.stack([-over, over], 1)

    rows = torch.zeros(30, 12)
    rows[::3, 0] = 1
    features = themis.Features.of(torch.cat([rows, torch.ones(1, 12)]))
    data = rows, torch.zeros(30, dtype=torch.long)
    run = themis.run(Target(Sum()), data, perturbation, features=features, max_tests=400, **OPTIONS)
    shrunk = shrink(run, most=100)
    assert len(shrunk) > 20
    for each in shrunk:
        count = each.after["count"]
        assert count in (2, 3, 4)  # one that is 1 already may be turned off
        assert each.after["amount"] == np.float32(0.02)
        assert each.linf == 1
        assert each.distance == pytest.approx(count**0.5)
        before = int(each.before["count"] + 0.5)
        assert each.passes <= 2 + BISECTIONS + 2 + 4 + 2  # no whole number is run twice
        needed = f"count {count:.0f}" + ("" if count == before else f" instead of {before}")
        assert each.sentence == f"{needed} is enough; amount is not needed"


def test_passes_are_batched_over_faults():
    net = Mean()
    run = campaign(THREE, net, n=300, tests=3000)
    faults = run.faults.most_telling(1000)
    n_chunks = -(-len(faults) // faults[0].chunk)
    assert len(faults) > 250
    assert n_chunks > 1
    before = net.calls
    shrunk = shrink(run, faults)
    calls, tests = net.calls - before, sum(each.passes for each in shrunk)
    most_steps = 2 + BISECTIONS + 3 * (2 + BISECTIONS) * 2
    assert calls <= n_chunks * most_steps
    assert tests > 25 * calls
    assert most_steps < MAX_SWEEPS * 3 * (2 + BISECTIONS)


def test_progress_counts_every_test_and_stays_within_its_limit():
    run, steps = campaign(THREE), []

    @contextmanager
    def show(step):
        steps.append(step)
        yield

    with shown_by(show):
        shrunk = shrink(run, most=5)
    assert sum(step.n_done for step in steps) == sum(each.passes for each in shrunk)
    assert all(step.n_done <= step.n for step in steps)
    assert steps[0].describe() == "running tests: 100% of 5 tests"
    assert {"bisecting the strength", "bisecting single dimensions, sweep 1 of at most 12"} <= {s.text for s in steps}


def test_shrinking_is_reproducible_also_from_the_folder(tmp_path):
    run = campaign(THREE, out=tmp_path / "run")
    first = shrink(run)
    assert shrink(run) == first
    with pytest.raises(UsageError, match="does not record how to create its"):
        shrink(tmp_path / "run")
    reader = Reader(tmp_path / "run")
    assert shrink(read_run(Replayer(reader, Target(Mean()), seeds(), THREE))) == first
    reader.close()
    assert json.loads(json.dumps(first[0].as_dict()))["after"] == first[0].after


def test_a_fault_that_no_longer_breaks_the_model_is_left_out(tmp_path):
    campaign(SHIFT, out=tmp_path / "run")
    reader = Reader(tmp_path / "run")
    mended = Mean()
    mended.band = (5.0, 0.0)
    assert shrink(read_run(Replayer(reader, Target(mended), seeds(), SHIFT))) == []
    reader.close()


def test_images_too_dissimilar_from_their_seed_are_not_faults():
    def through_noise(inputs, theta, rng, context):
        """A shift that grows with theta, through noise that is strongest half-way."""
        share = column(theta, 0, inputs)
        return inputs + 0.2 * share + 1.5 * share * (1 - share) * (rng.uniform(*inputs.shape[1:]) - 0.5)

    rng = torch.Generator().manual_seed(1)
    inputs = 0.35 + 0.1 * torch.rand(30, 1, 8, 8, generator=rng)
    perturbation = Perturbation("through noise", (Theta("share", 0, 1),), through_noise)
    data = inputs, torch.zeros(30, dtype=torch.long)
    run = themis.run(Target(Mean()), data, perturbation, min_ssim=0.8, max_tests=600, **OPTIONS)
    faults = [fault for fault in run.faults if fault.theta["share"] > 0.9]
    shrunk = shrink(run, faults)
    assert len(shrunk) == len(faults) > 20
    assert all(each.ssim >= 0.8 and each.after["share"] > 0.7 for each in shrunk)
    calculator = run.faults.handle.calculator
    calculator.limits = replace(calculator.limits, least={})
    assert all(each.after["share"] < 0.7 for each in shrink(run, faults))


def test_wrong_uses_are_refused():
    run = campaign(SHIFT, tests=100)
    with pytest.raises(UsageError, match="most must be 1 or more, got 0"):
        shrink(run, most=0)
    with pytest.raises(UsageError, match="the faults must be of this run, got theta shift"):
        shrink(campaign(THREE, tests=100), run.faults[:1])
    assert shrink(run, []) == []
