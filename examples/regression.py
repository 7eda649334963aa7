"""Test a regression model: a fault is an answer that moves by more than a tolerance."""

import torch
from torch import nn

import themis

# The net learns the position of a bright bar in an image, from -1 (left) to 1 (right): a toy steering angle.
rng = torch.Generator().manual_seed(0)
angles = torch.rand(800, generator=rng) * 2 - 1
columns = torch.linspace(-1, 1, 24)
images = torch.exp(-((columns - angles[:, None]) ** 2) / 0.02)[:, None, None, :].expand(-1, 1, 12, -1)
images = (0.8 * images + 0.2 * torch.rand(800, 1, 12, 24, generator=rng)).clamp(0, 1)

torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 1))
optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
for _ in range(150):
    optimiser.zero_grad()
    nn.functional.mse_loss(net(images[:600]).squeeze(1), angles[:600]).backward()
    optimiser.step()

target = themis.Target(net, oracle="regression:0.2")  # in the unit of the answer; 2sd would be two standard deviations
run = themis.run(target, (images[600:], angles[600:]), "gaussian", magnitude=0.3, max_tests=4000)
print(run.stop, f"{run.rounds[-1].distinct_faults} distinct faults")
for fault in run.faults[:3]:
    side = "right" if fault.answer else "left"
    print(f"seed {fault.seed_id}: {fault.clean_value:+.2f} became {fault.value:+.2f}, to the {side}")
