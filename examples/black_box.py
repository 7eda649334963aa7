"""Test any function from NumPy arrays to NumPy arrays: here a random forest, without neurons or gradients."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

import themis

digits = load_digits()
inputs, labels = digits.data.astype(np.float32), digits.target
forest = RandomForestClassifier(n_estimators=30, random_state=0).fit(inputs[:1200], labels[:1200])

target = themis.BlackBox(lambda x: forest.predict_proba(x).astype(np.float32), bounds=(0, 16))
run = themis.run(target, (inputs[1200:], labels[1200:]), "gaussian", magnitude=0.2, max_tests=2000)
print(run.stop, f"{run.rounds[-1].distinct_faults} distinct faults on {run.start.n_usable} digits")
print(f"replayed the same: {run.faults[0].replay().is_same}")
