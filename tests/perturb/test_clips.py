"""Clips: perturbations of pictures on every frame, constant or changing over time."""

import numpy as np
import pytest
import torch
from torch import nn

import themis
from themis.data.readers import read_data
from themis.errors import UsageError
from themis.measure.distance import ssim
from themis.perturb import PERTURBATIONS, choose_perturbation, disturb, over_time, own_perturbations
from themis.perturb.perturbation import check_fits
from themis.report.page import write_report
from themis.runs.analysis.shrink import shrink
from themis.runs.display.fault import pictures, side_by_side, strip
from themis_lab.cli.demo import draw_faults

CLIPS = torch.rand(3, 5, 3, 16, 20, generator=torch.Generator().manual_seed(0))
BRIEF = 0.5 * CLIPS[:, :, :1]
PICTURES = [name for name, each in PERTURBATIONS.items() if each.inputs == "picture"]
FLICKERING = ("rain", "snow", "low_light", "channel_impulse", "snowfall")


def strongest(perturbation):
    return {theta.name: theta.high for theta in choose_perturbation(perturbation).theta}


@pytest.mark.parametrize("name", PICTURES)
def test_a_perturbation_of_pictures_disturbs_every_frame_alike(name):
    still = CLIPS[:, :1].expand(-1, 5, -1, -1, -1)
    theta = strongest(name)
    clips = disturb(name, still, theta, noise_seed=4)
    assert clips.shape == still.shape
    torch.testing.assert_close(clips[:, 0], disturb(name, still[:, 0], theta, noise_seed=4), atol=1e-6, rtol=0)
    is_same = torch.allclose(clips[:, 0], clips[:, 3], atol=1e-6)
    assert is_same == (name not in FLICKERING)


def test_noise_is_new_in_every_frame_and_replaces_whole_pixels():
    clips = disturb("impulse", CLIPS, {"share": 0.1})
    is_hit = (clips != CLIPS).all(2)
    assert torch.equal(is_hit, (clips != CLIPS).any(2))
    assert not torch.equal(is_hit[:, 0], is_hit[:, 1])


@pytest.mark.parametrize("name", ["rotate", "fog", "gaussian", "rain"])
def test_theta_goes_from_the_first_frame_to_the_last(name):
    still, chosen = CLIPS[:, :1].expand(-1, 5, -1, -1, -1), PERTURBATIONS[name]
    changing = over_time(chosen)
    assert [theta.name for theta in changing.theta][: len(chosen.theta)] == [f"{t.name}_first" for t in chosen.theta]
    first, last = ({t.name: getattr(t, end) for t in chosen.theta} for end in ("identity", "high"))
    theta = {f"{n}_first": v for n, v in first.items()} | {f"{n}_last": v for n, v in last.items()}
    clips = disturb(changing, still, theta, noise_seed=2)
    torch.testing.assert_close(clips[:, 0], still[:, 0], atol=1e-5, rtol=0)
    if not chosen.flickers:
        middle = {n: (first[n] + last[n]) / 2 for n in first}
        torch.testing.assert_close(clips[:, 2], disturb(chosen, still[:, 2], middle, noise_seed=2), atol=1e-5, rtol=0)
        torch.testing.assert_close(clips[:, 4], disturb(chosen, still[:, 4], last, noise_seed=2), atol=1e-5, rtol=0)
    change = (clips - still).abs().mean((0, 2, 3, 4))
    assert change[4] > change[1]


def test_it_is_differentiable_in_both_ends():
    theta = torch.tensor([[0.1], [0.2]], requires_grad=True)
    ends = {"shift_first": theta[0, 0], "shift_last": theta[1, 0]}
    clips = disturb("over_time(brightness)", BRIEF + 0.1, {name: value.expand(3) for name, value in ends.items()})
    (slope,) = torch.autograd.grad(clips.sum(), theta)
    frames = torch.linspace(0, 1, 5)
    pixels = BRIEF[:, 0].numel()
    torch.testing.assert_close(slope[:, 0], pixels * torch.stack([(1 - frames).sum(), frames.sum()]))


def test_specifications_are_nested_and_narrowed():
    chosen = choose_perturbation("over_time(rotate(angle=-10:10) + fog) + rain")
    assert chosen.name == "over_time(rotate(angle=-10:10)) + over_time(fog) + rain"
    assert choose_perturbation(chosen.name).theta == chosen.theta
    assert (chosen.inputs, chosen.theta[0].low) == ("clip", -10)
    assert [theta.high for theta in choose_perturbation("over_time(gaussian)", 0.5).theta] == [0.5, 0.5]
    both = choose_perturbation("over_time(rotate) + over_time(motion_blur(length=0:0.01))")
    assert [theta.name for theta in both.theta if "angle" in theta.name] == [
        *("rotate_angle_first", "rotate_angle_last"),
        *("motion_blur_angle_first", "motion_blur_angle_last"),
    ]
    with pytest.raises(UsageError, match="widen its range in the brackets of its name"):
        disturb("over_time(rotate(angle=-5:5))", CLIPS, {"angle_last": 20.0})
    assert own_perturbations("over_time(mine:BAND + fog) + your:ONE") == ["mine:BAND", "your:ONE"]


