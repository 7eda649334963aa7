"""Test your own classifier: a small net trained on scikit-learn's 8x8 digits, under noise and under an attack."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import themis

digits = load_digits()
inputs = torch.tensor(digits.images, dtype=torch.float32)[:, None]  # [1797, 1, 8, 8], raw values 0 to 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1200), slice(1200, None)

torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10))
normalise = themis.Normalize(mean=4.9, std=6.0)
optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(net(normalise(inputs[train])), labels[train]).backward()
    optimiser.step()

# The bounds are those of the raw inputs; the normalisation is part of the target.
target = themis.Target(net, bounds=(0, 16), preprocess=normalise)
for perturbation, magnitude in (("gaussian", 0.2), ("fgsm", 0.1)):
    run = themis.run(target, (inputs[test], labels[test]), perturbation, magnitude=magnitude, max_tests=4000)
    print(f"{perturbation}: {run.stop}")
    print(f"  {run.rounds[-1].distinct_faults} distinct faults, fault rate {run.fault_rate.value:.1%}")
    worst = run.faults.most_telling(1)[0]
    outcome = "reproduced" if worst.replay().is_same else "did not reproduce"
    print(f"  seed {worst.seed_id}: {worst.clean_answer} read as {worst.answer}; the replay {outcome} it")
