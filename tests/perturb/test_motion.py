"""Labels that move with the picture: maps, points and boxes, for every perturbation that moves pixels."""

import math
from dataclasses import replace

import moving_tests
import pytest
import torch
from pixel_nets import PixelNet, RecallingNet, scenes

import themis
from themis.data.seeds import read_seeds
from themis.errors import UsageError
from themis.oracle import Compare, Motion
from themis.perturb import PERTURBATIONS, Context, Perturbation, Theta, choose_perturbation, perturb
from themis.perturb.picture import places, warp
from themis.perturb.signal import SIGNAL
from themis.runs.analysis.shrink import shrink
from themis_lab.comparison.cells import ErrorRates

MOVING = [name for name, perturbation in PERTURBATIONS.items() if perturbation.moves]
LARGE = {
    "rotate": "rotate(angle=-360:360)",
    "shift": "shift(x=-1:1, y=-1:1)",
    "scale": "scale(factor=0.1:10)",
    "shear": "shear(lean=-60:60, slope=-60:60)",
    "perspective": "perspective(back=-45:45, aside=-45:45)",
    "elastic": "elastic(amount=0:0.4)",
    "rolling_shear": "rolling_shear(skew=-1:1, wobble=0:0.3)",
    "jitter": "jitter(amount=0:0.2)",
}
COMPOSITES = [
    "rotate + shift",
    "elastic + gaussian(sigma=0:0.01) + scale",
    "gaussian(sigma=0:0.01) + elastic",
    "perspective + rotate + fog(density=0:0.01)",
    "shift(x=0.1) + rolling_shear",
]


def followed(perturbation, inputs, seed=0, magnitude=1):
    """Disturbed inputs, their theta, and how they have moved."""
    chosen = choose_perturbation(perturbation, magnitude)
    low, high = (torch.tensor([getattr(theta, end) for theta in chosen.theta]) for end in ("low", "high"))
    draw = torch.Generator().manual_seed(seed)
    theta = low + torch.rand(len(inputs), len(low), generator=draw) * (high - low)
    context = Context(motion=Motion())
    disturbed = perturb(chosen, inputs, theta, torch.arange(len(inputs)) * 31 + 7, context)
    return disturbed, theta, context.motion


def faults(net, perturbation, pictures, labels=None):
    data = pictures if labels is None else (pictures, labels)
    return moving_tests.faults(net, "segmentation:0.001", perturbation, data)


