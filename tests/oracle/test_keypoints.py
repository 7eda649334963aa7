"""Key points: distances, points that do not count, and places that move with the picture."""

import math

import numpy as np
import pytest
import torch
from moving_tests import faults
from torch import nn

import themis
from themis.errors import DataError, ModelError
from themis.oracle import KeyPoints, Motion
from themis.perturb import PERTURBATIONS, Context, perturb
from themis.report.page import read_view
from themis.retraining.grading import grade, losses, reference
from themis.runs.display.fault import pictures as pictures_of
from themis_lab.cli.demo import draw_faults

CLEAN = torch.tensor([[[10.0, 10], [20, 30], [40, 10]]])
SIZE = 48
MOVING = {name: name for name, perturbation in PERTURBATIONS.items() if perturbation.moves} | {
    "scale": "scale(factor=0.75:1.6)",  # smaller pictures show the mirror images of the spots
    "both": "rotate + shift(x=-0.1:0.1, y=-0.1:0.1)",
}


class Finder(nn.Module):
    """Perfect: the centre of the brightest spot of each channel, in pixels."""

    def forward(self, pictures):
        share = (pictures * 60).flatten(2).softmax(2).view(pictures.shape)
        at = torch.arange(SIZE, dtype=pictures.dtype, device=pictures.device) + 0.5
        return torch.stack([(share.sum(2) * at).sum(2), (share.sum(3) * at).sum(2)], 2)


class Recaller(nn.Module):
    """Answers with much the same places, whatever the picture shows."""

    def forward(self, pictures):
        return Finder()(pictures) * 0.2 + 8


def spots(n=6):
    """Pictures with a soft spot per channel in their inner part, and where it is."""
    places = SIZE * (0.33 + 0.34 * torch.rand(n, 3, 2, generator=torch.Generator().manual_seed(2)))
    at = torch.arange(SIZE) + 0.5
    x, y = places[..., 0, None, None], places[..., 1, None, None]
    return (-((at - x) ** 2 + (at[:, None] - y) ** 2) / (2 * 3.0**2)).exp(), places


def off(x=0.0, y=0.0, point=1):
    moved = CLEAN.clone()
    moved[0, point] += torch.tensor([x, y])
    return moved


def test_the_point_that_is_furthest_off_decides():
    verdict = KeyPoints(5.0).compare(CLEAN.expand(3, -1, -1), torch.cat([off(3, 4), off(3.1, 4), off(-6, 8, 2)]), None)
    assert verdict.is_fault.tolist() == [False, True, True]
    assert verdict.outcome.tolist() == [-2, 1, 2]
    assert verdict.value.tolist() == pytest.approx([5, math.hypot(3.1, 4), 10])
    assert verdict.margin.tolist() == pytest.approx([0, 5 - math.hypot(3.1, 4), -5], abs=1e-5)


def test_a_share_is_that_of_the_longer_side_of_all_points():
    verdict = KeyPoints(percent=10).compare(CLEAN.expand(2, -1, -1), torch.cat([off(2.9), off(3.1)]), None)
    assert verdict.is_fault.tolist() == [False, True]  # the points are 30 pixels apart


def test_points_that_are_not_labelled_or_that_the_model_does_not_find_do_not_count():
    labels = torch.cat([CLEAN, torch.tensor([[[2.0], [0], [1]]])], 2)
    oracle = KeyPoints(5.0)
    assert not oracle.compare(CLEAN, off(90), labels).is_fault
    assert not oracle.compare(CLEAN, off(90), torch.where(labels[..., 2:] == 0, torch.nan, CLEAN)).is_fault
    assert not oracle.compare(CLEAN, off(90), off(7)).is_fault  # it was off before
    assert oracle.compare(CLEAN, off(90), CLEAN).is_fault
    assert oracle.check(CLEAN.repeat(2, 1, 1), torch.cat([CLEAN, CLEAN + 50])).tolist() == [True, False]
    assert oracle.grade(CLEAN, off(6)) == {"error": 2}
    with_score = torch.cat([CLEAN, torch.rand(1, 3, 1)], 2)
    assert not oracle.compare(with_score, with_score.roll(0), labels).is_fault


def test_what_does_not_fit_is_refused():
    with pytest.raises(ModelError, match=r"must be \[inputs, points, 2\], .*got \[4, 6\]: pass output="):
        KeyPoints().check(torch.zeros(4, 6), None)
    with pytest.raises(ModelError, match=r"must have an extent for a tolerance of 10% .*: give the tolerance in"):
        KeyPoints().check(torch.zeros(4, 1, 2), None)
    with pytest.raises(DataError, match=r"places of 3 points per seed, \[1, 3, 2\], .*got shape \[1, 2, 2\]"):
        KeyPoints().check(CLEAN, torch.zeros(1, 2, 2))


