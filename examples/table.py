"""A table model: rows of numbers, tested under noise that stays inside the table's range."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import themis

table = load_breast_cancer()
rows, labels = torch.tensor(table.data, dtype=torch.float32), torch.tensor(table.target)
low, high = rows.min(0).values, rows.max(0).values
rows = (rows - low) / (high - low)  # every column from 0 to 1, so that one range fits all

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(100):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(rows[:400]), labels[:400]).backward()
    optimiser.step()

run = themis.run(themis.Target(net), (rows[400:], labels[400:]), "gaussian", magnitude=0.1, max_tests=4000)
print(run.stop, f"{run.rounds[-1].failing_seeds} of {run.start.n_usable} rows can be broken")
fault = run.faults.most_telling(1)[0]
again = fault.replay()
changed = (again.inputs - again.clean_inputs).abs()
print(f"row {fault.seed_id}: most changed column: {table.feature_names[int(changed.argmax())]}")
