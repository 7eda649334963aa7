"""The definition of a perturbation, and how its range is set."""

import pytest
import torch
from perturbation_cases import pictures
from torch import nn

from themis import Perturbation, Target, Theta, UsageError
from themis.errors import ModelError
from themis.measure.distance import change_of_contrast
from themis.perturb import PERTURBATIONS, Context, choose_perturbation, disturb, perturb
from themis.perturb.perturbation import column, is_same_code
from themis.report.sheet import strengthened
from themis_lab.zoo import lenet5


def setting(bounds=(0.0, 1.0), n=6):
    rng = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    target = Target(lenet5(), bounds=bounds)
    inputs = torch.rand(n, 1, 28, 28, generator=rng) * (bounds[1] - bounds[0]) + bounds[0]
    return inputs, Context(bounds, target, torch.arange(n) % 10)


def run(name, inputs, theta, context, seeds=None):
    seeds = torch.arange(len(inputs)) * 7919 if seeds is None else seeds
    return perturb(PERTURBATIONS[name], inputs, theta, seeds, context)


def test_fgsm_steps_along_the_sign_of_the_loss_gradient_and_counts_its_passes():
    inputs, context = setting()
    inputs = inputs * 0.5 + 0.25
    leaf = inputs.clone().requires_grad_()
    nn.functional.cross_entropy(context.target.module(leaf), context.reference, reduction="sum").backward()
    disturbed = run("fgsm", inputs, torch.full((6, 1), 0.02), context)
    torch.testing.assert_close(disturbed, inputs + 0.02 * leaf.grad.sign())
    assert context.passes == 3 * 6 == 6 * PERTURBATIONS["fgsm"].passes


def test_gaussian_noise_has_the_requested_standard_deviation():
    inputs, context = setting((0.0, 255.0), n=50)
    inputs = torch.full_like(inputs, 127.0)
    disturbed = run("gaussian", inputs, torch.full((50, 1), 0.05), context)
    assert abs((disturbed - inputs).std() / 255 - 0.05) < 5e-4


def test_a_new_perturbation_is_one_small_function():
    def brightness(inputs, theta, rng, context):
        return inputs + column(theta, 0, inputs)

    bright = Perturbation("brightness", (Theta("shift", -0.5, 0.5),), brightness, is_random=False)
    inputs, context = setting()
    disturbed = perturb(bright, inputs, torch.full((6, 1), 0.1), torch.zeros(6, dtype=torch.int64), context)
    torch.testing.assert_close(disturbed, (inputs + 0.1).clamp(0, 1))


def test_magnitude_scales_the_range_around_the_identity():
    both = Perturbation("p", (Theta("a", -1, 3, identity=1), Theta("b", 0, 10)), lambda *a: a[0])
    half = both.at(0.5)
    assert [(t.low, t.high, t.identity) for t in half.theta] == [(0, 2, 1), (0, 5, 0)]
    assert both.at(None) is both


def test_magnitude_is_the_upper_end_if_theta_is_the_magnitude():
    assert choose_perturbation("gaussian", 0.3).theta[0].high == 0.3


@pytest.mark.parametrize("magnitude", [0, -1, float("nan"), float("inf")])
def test_a_magnitude_that_is_not_positive_is_rejected(magnitude):
    with pytest.raises(UsageError, match="magnitude must be a positive number"):
        choose_perturbation("gaussian", magnitude)


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(UsageError, match="did you mean 'gaussian'"):
        choose_perturbation("gausian")


def test_a_perturbation_that_changes_the_shape_is_rejected():
    inputs, context = setting()
    crop = Perturbation("crop", (Theta("by", 0, 1),), lambda inputs, *rest: inputs[:, :, 1:])
    with pytest.raises(
        ModelError, match=r"'crop' must return a floating-point tensor .*, got torch\.float32 \[6, 1, 27"
    ):
        perturb(crop, inputs, torch.zeros(6, 1), torch.zeros(6, dtype=torch.int64), context)


