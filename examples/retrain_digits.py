"""Retrain a net on its faults: it reads 8x8 digits, and is judged on digits that it has never seen."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import themis

digits = load_digits()
inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None]  # [1797, 1, 8, 8], raw values 0 to 16
labels = torch.tensor(digits.target)
train, rest = slice(0, 500), slice(500, None)

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
normalise = themis.Normalize(mean=4.9, std=6.0)
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(40):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(normalise(inputs[train])), labels[train]).backward()
    optimiser.step()

# The seeds are split before the campaign into parts to search, to train on and to judge by.
target, data = themis.Target(net, bounds=(0, 16), preprocess=normalise), (inputs[rest], labels[rest])
run = themis.run(target, data, "gaussian", magnitude=0.5, max_tests=2000, split=(0.4, 0.3, 0.3))
print(run.stop)

# So few digits make few batches per epoch: more of them gain more.
result = themis.retrain(run, data=data, random_seeds=3, batches=200, also=["rotate"])
for sentence in result.verdict:
    print(sentence)
print(f"The returned model was trained with random seed {result.model.random_seed}.")