def test_every_perturbation_says_whether_it_moves_what_is_in_the_picture():
    assert set(MOVING) == set(LARGE)
    unknown = {name for name, perturbation in PERTURBATIONS.items() if perturbation.moves is None}
    assert unknown == {perturbation.name for perturbation in SIGNAL}  # these are not for pictures


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize("size", [(24, 32), (120, 61)])
def test_the_source_is_where_the_picture_is_sampled(name, size):
    pictures = torch.rand(3, 2, *size, generator=torch.Generator().manual_seed(0))
    disturbed, _, motion = followed(name, pictures)
    (step,) = motion.steps
    x, y = (axis.expand(3, 1, *size) for axis in places(pictures))
    torch.testing.assert_close(warp(pictures, *step.trace_back(x, y)), disturbed, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", [*MOVING, "rotate + shift"])
def test_maps_move_as_a_loop_over_pixels_moves_them(name):
    pictures, labels = scenes(2, (9, 11))
    _, _, motion = followed(name, pictures)
    expected = labels
    for step in motion.steps:
        expected = torch.stack(
            [
                looped(replace(step, theta=step.theta[k : k + 1], noise_seed=step.noise_seed[k : k + 1]), label)
                for k, label in enumerate(expected)
            ]
        )
    moved = motion.maps(labels, -1)
    assert torch.equal(moved, expected)
    assert (moved == -1).any()
    assert (moved >= 0).any()


def looped(step, labels):
    height, width = labels.shape
    unit, moved = min(height, width), torch.full_like(labels, -1)
    for row in range(height):
        for column in range(width):
            at = torch.tensor([[(column - (width - 1) / 2) / unit]]), torch.tensor([[(row - (height - 1) / 2) / unit]])
            x, y = (float(position) for position in step.trace_back(*at))
            x, y = x * unit + (width - 1) / 2, y * unit + (height - 1) / 2
            if not (-0.5 <= x <= width - 0.5 and -0.5 <= y <= height - 0.5):
                continue
            seen = set()
            for j in {math.floor(y), math.ceil(y)}:
                for i in {math.floor(x), math.ceil(x)}:
                    if abs(x - i) < 1 - 1 / 512 and abs(y - j) < 1 - 1 / 512:
                        seen.add(int(labels[min(max(j, 0), height - 1), min(max(i, 0), width - 1)]))
            if len(seen) == 1:
                moved[row, column] = seen.pop()
    return moved


@pytest.mark.parametrize("is_labelled", [True, False], ids=["labels", "clean answers"])
@pytest.mark.parametrize("name", [*MOVING, *LARGE.values(), *COMPOSITES])
def test_a_perfect_model_never_fails(name, is_labelled):
    pictures, labels = scenes()
    assert not faults(PixelNet(), name, pictures, labels if is_labelled else None).any()


@pytest.mark.parametrize("is_labelled", [True, False], ids=["labels", "clean answers"])
@pytest.mark.parametrize("name", [*MOVING, "rotate + shift"])
def test_a_model_whose_answer_stays_where_it_was_fails(name, is_labelled):
    pictures, labels = scenes()
    strong = LARGE[name] if name in ("elastic", "rolling_shear") else name
    is_fault = faults(RecallingNet(pictures), strong, pictures, labels if is_labelled else None)
    assert is_fault.float().mean() > 0.5


def test_a_model_that_is_wrong_in_the_same_way_wherever_it_looks_does_not_fail():
    pictures, labels = scenes()
    wrong = torch.where((labels == 1) & (torch.rand(labels.shape) < 0.3), 2, labels)
    assert not faults(PixelNet(), "rotate", pictures, wrong).any()


def test_maps_smaller_than_the_picture_move_like_it():
    pictures, labels = scenes(4, (32, 32))
    small = labels[:, ::2, ::2]
    _, _, motion = followed("rotate", pictures, magnitude=0.5)
    moved, whole = motion.maps(small, -1), motion.maps(labels, -1)[:, ::2, ::2]
    counts = (moved >= 0) & (whole >= 0)
    assert counts.float().mean() > 0.4
    assert (moved == whole)[counts].float().mean() > 0.97


def test_nothing_moves_at_the_identity_and_by_whole_pixels_labels_move_whole():
    pictures, labels = scenes(2, (20, 20))
    context, chosen = Context(motion=Motion()), PERTURBATIONS["shift"]
    for right, expected in ((0.0, labels), (0.2, labels.roll(4, 2))):
        perturb(chosen, pictures, torch.tensor([[right, 0.0]]).repeat(2, 1), torch.arange(2), context)
        moved = context.motion.maps(labels, 9)
        assert torch.equal(moved[:, :, 4:], expected[:, :, 4:])
        assert (moved[:, :, :4] == 9).all() == bool(right)


@pytest.mark.parametrize("name", [*MOVING, *COMPOSITES])
def test_points_move_to_where_their_content_is_seen(name):
    pictures, _ = scenes(5, (48, 40))
    theta_before = followed(name, pictures)[2]
    points = 4 + torch.rand(5, 9, 2, dtype=torch.float64) * torch.tensor([32.0, 40.0])
    moved = theta_before.points(points)
    back = moved
    for step in reversed(theta_before.steps):
        x, y = step.trace_back((back[..., 0] - 20) / 40, (back[..., 1] - 24) / 40)
        back = torch.stack([x * 40 + 20, y * 40 + 24], -1)
    gap = (back - points).norm(dim=-1)
    assert (gap < 1e-6).float().mean() > (0.8 if "elastic" in name else 0.999)  # a sheet may fold
    assert not torch.allclose(moved, points, atol=0.1)


def test_points_have_the_slope_of_their_motion():
    angle = torch.tensor([[20.0]], dtype=torch.float64, requires_grad=True)
    context = Context(motion=Motion())
    perturb(PERTURBATIONS["rotate"], torch.rand(1, 1, 10, 10), angle, torch.zeros(1).long(), context)
    point = torch.tensor([[[9.0, 5.0]]], dtype=torch.float64)
    moved = context.motion.points(point)
    turn = math.radians(20)
    torch.testing.assert_close(
        moved[0, 0].detach(), torch.tensor([5 + 4 * math.cos(turn), 5 - 4 * math.sin(turn)], dtype=torch.float64)
    )
    (slope,) = torch.autograd.grad(moved[0, 0, 1], angle)
    assert float(slope) == pytest.approx(-4 * math.cos(turn) * math.pi / 180)


def test_boxes_are_bounded_clipped_and_say_what_is_left():
    context, pictures = Context(motion=Motion()), torch.rand(1, 1, 20, 40)
    boxes = torch.tensor([[[10.0, 5, 20, 10], [30, 0, 38, 8]]])
    perturb(PERTURBATIONS["shift"].at(3), pictures, torch.tensor([[0.3, -0.1]]), torch.zeros(1).long(), context)
    moved, share = context.motion.boxes(boxes)
    torch.testing.assert_close(moved, torch.tensor([[[16.0, 3, 26, 8], [36, 0, 40, 6]]]))
    torch.testing.assert_close(share, torch.tensor([[1.0, 24 / 64]]))
    perturb(PERTURBATIONS["shift"].at(9), pictures, torch.tensor([[1.8, 0.0]]), torch.zeros(1).long(), context)
    moved, share = context.motion.boxes(boxes)
    assert share.tolist() == [[0, 0]]
    assert (moved[..., 0] == moved[..., 2]).all()
    perturb(PERTURBATIONS["rotate"], pictures, torch.tensor([[30.0]]), torch.zeros(1).long(), context)
    square = torch.tensor([[[18.0, 8, 22, 12]]])
    grown = 2 * (math.cos(math.pi / 6) + math.sin(math.pi / 6))
    torch.testing.assert_close(
        context.motion.boxes(square)[0], torch.tensor([[[20 - grown, 10 - grown, 20 + grown, 10 + grown]]])
    )
    torch.testing.assert_close(context.motion.boxes(square, "ellipse")[0], square, atol=0.02, rtol=0)
    still = Motion()
    assert still.boxes(boxes)[0] is boxes
    assert still.points(boxes) is boxes
    assert not still


def test_tests_are_followed_the_same_in_parts_and_whole(monkeypatch):
    pictures, labels = scenes(5)
    whole = followed("gaussian + elastic", pictures)[2]
    monkeypatch.setattr("themis.perturb.perturbation.CPU_BLOCK_VALUES", 2 * pictures[0].numel())
    parts = followed("gaussian + elastic", pictures)[2]
    assert torch.equal(whole.maps(labels, -1), parts.maps(labels, -1))
    assert torch.equal(whole[2:4].maps(labels[2:4], -1), whole.maps(labels, -1)[2:4])


def own(moves=None):
    return Perturbation(
        "mirrored",
        (Theta("share", 0, 1),),
        lambda inputs, theta, rng, context: inputs.flip(3),
        is_random=False,
        moves=moves,
    )


def test_a_perturbation_of_the_users_own_says_how_it_moves_labels():
    pictures, labels = scenes()
    assert not faults(PixelNet(), own(lambda x, y, theta, rng, size: (-x, y)), pictures, labels).any()
    assert faults(PixelNet(), own(False), pictures, labels).all()
    for refused in (own(), own() + PERTURBATIONS["gaussian"]):
        with pytest.raises(UsageError, match=r"'mirrored' must say how it moves what is in the picture.*moves=False"):
            faults(PixelNet(), refused, pictures, labels)
    classes = themis.Target(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(pictures[0].numel(), 3)))
    assert themis.run(classes, pictures, own(), max_tests=20).rounds


