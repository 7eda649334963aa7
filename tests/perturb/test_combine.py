"""Specifications of perturbations: combined, narrowed, and the user's own."""

import sys

import pytest
import torch
from torch import nn

from themis import ModelError, Perturbation, Target, Theta, UsageError
from themis.perturb import PERTURBATIONS, Context, choose_perturbation, disturb, perturb
from themis.perturb.perturbation import check_fits, column

PICTURES = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.2
SEEDS = torch.arange(4)


def shift(inputs, theta, rng, context):
    """Adds a constant."""
    return inputs + column(theta, 0, inputs)


def scale(inputs, theta, rng, context):
    """Multiplies, and adds noise."""
    return inputs * column(theta, 0, inputs) + rng.normal(*inputs.shape[1:]) * column(theta, 1, inputs)


SHIFT = Perturbation("shift_it", (Theta("by", -0.1, 0.1),), shift, is_random=False)
SCALE = Perturbation("scale_it", (Theta("by", 0.5, 1.5, identity=1), Theta("noise", 0, 0.1)), scale)


def names(perturbation):
    return [each.name for each in perturbation.theta]


def test_a_sum_applies_its_parts_in_order():
    both = SHIFT + SCALE
    assert both.name == "shift_it + scale_it"
    assert names(both) == ["shift_it_by", "scale_it_by", "noise"]
    theta = torch.tensor([[0.05, 0.9, 0.02]]).repeat(4, 1)
    first = perturb(SHIFT, PICTURES, theta[:, :1], SEEDS, Context())
    expected = perturb(SCALE, first, theta[:, 1:], SEEDS, Context())
    assert torch.equal(perturb(both, PICTURES, theta, SEEDS, Context()), expected)


def test_a_sum_of_a_sum_is_the_sum_of_all():
    three = SHIFT + SCALE + SHIFT
    assert names(three) == ["shift_it_by", "scale_it_by", "noise", "shift_it_2_by"]
    assert three.is_random
    assert three.at(0.5).theta[0].high == 0.05


@pytest.mark.parametrize("name", ["fog + rotate", "gaussian + contrast", "brightness + fog + elastic"])
def test_parts_disturb_pictures_alike_whatever_the_bounds_are(name):
    both, pictures = choose_perturbation(name), torch.rand(2, 3, 16, 16)
    theta = {each.name: each.high for each in both.theta}
    in_bytes = disturb(both, pictures * 255, theta, bounds=(0.0, 255.0)) / 255
    torch.testing.assert_close(in_bytes, disturb(both, pictures, theta), atol=1e-5, rtol=0)


def test_each_part_sees_inputs_inside_the_bounds():
    seen = []

    def look(inputs, theta, rng, context):
        seen.append(inputs)
        return inputs

    high = (Perturbation("up", (Theta("by", 0, 9),), shift) + Perturbation("look", (Theta("at", 0, 1),), look)).at(None)
    perturb(high, PICTURES, torch.tensor([[5.0, 0.0]]).repeat(4, 1), SEEDS, Context())
    assert float(seen[0].max()) == 1.0


def test_a_specification_combines_and_narrows_parts():
    both = choose_perturbation("gaussian(sigma=0:0.02) + salt_and_pepper")
    assert both.name == "gaussian(sigma=0:0.02) + salt_and_pepper"
    assert both.theta[0].high == 0.02
    assert choose_perturbation(both.name).theta == both.theta, "the name is enough to make it again"


def test_aliases_are_recorded_by_the_full_name():
    both = choose_perturbation("rain + blur")
    assert both.name == "rain + gaussian_blur"
    assert choose_perturbation("cw_l2").name == "cw"


def test_a_theta_can_be_held_fixed():
    held = choose_perturbation("rain(angle=10, length=0.1)")
    whole = choose_perturbation("rain")
    free = [each for each in names(whole) if each not in ("angle", "length")]
    assert names(held) == free
    values = {name: next(t for t in whole.theta if t.name == name).high for name in free}
    fixed = disturb(held, PICTURES, values)
    assert torch.equal(fixed, disturb(whole, PICTURES, {**values, "angle": 10.0, "length": 0.1}))


