"""Test a model of tabular data by changing a few columns within limits, and no others."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import themis

table = load_breast_cancer()
rows, labels = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target)
low, high = rows.min(0).values, rows.max(0).values
rows = (rows - low) / (high - low)  # scale every column to 0..1, so that one range fits all

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(100):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(rows[:400]), labels[:400]).backward()
    optimiser.step()

# The measured sizes of a cell are reliable; of the other columns, three at a time may be off by a tenth.
features = themis.Features.of(rows, [name.replace(" ", "_") for name in table.feature_names])
features = features.set("*_area", change="fixed").set("*_radius", change="fixed")
test = (rows[400:], labels[400:])
run = themis.run(themis.Target(net), test, "edit(count=0:3, amount=0:0.1)", features=features, max_tests=4000)
print(run.stop, f"{run.rounds[-1].failing_seeds} of {run.start.n_usable} rows have a fault")
fault = run.faults.most_telling(1)[0]
replay = fault.replay()
changed = (replay.inputs - replay.clean_inputs).nonzero().flatten().tolist()
print(f"row {fault.seed_id} is misread when these change: {', '.join(features.names[k] for k in changed)}")
