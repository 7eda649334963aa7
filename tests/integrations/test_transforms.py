"""Transforms of albumentations and torchvision as perturbations."""

import pytest
import torch

import themis
from themis import MissingExtraError, UsageError
from themis.perturb import choose_perturbation, disturb
from themis_integrations.transforms import LIBRARIES

PICTURES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
NOISE = "albumentations:GaussNoise(std_range=(0, 0.2))"
OTHER_NOISE = "torchvision:GaussianNoise(sigma=(0, 0.2))"


def needs(package):
    """Skips a test where a package is missing or does not fit torch."""
    try:
        __import__(LIBRARIES[package].module)
    except Exception as error:  # it may raise anything
        return pytest.mark.skip(reason=f"{package}: {error}")
    return pytest.mark.filterwarnings("ignore")


def of_packages(*cases):
    """Parameters whose first is a transform, skipped where its package is missing."""
    return [pytest.param(*case, marks=needs(case[0].partition(":")[0])) for case in cases]


@pytest.mark.parametrize(
    ("spec", "theta", "moves"),
    of_packages(
        (NOISE, [("std", 0, 0.2)], False),
        ("albumentations:ImageCompression(quality_range=(5, 60))", [("quality", 5, 60)], False),
        ("albumentations:Blur(blur_limit=(3, 9))", [("blur", 3, 9)], False),
        (
            "albumentations:RandomBrightnessContrast(brightness_limit=(-0.3, 0.3), contrast_limit=(0.1, 0.3))",
            [("brightness", -0.3, 0.3), ("contrast", 0.1, 0.3)],
            False,
        ),
        ("albumentations:Rotate(limit=(-20, 20), border_mode=2)", [("limit", -20, 20)], None),
        (OTHER_NOISE, [("sigma", 0, 0.2)], False),
        ("torchvision:GaussianBlur(kernel_size=5, sigma=(0.1, 2.0))", [("sigma", 0.1, 2)], False),
        ("torchvision:ColorJitter(brightness=(0.5, 1.5))", [("brightness", 0.5, 1.5)], False),
        ("torchvision:RandomRotation(degrees=(-20, 20))", [("degrees", -20, 20)], None),
    ),
)
def test_a_test_depends_on_its_own_theta_and_noise_seed_alone(spec, theta, moves):
    perturbation = choose_perturbation(spec)
    assert [(each.name, each.low, each.high) for each in perturbation.theta] == theta
    assert perturbation.moves is moves
    strongest = {each.name: each.high for each in perturbation.theta}
    disturbed = disturb(spec, PICTURES, strongest)
    assert not torch.equal(disturbed, PICTURES)
    assert torch.equal(disturb(spec, PICTURES[2:3], strongest, noise_seed=2), disturbed[2:3])
    weakest = disturb(spec, PICTURES, {each.name: each.low for each in perturbation.theta})
    assert not torch.equal(disturbed, weakest)


@pytest.mark.parametrize(("spec", "name"), of_packages((NOISE, "std"), (OTHER_NOISE, "sigma")))
def test_theta_is_the_magnitude(spec, name):
    flat = torch.full((3, 3, 64, 64), 0.5)
    spread = disturb(spec, flat, {name: torch.tensor([0.0, 0.05, 0.1])}).flatten(1).std(1)
    assert spread == pytest.approx([0, 0.05, 0.1], rel=0.05)
    again = disturb(spec, flat, {name: 0.1}, noise_seed=7)
    assert not torch.equal(again[0], disturb(spec, flat, {name: 0.1})[0])


@pytest.mark.parametrize("spec", of_packages((NOISE,), (OTHER_NOISE,)))
def test_a_campaign_finds_faults_that_replay(tmp_path, spec):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 3))
    pictures = torch.rand(60, 3, 32, 32)
    run = themis.run(net, pictures, f"{spec} + rain", max_tests=300, out=tmp_path / "run")
    assert len(run.faults)
    stored = themis.open_run(tmp_path / "run", net, pictures)
    assert all(fault.replay().is_same for fault in stored.faults.most_telling(3))


@pytest.mark.parametrize(
    "spec", of_packages(("albumentations:Rotate(limit=(-20, 20))",), ("torchvision:RandomRotation(degrees=(-20, 20))",))
)
def test_what_moves_is_refused_where_answers_are_places(spec):
    net = torch.nn.Conv2d(3, 2, 1)
    with pytest.raises(UsageError, match="must say how it moves what is in the picture"):
        themis.run(net, PICTURES, spec, max_tests=50)


@pytest.mark.parametrize(
    ("spec", "message"),
    of_packages(
        ("albumentations:GaussNoise", "must name its arguments and give one a range"),
        ("albumentations:GaussNoise((0, 0.2))", "must name its arguments and give one a range"),
        ("albumentations:ToGray(num_output_channels=3)", "must name its arguments and give one a range"),
        ("albumentations:GausNoise(std_range=(0, 0.2))", "did you mean 'GaussNoise'"),
        ("albumentations:GaussNoise(std_range=(0, 2))", "must be a transform of pictures: .* <= 1"),
        ("albumentations:GaussNoise(standard=(0, 1))", "'standard' are not valid"),
        ("albumentations:GaussNoise(std_range=low)", "arguments must be literal values"),
        ("torchvision:GaussNoise(sigma=(0, 0.2))", "did you mean 'GaussianNoise'"),
    ),
)
def test_what_is_no_transform_with_a_magnitude_is_refused(spec, message):
    with pytest.raises(UsageError, match=message):
        choose_perturbation(spec)


def test_a_missing_package_is_named(monkeypatch):
    missing = LIBRARIES["albumentations"]._replace(module="themis_no_such_package")
    monkeypatch.setitem(LIBRARIES, "albumentations", missing)
    with pytest.raises(MissingExtraError, match=r"themis-dl\[transforms\]"):
        choose_perturbation(NOISE)