REFUSED = {
    "over_time": "must have a perturbation in brackets, got none: write over_time\\(rotate\\)",
    "over_time(fgsm)": "one picture at a time .*, got 'fgsm'",
    "over_time(edit)": "one picture at a time .*, got 'edit'",
    "over_time(rotat)": "did you mean",
    "over_time(mine:BAND)": "nothing is imported here",
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_cannot_change_over_time_is_refused(spec):
    with pytest.raises(UsageError, match=REFUSED[spec]):
        choose_perturbation(spec, imports=False)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("over_time(rotate)", (3, 16, 16), "needs clips .*got inputs \\[3, 16, 16\\]: reshape them"),
        ("rotate", (3, 16, 112, 112), "needs clips .* in another place: permute them, and .* preprocess=function"),
        ("rotate", (16, 112, 112, 3), "needs clips .* in another place: permute them, and .* --channels last"),
        ("hue", (16, 1, 112, 112), "needs pictures with 3 channels, got 1"),
        ("rotate", (2, 16, 3, 16, 16), "needs pictures .*: reshape them"),
    ],
)
def test_clips_of_another_layout_are_refused(name, shape, text):
    with pytest.raises(UsageError, match=text):
        check_fits(choose_perturbation(name), shape)


def test_a_place_in_a_clip_that_moves_is_refused():
    class Maps(nn.Module):
        def forward(self, clips):
            return torch.cat([clips[:, 0], 1 - clips[:, 0]], 1)

    target = themis.Target(Maps(), oracle="segmentation")
    with pytest.raises(UsageError, match=r"'rotate' moves what is in the pictures.*not for clips"):
        themis.run(target, BRIEF, "rotate", max_tests=10)
    assert themis.run(target, BRIEF, "over_time(gaussian)", max_tests=10).rounds


class Brightest(nn.Module):
    """The frame that is brightest."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Linear(5, 5, bias=False)
        nn.init.eye_(self.scores.weight)

    def forward(self, clips):
        return self.scores(clips.mean((2, 3, 4)))


def test_a_campaign_replays_shrinks_and_draws_its_frames(tmp_path):
    np.save(tmp_path / "clips.npy", (0.8 * CLIPS).numpy())
    target, data = themis.Target(Brightest(), oracle="changed"), read_data(f"npy:{tmp_path / 'clips.npy'}")
    options = {"max_tests": 100, "batch_size": 25, "min_ssim": 0.1, "out": tmp_path / "run"}
    run = themis.run(target, data, "over_time(brightness) + rain", **options)
    faults = run.faults.most_telling(3)
    assert len(faults) == 3
    assert all(fault.replay().is_same for fault in faults)
    assert all(0 < fault.ssim < 1 for fault in faults)
    shrunk = shrink(run, faults[:1])
    assert shrunk[0].strength <= shrunk[0].strength_before
    shown = pictures(faults[0].replay())
    assert [picture.shape for picture in shown] == [(16, 5 * 20 + 4, 3)] * 3
    assert strip(shown).shape[0] > 3 * 16
    draw_faults(run, tmp_path / "faults.png", n=2)
    assert '"kind":"clips"' in write_report(tmp_path / "run").read_text().replace(" ", "")


def test_the_first_and_the_last_frame_are_shown():
    frames = torch.arange(20.0).view(20, 1, 1, 1).expand(20, 1, 2, 2)
    shown = side_by_side(frames, -1.0)
    assert shown.shape == (1, 2, 6 * 3 - 1)
    assert shown[0, 0].tolist()[::3] == [0, 4, 8, 11, 15, 19]
    assert (shown[0, 0, 2::3] == -1).all()


def test_the_similarity_of_clips_is_the_mean_over_frames():
    disturbed = disturb("fog", CLIPS, strongest("fog"))
    by_frame = [ssim(CLIPS[:, k], disturbed[:, k], (0.0, 1.0)) for k in range(5)]
    torch.testing.assert_close(ssim(CLIPS, disturbed, (0.0, 1.0)), torch.stack(by_frame).mean(0))


def test_normalize_takes_the_channels_of_clips():
    normalize = themis.Normalize([0.1, 0.2, 0.3], [1.0, 2.0, 4.0])
    torch.testing.assert_close(normalize(CLIPS)[:, 2], normalize(CLIPS[:, 2]))
    volume = torch.rand(2, 3, 8, 8, 8)
    torch.testing.assert_close(normalize(volume)[:, :, 0], normalize(volume[:, :, 0]))
