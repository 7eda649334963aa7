"""Train LeNet-5 on real digits and test it, in a minute. The weights are kept, so that later runs only test. Digits
that the model has not seen are put under noise for at most 50 seconds, and the faults are drawn.

themis demo
themis demo --perturb fgsm --policy paper --out runs/attack
"""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from themis.cli.options import CommandLine, Parser, add_fields, add_option, fields_of
from themis.cli.output import add_campaign_output, finish, progress_callbacks, unused_path
from themis.cli.source import PERTURB_HELP, check_names
from themis.errors import ThemisError, warn
from themis.runs.source import Origin
from themis.runs.store.files import fresh_file
from themis.settings import Settings
from themis.text import print_text

if TYPE_CHECKING:
    from torch import nn

    from themis.data import Seeds
    from themis.runs.fault import Fault
    from themis.runs.run import Run

RECIPE = "lenet5-digits-2"
"""Name of the cached weights; it changes with the training recipe."""
EPOCHS = 15
MAGNITUDES = {"gaussian": 0.25, "fgsm": 0.1}
"""The largest strength of a perturbation, unless another is given."""
MAX_SECONDS = 50
"""The longest campaign, so that the demo takes about a minute on any machine."""


def add_arguments(parser: Parser) -> None:
    campaign = parser.add_argument_group("campaign")
    add_option(campaign, "perturb", str, "gaussian", PERTURB_HELP)
    add_fields(campaign, Settings, only=("magnitude", "policy", "max_tests", "random_seed"))
    output = parser.add_argument_group("output")
    add_option(output, "out", str, "runs/demo", "folder for the results; a number is appended if it exists")
    add_campaign_output(output)


def execute(arguments: CommandLine) -> int:
    from themis.campaign.api import run
    from themis.target.target import Target

    def say(text: str) -> None:
        if not arguments.is_silent:
            print_text(text, flush=True)

    options: dict[str, Any] = {"magnitude": MAGNITUDES.get(arguments.perturb), "max_seconds": MAX_SECONDS}
    options |= fields_of(Settings, arguments.given)
    check_names(arguments.perturb, Settings.of(**options))
    train, held_out = digits()
    model = trained_lenet5(train, held_out, say)
    out = str(unused_path(Path(arguments.out)))
    result = run(
        Target(model),
        held_out,
        arguments.perturb,
        out=out,
        origin=Origin(model="themis_lab.cli.demo:make_model", data="themis_lab.cli.demo:make_data"),
        callbacks=progress_callbacks(arguments),
        **options,
    )
    if len(result.faults):
        draw_faults(result, picture := Path(out) / "faults.png")
        say(f"Most telling faults: {picture}")
    return finish(result, arguments, out=out)


def draw_faults(run: Run, path: str | Path, *, n: int = 12) -> list[Fault]:
    """Replay and draw up to `n` of the most telling faults of a campaign; returns the faults that were drawn."""
    from themis.runs.display.figure import draw_pairs

    faults = run.faults.most_telling(n)
    found = f"{len(run.faults):,} faults in {run.rounds[-1].tests:,} tests ({run.start.perturbation})"
    draw_pairs([(fault, fault.replay()) for fault in faults], path, f"The most telling of {found}")
    return faults


def digits() -> tuple[Seeds, Seeds]:
    """The digits to train on, and those that the demo's model has not seen."""
    from themis_integrations.data.digits import read_digits

    return split(read_digits())


def make_model() -> nn.Module:
    """The model of the demo, to replay its faults."""
    return trained_lenet5(*digits(), lambda text: None)


def make_data() -> Seeds:
    """The digits that the demo's model has not seen."""
    return digits()[1]


def split(digits: Seeds) -> tuple[Seeds, Seeds]:
    """Split the digits: four fifths to train on, one fifth to test with; both contain every class."""
    import torch

    is_held_out = torch.arange(len(digits)) % 5 == 0
    return digits[~is_held_out], digits[is_held_out]


def trained_lenet5(train: Seeds, held_out: Seeds, say: Any) -> nn.Module:
    """LeNet-5 trained on the digits; loaded from the cache if it was trained before."""
    import torch

    from themis.runs.environment import threads

    path = Path(os.environ.get("THEMIS_CACHE") or Path.home() / ".cache" / "themis") / f"{RECIPE}.pt"
    began = perf_counter()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = lenet5()
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
        done = f"Loaded LeNet-5 from {path}"
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        with threads(1):  # several would mostly wait for each other: the batches are small
            _train(model, train)
        _keep(model.state_dict(), path)
        done = f"Trained LeNet-5 on {len(train):,} digits in {perf_counter() - began:.0f} s"
    with torch.no_grad():
        accuracy = float((model.eval()(held_out.inputs).argmax(1) == held_out.labels).float().mean())
    say(f"{done}: {accuracy:.1%} of {len(held_out):,} held-out digits correct")
    return model


def lenet5() -> nn.Module:
    """LeNet-5 as DeepXplore has it: 5x5 convolutions that keep the size, ReLU, 2x2 max pooling."""
    from torch import nn

    parts = {
        "conv1": nn.Conv2d(1, 6, 5, padding=2),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(6, 16, 5, padding=2),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(784, 120),
        "relu3": nn.ReLU(),
        "fc2": nn.Linear(120, 84),
        "relu4": nn.ReLU(),
        "fc3": nn.Linear(84, 10),
    }
    return nn.Sequential(OrderedDict(parts))


def _keep(weights: dict[str, Any], path: Path) -> None:
    """Write the weights to the cache, if that is possible: without them, the next demo trains again."""
    import torch

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with fresh_file(path, replaces=True) as part:
            torch.save(weights, part)
    except (OSError, ThemisError) as error:
        warn(f"the trained model is not cached: {error}")


def _train(model: nn.Module, train: Seeds) -> None:
    import torch
    import torch.nn.functional as F

    assert train.labels is not None
    rng = torch.Generator().manual_seed(0)
    batch = 64
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=EPOCHS * (len(train) // batch))
    model.train()
    for _ in range(EPOCHS):
        order = torch.randperm(len(train), generator=rng)
        for rows in order[: len(order) // batch * batch].view(-1, batch):
            optimiser.zero_grad()
            F.cross_entropy(model(train.inputs[rows]), train.labels[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
