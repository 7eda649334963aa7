"""Which unlabelled inputs to label next: rankings, and estimates of the accuracy from 200 labels.

    THEMIS_DATA=FOLDER python benchmarks/selection.py [--no-quick] [--kept FOLDER] [--json FILE]

LeNet-5 on the test set of MNIST, and ResNet-56 on the first 5,000 test pictures of CIFAR-10; the failures are the
real mistakes on clean inputs. A ranking by uncertainty (the margin between the two most probable classes; DeepGini)
is compared with rankings by the same under disturbance, as a campaign has it: `mild` are four draws of slight
rotation, shift, brightness, contrast and noise, `noise` and `slight noise` are three of Gaussian noise. `spread`
takes the 200 of the 400 smallest margins whose answers are furthest from one another, for coverage. APFD is 1 for a
ranking that begins with all mistakes.

The accuracy is estimated from `LABELS` labels of inputs that are drawn at random, or with probabilities
proportional to the standard deviation of an assumed chance of failure (one minus the confidence, clean or averaged
over disturbances), mixed with a tenth of uniform ones: the mean of that chance, plus the weighted mean of what the
labels add to it. It is repeated `--repeats` times: the mean width of the 95% interval, and how often it holds.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from paper import write_json
from scipy.special import softmax
from scipy.stats import norm
from searching.arguments import add_quick, complete

from themis.perturb import Context, perturb
from themis.perturb.names import read_perturbation
from themis_lab import zoo
from themis_lab.criteria.ranking import apfd

MODELS = {"lenet5-mnist": 10_000, "resnet56-cifar10": 5000}
"""Models of the zoo, and the inputs that are to be labelled."""
DISTURBANCES = {
    "mild": (
        "rotate(angle=-7.5:7.5) + shift(x=-0.025:0.025, y=-0.025:0.025) + brightness(shift=-0.05:0.05) "
        "+ contrast(change=-0.1:0.1) + gaussian(sigma=0:0.02)",
        4,
    ),
    "noise": ("gaussian(sigma=0:0.04)", 3),
    "slight noise": ("gaussian(sigma=0:0.01)", 3),
}
"""Perturbations, and how often each input is disturbed."""
LABELS = 200
LEVEL = float(norm.ppf(0.975))
BATCH = 250
QUICK: dict[str, Any] = {"n": 500, "repeats": 100}
FULL: dict[str, Any] = {"n": 10_000, "repeats": 2000}
Numbers = NDArray[np.float64]


def probabilities(name: str, n: int, kept: Path | None) -> tuple[dict[str, Numbers], NDArray[np.int64]]:
    """The probabilities of classes, clean and by disturbance `[draws, inputs, classes]`, and the labels."""
    target, seeds = zoo.load(name), zoo.data(name)
    target.module.eval()
    inputs = seeds.inputs[: min(n, MODELS[name])]
    assert seeds.labels is not None

    def ask(asked: torch.Tensor) -> Numbers:
        with torch.inference_mode():
            answers: Numbers = torch.cat([target.forward(batch) for batch in torch.split(asked, BATCH)]).numpy()
        return answers

    def disturbed(text: str, draw: int) -> torch.Tensor:
        perturbation, rng = read_perturbation(text).fitted(tuple(inputs.shape[1:])), np.random.default_rng(draw)
        low, high = np.array([(theta.low, theta.high) for theta in perturbation.theta]).T
        theta = torch.from_numpy(rng.uniform(low, high, (len(inputs), len(low)))).float()
        seed = torch.arange(len(inputs)) + len(inputs) * draw
        parts = zip(*(torch.split(each, BATCH) for each in (inputs, theta, seed)), strict=True)
        return torch.cat([perturb(perturbation, x, at, noise, Context()) for x, at, noise in parts])

    def answers(kind: str) -> Numbers:
        file = None if kept is None else kept / f"{name}_{kind.replace(' ', '_')}.npy"
        if file is not None and file.exists():
            kept_answers: Numbers = np.load(file)
            return kept_answers
        text, draws = DISTURBANCES.get(kind, ("", 1))
        found = np.stack([ask(disturbed(text, k) if text else inputs) for k in range(draws)])
        if file is not None:
            np.save(file, found)
        return found

    found = {kind: answers(kind).reshape(-1, len(inputs), 10) for kind in ("clean", *DISTURBANCES)}
    return {kind: softmax(each.astype(float), -1) for kind, each in found.items()}, seeds.labels[: len(inputs)].numpy()


def margins(probability: Numbers, answer: NDArray[np.int64]) -> Numbers:
    """How much more probable the clean answer is than any other class, `[draws, inputs]`."""
    rest, at = probability.copy(), np.arange(len(answer))
    rest[:, at, answer] = -1
    margin: Numbers = probability[:, at, answer] - rest.max(-1)
    return margin


def spread(margin: Numbers, probability: Numbers) -> NDArray[np.int64]:
    """The order by margin, but first those of its beginning that are furthest apart."""
    order = margin.argsort(kind="stable")
    points = probability[order[: 2 * LABELS]]
    picked, distance = [0], np.full(len(points), np.inf)
    while len(picked) < LABELS:
        distance = np.minimum(distance, np.square(points - points[picked[-1]]).sum(1))
        picked.append(int(distance.argmax()))
    return np.concatenate([order[picked], np.delete(order, picked)])


def rank(found: dict[str, Numbers], labels: NDArray[np.int64]) -> list[dict[str, Any]]:
    """Every ranking, with its APFD and what its first inputs reveal."""
    clean = found["clean"]
    answer = clean[0].argmax(1)
    margin = margins(clean, answer)[0]
    orders = {
        "random": np.random.default_rng(0).permutation(len(labels)),
        "margin": margin.argsort(kind="stable"),
        "DeepGini": np.square(clean[0]).sum(1).argsort(kind="stable"),
        "margin, spread": spread(margin, clean[0]),
    }
    for kind in DISTURBANCES:
        both = np.concatenate([clean, found[kind]])
        each = margins(both, answer)
        orders |= {
            f"mean margin, {kind}": each.mean(0).argsort(kind="stable"),
            f"least margin, {kind}": each.min(0).argsort(kind="stable"),
            f"DeepGini of the mean, {kind}": np.square(both.mean(0)).sum(1).argsort(kind="stable"),
        }
    is_wrong = torch.from_numpy(answer != labels)
    rows = []
    for name, order in orders.items():
        first = order[:LABELS][is_wrong.numpy()[order[:LABELS]]]
        kinds = {*zip(labels[first].tolist(), answer[first].tolist(), strict=True)}
        value = apfd(torch.from_numpy(order), is_wrong)
        rows.append({"ranking": name, "apfd": value, "mistakes": len(first), "kinds": len(kinds)})
    return rows


def estimate(found: dict[str, Numbers], labels: NDArray[np.int64], repeats: int) -> list[dict[str, Any]]:
    """By how the inputs are drawn, the width of the interval of the accuracy, and how often it holds."""
    rng, n, clean = np.random.default_rng(0), len(labels), found["clean"]
    answer = clean[0].argmax(1)
    is_wrong, at = answer != labels, np.arange(n)
    chances = {"margin": 1 - clean[0].max(1)}
    for kind in DISTURBANCES:
        chances[f"mean, {kind}"] = 1 - np.concatenate([clean, found[kind]]).mean(0)[at, answer]

    def at_random() -> tuple[float, float]:
        share = rng.hypergeometric(is_wrong.sum(), n - is_wrong.sum(), LABELS) / LABELS
        middle = share + LEVEL**2 / (2 * LABELS)  # the score interval of Wilson
        half = LEVEL * np.sqrt(share * (1 - share) / LABELS + (LEVEL / (2 * LABELS)) ** 2)
        return (middle - half) / (1 + LEVEL**2 / LABELS), (middle + half) / (1 + LEVEL**2 / LABELS)

    def by_chance(chance: Numbers) -> tuple[float, float]:
        weight = np.sqrt(chance * (1 - chance))
        weight = 0.9 * weight / weight.sum() + 0.1 / n
        drawn = rng.choice(n, LABELS, p=weight)
        added = (is_wrong[drawn] - chance[drawn]) / (n * weight[drawn])
        middle, half = chance.mean() + added.mean(), LEVEL * added.std(ddof=1) / np.sqrt(LABELS)
        return max(0.0, middle - half), min(1.0, middle + half)

    rows = []
    for name in ("random", *chances):
        intervals = [at_random() if name == "random" else by_chance(chances[name]) for _ in range(repeats)]
        low, high = np.array(intervals).T
        holds = (low <= is_wrong.mean()) & (is_wrong.mean() <= high)
        rows.append({"drawn by": name, "width": float((high - low).mean()), "holds": float(holds.mean())})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_quick(parser)
    parser.add_argument("--n", type=int, help="most inputs per model")
    parser.add_argument("--repeats", type=int, help="estimates of the accuracy")
    parser.add_argument("--kept", type=Path, help="folder for the answers, to be used again: with the same --n")
    parser.add_argument("--json", help="write the raw results to this file")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    results = []
    for name in MODELS:
        found, labels = probabilities(name, arguments.n, arguments.kept)
        mistakes = int((found["clean"][0].argmax(1) != labels).sum())
        result: dict[str, Any] = {
            "model": name,
            "inputs": len(labels),
            "mistakes": mistakes,
            "rankings": rank(found, labels),
        }
        result["estimates"] = estimate(found, labels, arguments.repeats)
        results.append(result)
        print(f"{name}: {mistakes} mistakes of {len(labels)}")
        for row in (*result["rankings"], *result["estimates"]):
            cells = (
                f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
            print("  " + ", ".join(cells))
    if arguments.json:
        write_json(arguments.json, torch.device("cpu"), results)


if __name__ == "__main__":
    main()
