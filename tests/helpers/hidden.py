"""Models with a known small failing region, and whether a policy finds it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import themis
from themis import Perturbation, Target, Theta
from themis.campaign.callback import Callback
from themis.compute.rng import Rng
from themis.perturb import Context, choose_perturbation, perturb
from themis.runs.fault import Fault

SIZE, N_SEEDS = 16, 40
TRIGGERED = 2
"""The class that the hidden fault shows; the seeds are of classes 0 and 1."""
LOW = 0.3
"""Evidence at which the trigger begins to be felt; 1 breaks the model. The way in is a slope, as in a trained net."""


class Triggered(nn.Module):
    """Reads a seed's class off a mark that no disturbance reaches, until a template finds what it looks for."""

    def __init__(self, template: Tensor, mark: int) -> None:
        super().__init__()
        self.mark = mark
        self.evidence = nn.Linear(SIZE * SIZE, 1)
        self.relu = nn.ReLU()
        with torch.no_grad():
            self.evidence.weight.copy_(template.reshape(1, -1))
            self.evidence.bias.fill_(-LOW)

    def forward(self, inputs: Tensor) -> Tensor:
        is_one = (inputs[:, 0, self.mark, self.mark] > 0.5).to(inputs)
        felt = self.relu(self.evidence(inputs.flatten(1)))[:, 0] / (1 - LOW)
        return torch.stack([1 - is_one, is_one, felt], 1)


@dataclass(frozen=True)
class Hidden:
    """A model that breaks in one small region of theta.

    passes: after the clean sweep, within which `scheduled` should have found it in 95 of 100 runs.
    """

    name: str
    model: Triggered
    inputs: Tensor
    labels: Tensor
    perturbation: Perturbation
    passes: int

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        """Seeds in turn, and theta drawn uniformly."""
        low, high = (torch.tensor([getattr(each, end) for each in self.perturbation.theta]) for end in ("low", "high"))
        unit = torch.rand(n, len(low), generator=torch.Generator().manual_seed(0))
        return torch.arange(n) % N_SEEDS, low + unit * (high - low)

    def answers(self, seed: Tensor, theta: Tensor) -> Tensor:
        """What the model answers for seeds at theta, worked out without a campaign."""
        context = Context((0.0, 1.0))
        disturbed = perturb(self.perturbation, self.inputs[seed], theta, torch.arange(len(seed)), context)
        with torch.no_grad():
            return self.model(disturbed).argmax(1)

    def breaks(self, seed: Tensor, theta: Tensor) -> Tensor:
        """Whether the model breaks."""
        return self.answers(seed, theta) == TRIGGERED

    def share(self, n: int) -> float:
        """Share of all seeds and theta at which the model breaks."""
        return float(self.breaks(*self.draw(n)).float().mean())

    def finds(self, policy: Any, random_seed: int) -> bool:
        """Whether a campaign of a policy (a name, or what makes one) finds the region within the stated passes."""
        found = _Found()
        themis.run(
            Target(self.model),
            (self.inputs, self.labels),
            self.perturbation,
            policy=policy() if callable(policy) else policy,
            random_seed=random_seed,
            max_passes=CLEAN_PASSES + self.passes,
            max_tests=None,
            coverage=None,
            plateau=None,
            callbacks=[found],
        )
        return found.is_found


class _Found(Callback):
    """Stops the campaign at the first fault that is the hidden one."""

    def __init__(self) -> None:
        self.is_found = False

    def on_fault(self, fault: Fault) -> None:
        if fault.answer == TRIGGERED and not self.is_found:
            self.is_found = True
            raise KeyboardInterrupt


CLEAN_PASSES = N_SEEDS + 5
"""What a campaign pays before its first test: one a seed, and five to find the layers."""

# A trigger patch: theta is where it lies and how bright it is.

PATCH, SECRET, NEARLY_ALL = 4, (9, 3), 0.85


def _covered(first: Tensor) -> Tensor:
    """The share of each row or column that the patch covers, `[tests, SIZE]`; it may begin between two of them."""
    edge = torch.arange(SIZE, dtype=first.dtype)
    return (torch.minimum(edge + 1, first[:, None] + PATCH) - torch.maximum(edge, first[:, None])).clamp(0, 1)


