"""Test a classifier under many perturbations in one go, and compare it with a baseline: the mean corruption error."""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import themis
from themis.report.suite import write_suite_report

digits = load_digits()
inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16  # [1797, 1, 8, 8], in 0 to 1
labels = torch.tensor(digits.target)
train, test = slice(0, 1200), slice(1200, 1500)


def trained(width, noise):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * width, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        noisy = (inputs[train] + noise * torch.randn_like(inputs[train])).clamp(0, 1)
        nn.functional.cross_entropy(net(noisy), labels[train]).backward()
        optimiser.step()
    return net


definition = {
    "name": "digits",
    "levels": 3,  # each perturbation is graded at a third, two thirds and all of its range
    "members": [
        {"perturb": "gaussian", "magnitude": 0.3, "weight": 2},
        "salt_and_pepper",
        "fog",
        {"perturb": "rotate(angle=-20:20)", "name": "tilted"},
    ],
}
data = (inputs[test], labels[test])
is_bold = (inputs[test].flatten(1).mean(1) > inputs[test].mean()).tolist()
Path("strokes.csv").write_text("\n".join(["stroke", *("bold" if bold else "thin" for bold in is_bold)]))
baseline = themis.run_suite(trained(8, 0.0), data, definition, out="suites/plain", max_tests=800)
suite = themis.run_suite(
    trained(16, 0.2), data, definition, out="suites/noisy", max_tests=800, slice_by="class,strokes.csv:stroke"
)
for row in suite.rows:
    rate = row.fault_rate
    print(f"{row.name:<16} fault rate {rate.value:.1%} ({rate.low:.1%} to {rate.high:.1%}), error {row.error:.1%}")
    print(
        f"  {row.distinct_faults} distinct faults in {row.tests} tests, the weakest at {row.weakest_theta}. {row.stop}"
    )
errors = suite.corruption_errors(baseline)
print(f"mCE {errors.mce:.1%} of the errors of the net that was trained without noise")
for entry in suite.worst_slices(2):
    print(f"worst slice: {entry.rate.name} under {entry.member}, {entry.rate.fault_rate.value:.1%}")
print(f"report: {write_suite_report(suite, errors=errors)}")