def test_an_own_perturbation_is_named_by_its_location(tmp_path, monkeypatch):
    (tmp_path / "mine_to_test.py").write_text(
        "import themis\n"
        "def darker(inputs, theta, rng, context):\n"
        "    return inputs * (1 - themis.perturb.columns(theta, inputs)[0])\n"
        "DARKER = themis.Perturbation('darker', (themis.Theta('by', 0, 0.5),), darker, is_random=False)\n"
        "NOTHING = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own = choose_perturbation("mine_to_test:DARKER(by=0:0.3) + gaussian")
    assert own.name == "mine_to_test:DARKER(by=0:0.3) + gaussian"
    assert names(own) == ["by", "sigma"]
    with pytest.raises(UsageError, match=r"must be a themis\.Perturbation, got int"):
        choose_perturbation("mine_to_test:NOTHING")
    with pytest.raises(UsageError, match="did you mean 'DARKER'"):
        choose_perturbation("mine_to_test:DARKR")
    sys.modules.pop("mine_to_test")


def test_a_sum_keeps_the_settings_of_its_parts(tmp_path, monkeypatch):
    (tmp_path / "mine_in_sums.py").write_text(
        "from themis.perturb import PERTURBATIONS as P\nBOTH = P['rain'] + P['fog']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = "mine_in_sums:BOTH(length=0.2, rain_density=0:0.01) + jpeg"
    both = choose_perturbation(words)
    assert both.name == words
    assert both.theta[0].high == 0.01
    assert "length" not in names(both)
    tenth = (PERTURBATIONS["rain"] + PERTURBATIONS["fog"]).at(0.1) + PERTURBATIONS["jpeg"]
    assert tenth.theta[0].high == pytest.approx(0.1)
    sys.modules.pop("mine_in_sums")


def test_a_name_is_parsed_to_the_same_numbers():
    third = choose_perturbation(f"rain(angle={-10 / 3}:{10 / 3}, length={0.1 + 0.2})")
    again = choose_perturbation(third.name)
    assert again.theta == third.theta
    assert again.name == third.name


def test_inputs_must_not_be_changed_in_place():
    wrong = Perturbation("wrong", (Theta("by", 0, 1),), lambda inputs, *rest: inputs.add_(0.1))
    with pytest.raises(ModelError, match="must not change its inputs in place"):
        disturb(wrong, PICTURES.clone(), {"by": 0.5})


@pytest.mark.parametrize("attack", ["fgsm", "pgd", "pgd_l2", "apgd", "cw"])
def test_perturbations_before_an_attack_have_a_slope_too(attack):
    torch.manual_seed(0)
    target = Target(nn.Sequential(nn.Flatten(), nn.Linear(768, 3)))
    theta = torch.tensor([[0.05, 0.01]]).repeat(4, 1).requires_grad_()
    reference = target.forward(PICTURES).argmax(1)

    def margin(outputs):
        return outputs.gather(1, reference[:, None])[:, 0] - outputs.scatter(1, reference[:, None], -9.0).amax(1)

    context = Context(target=target, reference=reference, margin=margin)
    both = PERTURBATIONS["brightness"] + PERTURBATIONS[attack]
    (slope,) = torch.autograd.grad(perturb(both, PICTURES, theta, SEEDS, context).sum(), theta)
    assert bool((slope[:, 0] > 100).all()), "every pixel is brighter"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("rian", "did you mean 'rain'"),
        ("rain + fogg", "did you mean 'fog'"),
        ("rain(angel=1:2)", "did you mean 'angle'"),
        ("rain(density=0:99)", "theta 'density' must lie in"),
        ("rain(density=99)", "theta 'density' must lie in"),
        ("rain(density=0.5:0.1)", "must be NAME=LOW:HIGH"),
        ("rain(density=nan)", "must be NAME=LOW:HIGH"),
        ("rain(density=0:1:2)", "must be NAME=LOW:HIGH"),
        ("rain(density=0.1:0.1)", "high, low < high, got"),
        ("rain(density)", "must be NAME=LOW:HIGH"),
        ("rain(density=a:b)", "must be NAME=LOW:HIGH"),
        ("rain(", "must be names joined by"),
        ("", "must be"),
        ("rain +", "must be"),
        ("gaussian(sigma=0.1)", "must keep a theta to search, but .*: give one a range, such as sigma=0:0.1$"),
        ("edit + rain", "must disturb one kind of input"),
        ("nowhere:THING", "No module named 'nowhere'"),
    ],
)
def test_invalid_specifications_are_rejected(words, text):
    with pytest.raises(UsageError, match=text):
        choose_perturbation(words)


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("rain", (215,), "'rain' needs pictures .* got inputs .215.: reshape them, or choose another"),
        ("rain", (32, 32, 3), "channels in another place: permute them"),
        ("rain", (3, 3, 4, 32, 32), "reshape them"),
        ("hue", (1, 32, 32), "needs pictures with 3 channels, got 1"),
        ("edit", (3, 32, 32), "needs rows of a table"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected(name, shape, text):
    with pytest.raises(UsageError, match=text):
        check_fits(choose_perturbation(name), shape)


def test_inputs_can_be_disturbed_without_a_campaign():
    rainy = disturb(choose_perturbation("rain"), PICTURES, {"density": 0.3}, noise_seed=5)
    assert rainy.shape == PICTURES.shape
    assert not torch.equal(rainy, PICTURES)
    each = disturb(choose_perturbation("brightness"), PICTURES, {"shift": torch.tensor([0.0, 0.1, 0.2, 0.0])})
    change = (each - PICTURES).flatten(1).mean(1)
    torch.testing.assert_close(change, torch.tensor([0.0, 0.1, 0.2, 0.0]), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    ("theta", "text"),
    [
        ({"density": 7.0}, "must lie in .* got 7: widen its range in the brackets"),
        ({"densty": 0.1}, "did you mean"),
    ],
)
def test_theta_outside_its_range_is_rejected(theta, text):
    with pytest.raises(UsageError, match=text):
        disturb(choose_perturbation("rain"), PICTURES, theta)


def test_inputs_and_theta_of_the_wrong_kind_are_rejected():
    with pytest.raises(UsageError, match="inputs must be floating-point numbers"):
        disturb("gaussian", (PICTURES * 255).byte(), {"sigma": 0.1})
    with pytest.raises(UsageError, match="one for each of 4"):
        disturb("gaussian", PICTURES, {"sigma": torch.zeros(3)})


def test_theta_may_lie_at_the_very_end_of_its_range():
    shaken = disturb("motion_blur(angle=-70.3:70.3)", PICTURES, {"angle": 70.3, "length": 0.05})
    assert shaken.shape == PICTURES.shape


def test_an_attack_without_a_model_is_rejected():
    with pytest.raises(UsageError, match="an attack needs the model it attacks"):
        disturb(choose_perturbation("fgsm"), PICTURES, {"radius": 0.01})


def test_a_magnitude_that_exceeds_the_limits_is_rejected():
    with pytest.raises(UsageError, match=r"theta 'quality' must lie in 1\.\.100, got .*: lower the magnitude"):
        choose_perturbation("jpeg", 5)
