"""For every perturbation in the table: inputs, a context and values of theta to try it with."""

from dataclasses import replace

import table_rows
import torch
import torch.nn.functional as F
from torch import nn

from themis import Target
from themis.perturb import PERTURBATIONS, Context, perturb

NAMES = list(PERTURBATIONS)
ATTACKS = [name for name in NAMES if PERTURBATIONS[name].passes]
TABLES = [name for name in NAMES if PERTURBATIONS[name].inputs == "table"]
SIGNALS = [name for name in NAMES if PERTURBATIONS[name].inputs == "signal"]
SMOOTH = [name for name in NAMES if PERTURBATIONS[name].is_smooth]
EXEMPT = {"cw", "jpeg"}  # docs/perturbations.md says why
PICTURE = (3, 23, 19)  # a number of values that fits no vector of the processor
SIGNAL = (2, 211)


class Net(nn.Module):
    """A small smooth net for any shape, so that attacks have a gradient; with many hills, so that the start matters."""

    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        wide = 4 * torch.Size(shape).numel() if len(shape) < 3 else 4 * 16
        self.first = nn.Conv2d(shape[0], 4, 3, padding=1) if len(shape) == 3 else None
        self.last = nn.Linear(wide if self.first is None else 64, 5)

    def forward(self, x):
        if self.first is not None:
            x = F.adaptive_avg_pool2d((20 * self.first(x - 0.5)).sin(), 4).flatten(1)
        else:
            x = (x - 0.5).flatten(1).repeat(1, 4)
        return self.last(x) * 3


def pictures(n=4, shape=PICTURE, bounds=(0.0, 1.0)):
    """Smooth pictures with some texture, away from the bounds."""
    draw = torch.Generator().manual_seed(3)
    coarse = torch.rand(n, shape[0], 4, 4, generator=draw)
    smooth = F.interpolate(coarse, shape[1:], mode="bilinear", align_corners=False)
    unit = (0.15 + 0.6 * smooth + 0.1 * torch.rand(n, *shape, generator=draw)).clamp(0.1, 0.9)
    return unit * (bounds[1] - bounds[0]) + bounds[0]


def signals(n=4, shape=SIGNAL, bounds=(0.0, 1.0)):
    """A few waves and some noise, away from the bounds; another mix in every channel."""
    draw = torch.Generator().manual_seed(4)
    times = torch.arange(shape[1]) / shape[1]
    jitter, phases = (torch.rand(n, shape[0], 3, 1, generator=draw) for _ in range(2))
    rates = torch.tensor([0.02, 0.1, 0.25])[:, None] * shape[1] + 2 * jitter
    waves = (2 * torch.pi * (times * rates + phases)).sin().sum(2)
    unit = (0.5 + 0.08 * waves + 0.04 * torch.rand(n, *shape, generator=draw)).clamp(0.1, 0.9)
    return unit * (bounds[1] - bounds[0]) + bounds[0]


def inputs_for(name, n=4, **how):
    if name in TABLES:
        return table_rows.rows(n)
    if name in SIGNALS:
        return signals(n, **how)
    shape = how.pop("shape", PICTURE)
    return pictures(n, shape, **how)


def context_for(name, inputs, bounds=(0.0, 1.0)):
    torch.manual_seed(0)
    net = Net(tuple(inputs.shape[1:])).to(inputs.device, torch.float64 if inputs.dtype == torch.float64 else None)
    low, high = bounds
    target = Target(net, bounds=bounds, preprocess=lambda x: (x - low) / (high - low))
    with torch.no_grad():
        reference = target.forward(inputs.to(target.dtype)).argmax(1)
    features = table_rows.features if name in TABLES else None
    margin = margin_of(reference)
    return Context(bounds, target, reference, margin=margin, features=features)


def margin_of(reference):
    def margin(outputs):
        own = outputs.gather(1, reference[:, None])[:, 0]
        others = outputs.scatter(1, reference[:, None], -torch.inf).amax(1)
        return own - others

    return margin


def ends(name, end, n, dtype=torch.float32):
    return torch.tensor([[getattr(each, end) for each in PERTURBATIONS[name].theta]], dtype=dtype).repeat(n, 1)


def strongest(name, n):
    """Each theta at the end that is further from its identity."""
    return torch.tensor(
        [[max((t.low, t.high), key=lambda end, t=t: abs(end - t.identity)) for t in PERTURBATIONS[name].theta]]
    ).repeat(n, 1)


def inner(name, n, seed=0, dtype=torch.float32):
    """Theta well inside its box, another one each test."""
    draw = torch.Generator().manual_seed(seed)
    share = 0.2 + 0.6 * torch.rand(n, len(PERTURBATIONS[name].theta), generator=draw, dtype=dtype)
    low, high = ends(name, "low", n, dtype), ends(name, "high", n, dtype)
    return low + share * (high - low)


def apply(name, inputs, theta, seeds=None, bounds=(0.0, 1.0), rows=None):
    """Disturb; `rows` says of which tests of a larger batch these are."""
    seeds = torch.arange(len(inputs)) * 7919 + 11 if seeds is None else seeds
    context = context_for(name, inputs, bounds)
    if rows is not None:
        context = replace(context, reference=rows, margin=margin_of(rows))
    return perturb(PERTURBATIONS[name], inputs, theta, seeds, context)
