"""JPEG, compared with a real encoder, and its transform with the formula."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image

from themis.perturb import PERTURBATIONS
from themis.perturb import camera as module
from themis.perturb.camera import jpeg
from themis.perturb.context import Context
from themis.perturb.perturbation import perturb


def scene(height, width, channels=3):
    """Gradients, an edge and some texture, in whole steps of 1/255."""
    draw = torch.Generator().manual_seed(2)
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    waves = [0.5 + 0.3 * torch.sin(5 * x * (k + 1) + 3 * y) for k in range(channels)]
    picture = torch.stack(waves) + 0.2 * (x + y > 1) + 0.03 * torch.randn(channels, height, width, generator=draw)
    return (picture.clamp(0, 1) * 255).round()[None] / 255


def stored(picture, quality):
    """The picture after a real JPEG encoder and decoder."""
    array = (picture[0] * 255).round().byte().permute(1, 2, 0).numpy()
    image = Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    back = torch.from_numpy(np.array(Image.open(file))).float() / 255
    return (back.permute(2, 0, 1) if back.ndim == 3 else back[None])[None]


def ours(picture, quality):
    return jpeg(picture, torch.tensor([[float(quality)]]), None, Context()).clamp(0, 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", [(64, 64), (45, 70)])
@pytest.mark.parametrize("quality", [5, 10, 30, 50, 75, 90, 100])
def test_it_is_close_to_a_real_encoder(quality, shape, channels):
    picture = scene(*shape, channels)
    real, mine = stored(picture, quality), ours(picture, quality)
    lost = (real - picture).abs().mean()
    assert (mine - real).abs().mean() < 0.4 * lost + 0.5 / 255
    assert (mine - picture).abs().mean() == pytest.approx(float(lost), rel=0.25, abs=0.2 / 255)


@pytest.mark.parametrize("quality", [10, 25, 50])  # where the steps of the encoder are integers
def test_with_plain_rounding_it_agrees_with_a_real_encoder_to_about_one_level(quality, monkeypatch):
    monkeypatch.setattr(module, "_rounded", torch.round)
    picture = scene(64, 64)
    assert (ours(picture, quality) - stored(picture, quality)).abs().mean() < 1.2 / 255


def test_the_transform_is_the_cosine_transform_and_can_be_inverted():
    points = torch.rand(8, 50, dtype=torch.float64)
    cosines = torch.tensor([[math.cos((2 * j + 1) * k * math.pi / 16) for j in range(8)] for k in range(8)])
    cosines = cosines.double()
    waves = torch.stack(module._dct(points.unbind(0)))
    torch.testing.assert_close(waves, cosines @ points, atol=1e-6, rtol=0)
    level = torch.tensor(module.COSINE_FACTORS, dtype=torch.float64)[:, None] ** 2
    torch.testing.assert_close(torch.stack(module._inverse_dct((level * waves).unbind(0))), points)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [(3, 24, 20), (1, 8, 8), (3, 5, 40), (3, 96, 96)], ids=str)
def test_a_picture_is_compressed_the_same_in_any_batch(shape, n):
    pictures = torch.rand(64, *shape, generator=torch.Generator().manual_seed(4))
    quality = torch.linspace(5, 100, 64)[:, None]
    whole = jpeg(pictures, quality, None, Context())
    assert torch.equal(jpeg(pictures[-n:], quality[-n:], None, Context()), whole[-n:])


def test_more_quality_loses_less():
    picture = scene(48, 48, 1)
    lost = [float((ours(picture, quality) - picture).abs().mean()) for quality in (5, 20, 40, 60, 80, 100)]
    assert lost == sorted(lost, reverse=True)
    assert lost[-1] < 0.5 / 255


def test_any_number_of_channels_is_stored_as_luma():
    picture = scene(16, 16, 4)
    together = ours(picture, 30)
    for k in range(4):
        assert torch.equal(together[:, k : k + 1], ours(picture[:, k : k + 1], 30))


def test_the_steps_follow_the_encoders_formula_and_have_no_kink_at_50():
    def slope(quality):
        value = torch.tensor([[quality]], dtype=torch.float64, requires_grad=True)
        total = jpeg(scene(16, 16, 1).double(), value, None, Context()).square().sum()
        return torch.autograd.grad(total, value)[0]

    assert slope(50.0).abs() > 1e-6
    torch.testing.assert_close(slope(50 - 1e-6), slope(50 + 1e-6), atol=0, rtol=1e-3)
    for quality, scale in ((10.0, 5.0), (25.0, 2.0), (50.0, 1.0), (75.0, 0.5)):
        steps = module._quantization_steps(module.LUMA_STEPS, torch.tensor(scale).view(1, 1, 1, 1)) * 255
        percent = 5000 / quality if quality < 50 else 200 - 2 * quality
        assert float(steps[0, 0]) == pytest.approx(min(max(16 * percent / 100, 1), 255))
        assert float(steps[1, 0]) == pytest.approx(min(max(11 * percent / 100, 1), 255)), "second across, first down"


def test_every_memory_layout_gives_the_same_result():
    pictures = torch.rand(3, 3, 17, 30)
    theta, seeds = torch.full((3, 1), 40.0), torch.arange(3)
    plain = perturb(PERTURBATIONS["jpeg"], pictures, theta, seeds, Context())
    turned = perturb(PERTURBATIONS["jpeg"], pictures.to(memory_format=torch.channels_last), theta, seeds, Context())
    torch.testing.assert_close(turned, plain, atol=1e-5, rtol=0)
