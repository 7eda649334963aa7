"""Combine perturbations, restrict their range and define your own, on scikit-learn's 8x8 digits."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import themis

digits = load_digits()
inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(inputs[:1200]), labels[:1200]).backward()
    optimiser.step()


def ink(inputs, theta, rng, context):
    """Fade the strokes, more on one side than on the other."""
    fade, tilt = themis.perturb.columns(theta, inputs)
    x, _ = themis.perturb.picture.places(inputs)
    return inputs * (1 - fade * (0.5 + tilt * x)).clamp(0, 1)


INK = themis.Perturbation(
    "ink",
    (themis.Theta("fade", 0, 0.8, unit="share of the ink"), themis.Theta("tilt", -1, 1, unit="from left to right")),
    ink,
    is_random=False,
    inputs="picture",
)

test = (inputs[1200:], labels[1200:])
for perturbation in (INK, "rotate(angle=-15:15) + shift", themis.perturb.choose_perturbation("blur") + INK):
    run = themis.run(net, test, perturbation, max_tests=2000)
    print(f"{run.start.perturbation}: {run.stop}")
    print(f"  {run.rounds[-1].distinct_faults} distinct faults; {run.fault_rate.value:.1%} of uniform tests")
    worst = run.faults.most_telling(1)[0]
    print(f"  {worst.clean_answer} read as {worst.answer}; replayed the same: {worst.replay().is_same}")