def test_training_grades_and_loss_leave_unknown_points_out():
    labels, oracle = torch.where(torch.tensor([[[0], [1], [0]]]) == 1, torch.nan, CLEAN), KeyPoints(5.0)
    assert grade(oracle, torch.cat([off(90), off(6, 0, 2)]), labels.expand(2, -1, -1)).tolist() == [1, 0.5]
    assert losses(oracle, off(90), labels).tolist() == [0]
    assert losses(oracle, off(3, 4, 2), labels).tolist() == [3.5]
    assert reference(oracle, CLEAN, labels)[0, :, 2].tolist() == [1, 0, 1]


@pytest.mark.parametrize("is_labelled", [True, False], ids=["labels", "clean answers"])
@pytest.mark.parametrize("name", MOVING.values())
def test_a_perfect_model_never_fails_and_one_that_does_not_follow_does(name, is_labelled):
    pictures, places = spots()
    data = (pictures, places) if is_labelled else pictures
    assert not faults(Finder(), "keypoints:1.5", name, data).any()
    assert faults(Recaller(), "keypoints:1", name, pictures).any()


def test_points_that_leave_the_picture_do_not_count_and_the_extent_stays_that_of_all():
    pictures, places = spots(1)
    context = Context(motion=Motion())
    perturb(PERTURBATIONS["shift"].at(5), pictures, torch.tensor([[1.0, 0.0]]), torch.zeros(1).long(), context)
    oracle, motion = KeyPoints(percent=10), context.motion
    nothing = torch.zeros_like(places)
    assert not oracle.verdict(places, nothing, None, motion).is_fault
    assert oracle.verdict(places, nothing, None, motion).margin > 0
    labels = torch.cat([places, torch.tensor([[[2.0], [1], [0]]])], 2)
    assert oracle.move_labels(places, motion).isnan().all()
    assert (oracle.move_labels(labels, motion)[..., 2] == 0).all()
    _, moved = oracle.move(places, labels, motion)
    assert moved[0, :, 2].tolist() == [-1, -1, 0]
    reach, before = (oracle._reach(oracle.reference(places, each)) for each in (moved, labels))
    torch.testing.assert_close(reach, before)


def test_the_margin_of_a_model_that_follows_has_no_slope_in_theta():
    pictures, places = spots()
    angle = torch.linspace(-20, 20, len(pictures))[:, None].requires_grad_()
    context = Context(motion=Motion())
    outputs = 2 + Finder()(perturb(PERTURBATIONS["rotate"], pictures, angle, torch.arange(len(pictures)), context))
    oracle = KeyPoints(5.0)
    slopes = [
        torch.autograd.grad(oracle.verdict(places, outputs, None, motion).margin.sum(), angle, retain_graph=True)[0]
        for motion in (context.motion, None)
    ]
    assert slopes[0].abs().mean() < 0.3 * slopes[1].abs().mean()


def test_a_campaign_on_points_replays_and_draws_them(tmp_path):
    pictures, _ = spots()
    target = themis.Target(Recaller(), oracle="keypoints:0.5")
    options = {"max_tests": 60, "batch_size": 20, "classes": ["a", "b", "c"]}
    run = themis.run(target, pictures, "elastic", out=tmp_path / "run", **options)
    found = list(run.faults)
    assert found
    for fault in found[:3]:
        replay = fault.replay()
        assert replay.is_same
        assert replay.value == fault.value
    assert np.isfinite([fault.margin for fault in found]).all()
    assert found[0].outcome == f"{'abc'[found[0].answer]} off by {found[0].value:.3g} pixels"
    clean, disturbed = found[0].replay().boxes
    torch.testing.assert_close(disturbed[:, 2] - disturbed[:, 0], torch.ones(3))  # twice the tolerance
    assert clean[:, 5].tolist() == [0, 1, 2]
    kept = themis.open_run(tmp_path / "run").faults.by_id(found[0].id)
    drawn, stored = pictures_of(found[0].shown()), pictures_of(kept.shown())
    assert all(map(np.array_equal, drawn, stored))
    assert set(read_view(tmp_path / "run").outcomes.values()) <= {"a off", "b off", "c off"}
    draw_faults(run, tmp_path / "faults.png", n=2)
