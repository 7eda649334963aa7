"""Test a model of signals: a small 1-D convolutional net that tells three waveforms apart, under drift and gaps."""

import torch
from torch import nn

import themis


def waveforms(n: int, samples: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Sines, squares and sawtooths `[n, 1, samples]` in -1..1, of random frequency and phase, with some noise."""
    labels = torch.arange(n) % 3
    turns = torch.linspace(0, 1, samples) * (3 + 5 * torch.rand(n, 1)) + torch.rand(n, 1)
    sine, square, saw = (turns * 2 * torch.pi).sin(), torch.where(turns % 1 < 0.5, 1.0, -1.0), 2 * (turns % 1) - 1
    shape = torch.stack([sine, square, saw], 1)[torch.arange(n), labels]
    return (0.5 * shape + 0.05 * torch.randn(n, samples)).clamp(-1, 1)[:, None], labels


torch.manual_seed(0)
signals, labels = waveforms(900)
net = nn.Sequential(
    nn.Conv1d(1, 8, 9, stride=2), nn.ReLU(), nn.Conv1d(8, 16, 9, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4)
)
net = nn.Sequential(net, nn.Flatten(), nn.Linear(64, 3))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(signals), labels).backward()
    optimiser.step()

# Signals are [inputs, channels, samples]; the bounds are the range of a sample.
target = themis.Target(net, bounds=(-1, 1))
test = waveforms(300)
for perturbation in ("signal_noise(snr=0:60)", "drift + dropouts"):
    run = themis.run(target, test, perturbation, classes=["sine", "square", "sawtooth"], max_tests=1500)
    print(f"{perturbation}: {run.stop}")
    print(f"  {run.rounds[-1].distinct_faults} distinct faults, fault rate {run.fault_rate.value:.1%}")