def _patch(inputs: Tensor, theta: Tensor, rng: Rng, context: Context) -> Tensor:
    """A bright square is laid over the picture."""
    x, y, strength = theta.unbind(1)
    cover = _covered(y)[:, None, :, None] * _covered(x)[:, None, None, :] * strength.view(-1, 1, 1, 1)
    return inputs * (1 - cover) + cover


PATCHED = Perturbation(
    "patch",
    (Theta("x", 0, SIZE - PATCH), Theta("y", 1, SIZE - PATCH, 1), Theta("strength", 0, 1)),  # never over the first row
    _patch,
    is_random=False,
    inputs="picture",
)


@cache
def trigger_patch() -> Hidden:
    """It breaks where a bright patch lies over nearly all of one secret square."""
    template = torch.zeros(SIZE, SIZE)
    x, y = SECRET
    template[y : y + PATCH, x : x + PATCH] = 1 / (NEARLY_ALL * PATCH**2)
    labels = torch.arange(N_SEEDS) % 2
    inputs = torch.zeros(N_SEEDS, 1, SIZE, SIZE)
    inputs[:, 0, 0, 0] = labels
    return Hidden("trigger patch", Triggered(template, 0), inputs, labels, PATCHED, 2_560)


# A narrow range of angles: a bar, and a template of the same bar turned.

ANGLE, BAND = 19.0, 0.02
"""Where the band of angles lies, in degrees, and the share of the range that it takes."""
DIM, BRIGHT = 0.9, 17
"""Brightness of the bars that are never taken for the trigger, and the only seed with a bright one."""
ROTATE = choose_perturbation("rotate")


def _bars(brightness: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures of a bar above the centre, and at the centre the mark of the class."""
    labels = torch.arange(N_SEEDS) % 2
    inputs = torch.zeros(N_SEEDS, 1, SIZE, SIZE)
    inputs[:, :, 1:5, 7:9] = brightness.view(-1, 1, 1, 1)
    inputs[:, :, 6:10, 6:10] = labels.view(-1, 1, 1, 1).float()
    return inputs, labels


def _template() -> Tensor:
    """A bar turned by ANGLE, so weighed that the evidence of a bright bar is over 1 in a band of the range."""
    bar, _ = _bars(torch.ones(N_SEEDS))
    angles = torch.linspace(ROTATE.theta[0].low, ROTATE.theta[0].high, 6_001)[:, None]
    template = _turned(bar[:1], torch.tensor([[ANGLE]]))[0, 0]
    evidence = (template * _turned(bar[:1].expand(len(angles), -1, -1, -1), angles)[:, 0]).sum((1, 2))
    return template / evidence.quantile(1 - BAND)


def _turned(inputs: Tensor, angle: Tensor) -> Tensor:
    return perturb(ROTATE, inputs, angle, torch.zeros(len(inputs), dtype=torch.int64), Context((0.0, 1.0)))


def _angles(name: str, brightness: Tensor, perturbation: Perturbation, passes: int) -> Hidden:
    inputs, labels = _bars(brightness)
    return Hidden(name, Triggered(_template(), SIZE // 2), inputs, labels, perturbation, passes)


@cache
def narrow_angles() -> Hidden:
    """It breaks where the picture is turned by about 19 degrees, whichever it is.

    A little noise makes every test a new one: a policy that likes the bounds is never sent elsewhere by repetition.
    """
    perturbation = choose_perturbation("rotate + gaussian(sigma=0:0.002)")
    return _angles("narrow angles", torch.ones(N_SEEDS), perturbation, 800)


@cache
def rare_angles() -> Hidden:
    """The same of one seed only: the bars of all others are too dim. Clean, all seeds look equally safe."""
    return _angles("rare angles", torch.where(torch.arange(N_SEEDS) == BRIGHT, 1.0, DIM), ROTATE, 3_840)


HIDDEN = (trigger_patch, narrow_angles, rare_angles)