@pytest.mark.parametrize("name", ["rotate + fgsm(RADIUS)", "fgsm(RADIUS) + rotate", "rotate + pgd(RADIUS)"])
def test_an_attack_after_a_motion_aims_at_the_moved_answer(name):
    pictures, labels = scenes()
    net = PixelNet()
    assert not faults(net, name.replace("RADIUS", "radius=0:0.000001"), pictures, labels).any()
    assert faults(net, name.replace("RADIUS", "radius=0.3:0.4"), pictures, labels).float().mean() > 0.9


def test_the_error_rate_of_a_comparison_is_that_of_the_moved_frame():
    pictures, labels = scenes()
    target = themis.Target(PixelNet(), oracle="segmentation")
    with target.opened():
        rates = ErrorRates(target, read_seeds((pictures, labels)), PERTURBATIONS["rotate"], 0)
        assert rates.rate(1.0) == 0


def test_a_comparison_of_the_users_own_says_how_answers_move():
    def differs(clean_outputs, outputs, labels):
        return ((clean_outputs.argmax(1) != outputs.argmax(1)) & (labels >= 0)).flatten(1).any(1)

    def moved(clean_outputs, labels, motion):
        answer, labels = motion.maps(torch.stack([clean_outputs.argmax(1), labels], 1), -1).unbind(1)
        return torch.nn.functional.one_hot(answer.clamp(min=0), 3).movedim(-1, 1), labels

    data = scenes()
    assert not moving_tests.faults(PixelNet(), Compare(differs, move_function=moved), "rotate", data).any()
    assert moving_tests.faults(PixelNet(), Compare(differs), "rotate", data).all()
    with pytest.raises(UsageError, match="'mirrored' must say how it moves"):
        moving_tests.faults(PixelNet(), Compare(differs, move_function=moved), own(), data)
    with pytest.raises(UsageError, match=r"must return clean outputs and labels, got NoneType"):
        moving_tests.faults(PixelNet(), Compare(differs, move_function=lambda *_: None), "rotate", data)


def test_a_campaign_stores_replays_and_shrinks_faults_of_the_moved_frame(tmp_path):
    pictures, labels = scenes()
    target = themis.Target(RecallingNet(pictures), oracle="segmentation:0.05")
    options = {"max_tests": 80, "batch_size": 20, "min_ssim": 0.2, "out": tmp_path / "run"}
    run = themis.run(target, (pictures, labels), "elastic + rotate", **options)
    faults = run.faults.most_telling(4)
    assert len(faults) == 4
    for fault in faults:
        replay = fault.replay()
        assert replay.is_same
        assert (replay.is_fault, replay.value) == (True, fault.value)
    shrunk = shrink(run, faults[:2])
    assert [each.id for each in shrunk] == [fault.id for fault in faults[:2]]
    assert all(each.strength <= each.strength_before for each in shrunk)
