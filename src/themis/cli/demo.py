"""`themis demo`: a real model on real digits, in a minute."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from themis.cli.run import report, show_progress

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from themis.data import Seeds
    from themis.zoo import LeNet

HELP = "train LeNet-5 on real digits and test it: a campaign in a minute"
RECIPE = "lenet5-digits-1"
"""Name of the cached weights; changes with the training recipe."""
EPOCHS = 15


def make_parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description="Train LeNet-5 on 5,000 real MNIST digits (cached), then test it under noise.")
    parser.add_argument("--out", type=str, default="runs/demo", help="folder for the results; numbered if it is taken")
    parser.add_argument("--perturb", type=str, default="gaussian", help="name of the perturbation: gaussian, fgsm")
    parser.add_argument(
        "--magnitude", type=float | None, default=None, help="its reach: 0.25 for gaussian, 0.1 for fgsm"
    )
    parser.add_argument("--policy", type=str, default="scheduled", help="random, corners, paper or scheduled")
    parser.add_argument("--max-tests", type=int, default=20_000, help="stop after this many tests")
    parser.add_argument("--random-seed", type=int, default=0, help="same seed, same campaign")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON and nothing else")
    return parser


def execute(arguments: Namespace, said: set[str]) -> int:
    from themis.campaign import run
    from themis.data.readers import read_digits
    from themis.report.figure import draw_faults
    from themis.target import Target

    def say(text: str) -> None:
        if not (arguments.quiet or arguments.json):
            print(text, flush=True)

    digits = read_digits()
    train, held_out = split(digits)
    model = trained_lenet5(train, held_out, say)
    arguments.out = str(_free(Path(arguments.out)))
    usual = {"gaussian": 0.25, "fgsm": 0.1}.get(arguments.perturb)
    magnitude = usual if arguments.magnitude is None else arguments.magnitude
    result = run(
        Target(model),
        held_out,
        arguments.perturb,
        magnitude=magnitude,
        policy=arguments.policy,
        max_tests=arguments.max_tests,
        max_seconds=50,
        random_seed=arguments.random_seed,
        out=arguments.out,
        callbacks=[] if arguments.quiet or arguments.json else [show_progress()],
    )
    if len(result.faults):
        picture = Path(arguments.out) / "faults.png"
        draw_faults(result, picture)
        say(f"The most telling faults: {picture}")
    return report(result, arguments)


def split(digits: Seeds) -> tuple[Seeds, Seeds]:
    """Four fifths to train on, one fifth to test with; every class in both."""
    import torch

    is_held_out = torch.arange(len(digits)) % 5 == 0
    return digits[~is_held_out], digits[is_held_out]


def trained_lenet5(train: Seeds, held_out: Seeds, say: Any) -> LeNet:
    """LeNet-5 trained on the digits; from the cache when it was trained before."""
    import torch

    from themis.zoo import lenet5

    path = _cache() / f"{RECIPE}.pt"
    model = lenet5()
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
        say(f"LeNet-5 from {path}: {_accuracy(model, held_out):.1%} of {len(held_out):,} held-out digits right")
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        began = perf_counter()
        _train(model, train)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), part)
        part.replace(path)
        say(
            f"LeNet-5 trained on {len(train):,} digits in {perf_counter() - began:.0f} s: "
            f"{_accuracy(model, held_out):.1%} of {len(held_out):,} held-out digits right"
        )
    return model


def _train(model: LeNet, train: Seeds) -> None:
    import torch
    import torch.nn.functional as F

    assert train.labels is not None
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for layer in (model.conv1, model.conv2, *model.fcs):
            layer.reset_parameters()
    batch = 64
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=EPOCHS * (len(train) // batch))
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(train), generator=rng)
        for rows in order[: len(order) // batch * batch].view(-1, batch):
            optimiser.zero_grad()
            loss = F.cross_entropy(model(train.inputs[rows]), train.labels[rows])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
    model.eval()


def _accuracy(model: LeNet, seeds: Seeds) -> float:
    import torch

    with torch.no_grad():
        return float((model.eval()(seeds.inputs).argmax(1) == seeds.labels).float().mean())


def _cache() -> Path:
    return Path(os.environ.get("THEMIS_CACHE") or Path.home() / ".cache" / "themis")


def _free(path: Path) -> Path:
    """`path`, or the first of path-2, path-3, ... that does not exist."""
    tried, number = path, 1
    while tried.exists():
        number += 1
        tried = path.with_name(f"{path.name}-{number}")
    return tried