def fails(inputs, theta, rng, context):
    return inputs @ torch.zeros(3)


def as_bytes(inputs, theta, rng, context):
    return (255 * inputs).byte()


def forgets(inputs, theta, rng, context):
    inputs.sum()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            fails,
            r"'mine' raised RuntimeError on inputs \[6, 1, 28, 28\] with theta \[6, 1\]: .*; correct its function",
        ),
        (forgets, "'mine' must return a floating-point tensor .*, got NoneType: return the disturbed inputs"),
        (
            as_bytes,
            r"'mine' must return a floating-point tensor .*, got torch\.uint8 .*, in the unit",
        ),
    ],
)
def test_an_error_in_a_perturbation_of_the_user_is_named_as_one(function, message):
    inputs, context = setting()
    mine = Perturbation("mine", (Theta("by", 0, 1),), function)
    for perturbation in (mine, PERTURBATIONS["gaussian"] + mine):
        theta = torch.zeros(6, len(perturbation.theta))
        with pytest.raises(ModelError, match=message):
            perturb(perturbation, inputs, theta, torch.zeros(6, dtype=torch.int64), context)


@pytest.mark.parametrize("bad", [(1, 0, 0.5), (0, 1, 2), (0, 0, 0), (0, float("inf"), 0)])
def test_a_theta_without_a_valid_range_is_rejected(bad):
    low, high, identity = bad
    with pytest.raises(UsageError, match="theta 't' must have"):
        Theta("t", low, high, identity)


def high(perturbation, shape):
    return choose_perturbation(perturbation).fitted(shape).theta[0].high


def test_default_ranges_reach_some_pixels_in_small_pictures():
    assert high("pixelate", (3, 224, 300)) == 0.05
    assert high("pixelate", (1, 28, 28)) * 28 == pytest.approx(3)
    assert high("pixelate", (1, 8, 8)) * 8 == pytest.approx(2), "at most a quarter of the side"
    assert high("gaussian_blur", (1, 28, 28)) * 28 == pytest.approx(1.25)
    assert high("pixelate(block=0:0.01)", (1, 8, 8)) == 0.01, "what a user asks for stays"
    assert choose_perturbation("pixelate", 0.5).fitted((1, 8, 8)).theta[0].high * 8 == pytest.approx(1)
    both = choose_perturbation("gaussian + pixelate").fitted((1, 8, 8))
    assert [theta.high for theta in both.theta] == [0.1, 0.25]
    assert [theta.high for theta in choose_perturbation("over_time(pixelate)").fitted((5, 1, 8, 8)).theta] == [0.25] * 2
    assert high("gaussian", (1, 8, 8)) == 0.1


@pytest.mark.parametrize("side", [8, 32])
def test_every_default_changes_small_pictures_visibly(side):
    for name, perturbation in PERTURBATIONS.items():
        if perturbation.inputs in ("any", "picture") and not perturbation.passes:
            inputs = pictures(shape=(3, side, side))
            theta = strengthened(perturbation.fitted((3, side, side)), 1.0)
            assert change_of_contrast(inputs, disturb(name, inputs, theta)) > 0.05, name


def test_units_name_pixels_once_the_pictures_are_known():
    shift = choose_perturbation("shift").fitted((1, 20, 30))
    assert shift.theta[0].unit == "share of the shorter side, to the right: -4 to 4 px"
    assert shift.fitted((1, 20, 30)) == shift
    assert choose_perturbation("rotate").fitted((1, 20, 30)) == PERTURBATIONS["rotate"]


def test_a_perturbation_of_themis_is_the_same_in_another_module():
    fog, own = choose_perturbation("rotate + fog").code, "mine.rain + themis.perturb.weather.fog"
    assert is_same_code(fog, fog.replace("themis.perturb.weather.", "themis.perturb.sky."))
    assert not is_same_code(fog, fog.replace("fog", "frost"))
    assert not is_same_code(own, own.replace("mine", "yours"))
