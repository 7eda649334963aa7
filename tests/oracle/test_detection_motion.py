"""Boxes move with the picture: a perfect detector never fails, and one whose boxes stay where they were does."""

import numpy as np
import pytest
import torch
from blobs import BlobDetector, RecallingDetector, blobs

import themis
from themis.data.seeds import read_seeds
from themis.measure.calculator import Calculator, Limits
from themis.measure.sweep import sweep
from themis.measure.tests import Tests
from themis.oracle import Detection, Motion
from themis.perturb import PERTURBATIONS, Context, choose_perturbation, perturb

MOVING = [name for name, perturbation in PERTURBATIONS.items() if perturbation.moves]
STRONG = [
    "rotate(angle=-360:360)",
    "shift(x=-1:1, y=-1:1)",
    "scale(factor=0.1:10)",
    "shear(lean=-60:60, slope=-60:60)",
    "perspective(back=-45:45, aside=-45:45)",
    "rolling_shear(skew=-1:1, wobble=0:0.3)",
    "rotate + shift + gaussian(sigma=0:0.01)",
]


def faults(net, perturbation, pictures, labels=None, n=24):
    """Which of some tests, half of them in the corners of the box of theta, are faults."""
    target, seeds = themis.Target(net), read_seeds(pictures if labels is None else (pictures, labels))
    chosen = choose_perturbation(perturbation)
    low, high = (np.array([getattr(theta, end) for theta in chosen.theta], np.float32) for end in ("low", "high"))
    share = np.random.default_rng(0).random((n, len(low)), dtype=np.float32)
    share[::2] = share[::2].round()
    seed = np.arange(n) % len(pictures)
    tests = Tests(np.arange(n), seed, low + share * (high - low), np.arange(n) * 17, np.full(n, "uniform"))
    with target.opened():
        calculator = Calculator.trace(target, seeds, chosen, Detection(), Limits(1 << 30))
        sweep(calculator)
        _, outputs, motion = calculator.run_chunk(tests, n)
        verdict = calculator.clean.compare(torch.from_numpy(seed), outputs, motion)
    assert verdict.margin.isfinite().all()
    return verdict.is_fault


class BlindDetector(torch.nn.Module):
    """Finds nothing, or nothing but in pictures without a grey edge: those that were not moved."""

    def __init__(self, finds_clean):
        super().__init__()
        self.finds_clean = finds_clean

    def forward(self, pictures):
        found = [self.finds_clean and bool(picture[0, 0, 0] == 1) for picture in pictures]
        box = torch.tensor([[1.0, 1, 5, 5]])
        return [{"boxes": box[:n], "labels": torch.ones(n).long(), "scores": torch.ones(n)} for n in map(int, found)]


@pytest.mark.parametrize("finds_clean", [False, True])
def test_nothing_is_found_in_any_moved_picture(finds_clean):
    pictures = 0.5 * torch.rand(2, 1, 12, 12)
    pictures[:, :, 0, 0] = 1
    empty = None if finds_clean else torch.full((2, 1, 5), -1.0)  # without labels, nothing could be tested
    are_faults = faults(BlindDetector(finds_clean), "shift(x=0.3:0.4, y=0.3:0.4)", pictures, empty, n=4)
    assert are_faults.all() == are_faults.any() == finds_clean


@pytest.mark.parametrize("name", [*MOVING, *STRONG])
def test_a_perfect_detector_never_fails(name):
    pictures, labels = blobs(4)
    assert not faults(BlobDetector(), name, pictures, labels).any()
    if name == "rotate":
        assert not faults(BlobDetector(), name, pictures).any()


@pytest.mark.parametrize("name", ["rotate", "shift", "scale", "shear", "perspective(back=-45:45, aside=-45:45)"])
def test_a_detector_whose_boxes_stay_where_they_were_fails(name):
    pictures, labels = blobs(4)
    assert faults(RecallingDetector(pictures), name, pictures, labels).float().mean() > 0.5


def moved_labels(spec, theta, labels):
    context, chosen = Context(motion=Motion()), choose_perturbation(spec)
    perturb(chosen, torch.rand(len(labels), 3, 40, 40), torch.tensor([theta]), torch.zeros(1).long(), context)
    return Detection().move_labels(labels, context.motion)


def test_labels_move_and_what_leaves_the_picture_becomes_optional():
    labels = torch.tensor([[[4.0, 4, 14, 14, 1], [28, 0, 38, 20, 2], [0, 0, 0, 0, -1]]])
    moved = moved_labels("shift(x=-1:1, y=-1:1)", [0.2, 0.0], labels)
    assert moved[0, 0].tolist() == pytest.approx([12, 4, 22, 14, 1], abs=1e-4)
    assert moved[0, 1].tolist() == pytest.approx([36, 0, 40, 20, -4], abs=1e-4)  # a crowd of class 2
    assert moved[0, 2, 4] == -1


def test_a_moved_picture_in_which_nothing_is_found_has_lost_its_objects():
    labels, clean = torch.tensor([[[10.0, 10, 30, 30, 0]]]), torch.tensor([[[10.0, 10, 30, 30, 0.9, 0]]])
    context = Context(motion=Motion())
    perturb(
        choose_perturbation("rotate"), torch.rand(1, 3, 40, 40), torch.tensor([[5.0]]), torch.zeros(1).long(), context
    )
    nothing = torch.tensor([[[0.0, 0, 0, 0, 0, -1]]])
    verdict = Detection().verdict(clean, nothing, labels, context.motion)
    assert verdict.is_fault.tolist() == [True]


def test_the_bounds_of_a_rotated_object_may_be_those_of_a_box_or_of_an_ellipse():
    labels = torch.tensor([[[10.0, 10, 30, 30, 0]]])
    clean = torch.tensor([[[10.0, 10, 30, 30, 0.9, 0]]])
    context, chosen = Context(motion=Motion()), choose_perturbation("rotate(angle=-90:90)")
    perturb(chosen, torch.rand(1, 3, 40, 40), torch.tensor([[45.0]]), torch.zeros(1).long(), context)
    half = 10 * 2**0.5
    for side, is_fault in ((half, False), (10.0, False), (6.0, True)):
        outputs = torch.tensor([[[20 - side, 20 - side, 20 + side, 20 + side, 0.9, 0]]])
        assert Detection().verdict(clean, outputs, labels, context.motion).is_fault.item() == is_fault, side
