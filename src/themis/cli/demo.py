"""`themis demo`: a real model on real digits, in a minute."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from themis.cli.options import Parser, add_option
from themis.cli.run import PERTURB, add_report, add_verbosity, callbacks, check_names, free, report
from themis.runs.source import Origin
from themis.settings import Settings

if TYPE_CHECKING:
    from argparse import Namespace

    from themis.data import Seeds
    from themis.zoo import LeNet

HELP = "Train LeNet-5 on 5,000 real MNIST digits (once, then cached), test it under noise, and draw its faults."
EXAMPLES = """
themis demo
themis demo --perturb fgsm --policy paper --out runs/attack
"""
RECIPE = "lenet5-digits-1"
"""Name of the cached weights; changes with the training recipe."""
EPOCHS = 15


def add_arguments(parser: Parser) -> None:
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "gaussian", PERTURB)
    add_option(campaign, "magnitude", float | None, None, "its reach: by default 0.25 for gaussian, 0.1 for fgsm")
    add_option(campaign, "policy", str, "scheduled", "random, corners, paper or scheduled")
    add_option(campaign, "max_tests", int, 20_000, "stop after this many tests")
    add_option(campaign, "random_seed", int, 0, "same seed, same campaign")
    output = parser.add_argument_group("output")
    add_option(output, "out", str, "runs/demo", "folder for the results; numbered if it is taken")
    add_report(output)
    add_verbosity(output)


def execute(arguments: Namespace, said: set[str]) -> int:
    from themis.campaign.api import run
    from themis.data.readers import read_digits
    from themis.runs.display.figure import draw_faults
    from themis.target.target import Target

    def say(text: str) -> None:
        if not (arguments.quiet or arguments.json):
            print(text, flush=True)

    usual = {"gaussian": 0.25, "fgsm": 0.1}.get(arguments.perturb)
    settings = Settings(
        magnitude=usual if arguments.magnitude is None else arguments.magnitude,
        policy=arguments.policy,
        max_tests=arguments.max_tests,
        max_seconds=50,
        random_seed=arguments.random_seed,
    )
    check_names(arguments.perturb, settings)
    train, held_out = split(read_digits())
    model = trained_lenet5(train, held_out, say)
    arguments.out = str(free(Path(arguments.out)))
    result = run(
        Target(model),
        held_out,
        arguments.perturb,
        out=arguments.out,
        origin=Origin(model="themis.cli.demo:make_model", data="themis.cli.demo:make_data"),
        callbacks=callbacks(arguments),
        **asdict(settings),
    )
    if len(result.faults):
        picture = Path(arguments.out) / "faults.png"
        draw_faults(result, picture)
        say(f"The most telling faults: {picture}")
    return report(result, arguments)


def make_model() -> LeNet:
    """The demo's model, for who replays its faults."""
    from themis.data.readers import read_digits

    return trained_lenet5(*split(read_digits()), lambda text: None)


def make_data() -> Seeds:
    """The digits that the demo's model has not seen."""
    from themis.data.readers import read_digits

    return split(read_digits())[1]


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
