"""Attacks compared with those of foolbox and ART: success rate, distortion and speed on the same pictures.

    [THEMIS_DATA=FOLDER] python benchmarks/attacks.py [--device cuda] [--no-quick] [--n 256] [--long] [--json FILE]

The models are ResNet-56 (CIFAR-10) and LeNet-5 (MNIST); without a data folder a LeNet-5 that is trained on the
embedded digits. `--data` and `--weights` are those of CIFAR-10 as in paper.py. The references are installed with `pip
install "themis-dl[attacks]"`. On a CPU, `--quick` is the default: three attacks on 16 pictures, once.

Both sides get the same model, batches, radius, steps, step size and one random start, and alternate. Time is the best
of several repeats. Distortion (the largest change of a value, or the Euclidean norm) is the mean over pictures that
both sides have broken. In Carlini and Wagner's attack, ours chooses its own step, with settings that were tuned on
the first pictures of both sets (`--skip` leaves them out), and foolbox gets the best of several steps and weights;
`--long` adds a row in which the reference searches nine times longer. If foolbox's attack fails, it returns a black
picture and counts it as a success if its answer differs: here it counts as a failure.

`--queries 100,1000` compares the attacks that only ask the model instead, on a CPU: `square` with ART's Square attack,
and `square_label` with HopSkipJump of foolbox and of ART. A wrapper counts every picture that the model is asked about,
including those that only fill up a batch, and stops HopSkipJump when its queries are spent or no picture is left to
break. HopSkipJump succeeds if it ever asked about a fault within the radius; it starts with uniform noise, or with
another picture where the noise is no fault, which costs it nothing. Time is CPU time, the best of three repeats below
1,000 queries. Results are stored row by row.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal

import numpy as np
import torch
from paper import read_pictures, read_target, write_json
from rich.console import Console
from rich.table import Table
from searching.arguments import add_quick, complete
from torch import Tensor, nn

from themis import Target
from themis.oracle import Wrong
from themis.perturb import Context, Perturbation, perturb
from themis.perturb.attack import APGD_FIRST_STEP, ATTACKS, PGD_STEP, PGD_STEPS
from themis.perturb.attack import APGD_STEPS as AUTO_STEPS
from themis.perturb.attack import CW_SEARCHES as SEARCHES
from themis.perturb.attack import CW_STEPS as CARLINI_STEPS
from themis.perturb.names import read_perturbation

ASKING_RADIUS = {"LeNet-5": 0.13, "ResNet-56": 2 / 255}
"""The radius of attacks that only ask, if it is not that of FGSM; chosen on other pictures."""
REPEATS = 3
"""Repeats of comparisons with less than 1,000 queries; the shortest time counts."""
FIRST_SAMPLES = (10, 100)
"""The samples of HopSkipJump's first estimate of the gradient with few queries, and by default."""
POINTS, MORE = 1.0, 1.05
"""Aims: success at most `POINTS` points below the reference, and at most `MORE` times its distortion."""
BATCH = {"cpu": 64, "cuda": 256}
SHORT = f"{SEARCHES}x{CARLINI_STEPS}"
OURS = {attack.name: attack for attack in ATTACKS}
QUICK: dict[str, Any] = {"n": 16, "attacks": "fgsm,pgd,cw", "repeats": 1}
FULL: dict[str, Any] = {"n": 256, "attacks": ",".join(OURS), "repeats": 3}


@dataclass(frozen=True)
class AttackedModel:
    """A model, pictures that it classifies correctly, and the strength of the attacks."""

    name: str
    target: Target
    inputs: Tensor
    labels: Tensor
    box: float
    ball: float
    confidence: float
    rate: float
    first_weight: float
    """Foolbox's step and first weight in Carlini and Wagner's attack: the best of several."""


@dataclass(frozen=True)
class Row:
    attack: str
    theta: float
    steps: str
    norm: Literal["max", "l2"]
    theirs: Callable[[Tensor, Tensor], Tensor]


class WithPreprocessing(nn.Module):
    """The model including its preprocessing, as the references expect it."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.module, self.target = target.module, target

    def forward(self, inputs: Tensor) -> Tensor:
        return self.target.forward(inputs)


def rows(bench: AttackedModel, requested: list[str], is_long: bool) -> list[Row]:
    module, device = WithPreprocessing(bench.target).eval(), bench.target.device
    foolbox = reference("foolbox")
    model = foolbox.PyTorchModel(module, bounds=bench.target.bounds, device=device)

    def fixed(attack: Any, radius: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda inputs, labels: attack(model, inputs, labels, epsilons=radius)[1]

    def nearest(confidence: float, searches: int, steps: int, stops: bool) -> Callable[[Tensor, Tensor], Tensor]:
        attack = foolbox.attacks.L2CarliniWagnerAttack(
            binary_search_steps=searches,
            steps=steps,
            stepsize=bench.rate,
            initial_const=bench.first_weight,
            confidence=confidence,
            abort_early=stops,
        )
        return lambda inputs, labels: attack(model, inputs, labels, epsilons=None)[0]

    box, ball = bench.box, bench.ball
    in_box = foolbox.attacks.LinfProjectedGradientDescentAttack(rel_stepsize=PGD_STEP, steps=PGD_STEPS)
    in_ball = foolbox.attacks.L2ProjectedGradientDescentAttack(rel_stepsize=PGD_STEP, steps=PGD_STEPS)
    candidates = [
        Row("fgsm", box, "1", "max", fixed(foolbox.attacks.LinfFastGradientAttack(), box)),
        Row("pgd", box, str(PGD_STEPS), "max", fixed(in_box, box)),
        Row("pgd_l2", ball, str(PGD_STEPS), "l2", fixed(in_ball, ball)),
        Row("cw", 0.0, SHORT, "l2", nearest(0.0, SEARCHES, CARLINI_STEPS, False)),
        Row("cw", bench.confidence, SHORT, "l2", nearest(bench.confidence, SEARCHES, CARLINI_STEPS, False)),
    ]
    if "apgd" in requested:
        candidates.insert(3, Row("apgd", box, str(AUTO_STEPS), "max", auto(module, bench)))
    if is_long:
        candidates.append(Row("cw", 0.0, f"{SHORT}, theirs 9x100", "l2", nearest(0.0, 9, 100, True)))
    return [row for row in candidates if row.attack in requested]


def art_classifier(module: nn.Module, bench: AttackedModel) -> Any:
    return reference("art.estimators.classification").PyTorchClassifier(
        module, nn.CrossEntropyLoss(), tuple(bench.inputs.shape[1:]), 10, clip_values=bench.target.bounds,
        device_type="cpu" if bench.target.device.type == "cpu" else "gpu",
    )  # fmt: skip


def auto(module: WithPreprocessing, bench: AttackedModel) -> Callable[[Tensor, Tensor], Tensor]:
    device = bench.target.device
    classifier = art_classifier(module, bench)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        attack = reference("art.attacks.evasion").AutoProjectedGradientDescent(
            classifier, eps=bench.box, eps_step=APGD_FIRST_STEP * bench.box, max_iter=AUTO_STEPS, nb_random_init=1,
            batch_size=len(inputs), verbose=False,
        )  # fmt: skip
        return torch.from_numpy(attack.generate(inputs.cpu().numpy(), labels.cpu().numpy())).to(device)

    return run


def reference(module: str) -> Any:
    """A library of attacks; the benchmark ends here if it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        print(f'skipped: this benchmark needs the reference attacks ({error}): pip install "themis-dl[attacks]"')
        sys.exit(0)


def ours(row: Row, bench: AttackedModel, attack: Perturbation | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        def margin(outputs: Tensor) -> Tensor:
            return Wrong().compare(outputs, outputs, labels).margin

        context = Context(bench.target.bounds, bench.target, labels, margin=margin)
        theta = torch.full((len(inputs), 1), row.theta, device=inputs.device)
        noise_seed = torch.arange(len(inputs), device=inputs.device)
        return perturb(attack or OURS[row.attack], inputs, theta, noise_seed, context)

    return run


class QueriesSpentError(Exception):
    """Ends an attack that would go on asking."""


class Asked(nn.Module):
    """The model; counts the pictures that it is asked about."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.model: nn.Module = WithPreprocessing(target)
        self.n_asked, self.left = 0, math.inf
        self.inputs = self.labels = self.is_broken = torch.empty(0)
        self.radius = 0.0
        self.seconds = 0.0
        """CPU time of remembering faults, which is not the attack's."""

    def watch(self, inputs: Tensor, labels: Tensor, radius: float, queries: int) -> None:
        """Remember which of `inputs` had a fault within the radius, for `queries` questions about each at most."""
        self.inputs, self.labels, self.radius, self.left = inputs, labels, radius, queries * len(inputs)
        self.is_broken = torch.zeros(len(inputs), dtype=torch.bool)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.left < len(inputs) or (len(self.is_broken) and bool(self.is_broken.all())):
            raise QueriesSpentError
        self.n_asked += len(inputs)
        self.left -= len(inputs)
        outputs: Tensor = self.model(inputs)
        if len(self.is_broken):
            start = process_time()
            is_inside = (inputs - self.inputs).flatten(1).abs().amax(1) <= self.radius * (1 + 1e-4)
            is_fault = is_inside & (outputs.argmax(1) != self.labels)
            self.is_broken |= is_fault if len(self.inputs) > 1 else is_fault.any()
            self.seconds += process_time() - start
        return outputs


def asking_attacks(bench: AttackedModel, queries: int) -> dict[str, dict[str, Callable[[Asked], Tensor]]]:
    """By the name of our attack, every tool's function of the model that returns which pictures were broken."""
    radius, inputs, labels = bench.box, bench.inputs, bench.labels
    n_first = FIRST_SAMPLES[queries >= 1000]
    in_box = Row("square", radius, "", "max", lambda inputs, labels: inputs)

    def themis(name: str) -> Callable[[Asked], Tensor]:
        def run(asked: Asked) -> Tensor:
            attack = read_perturbation(f"{name}(queries={queries})")
            asked.model = bench.target.module
            target = Target(asked, bounds=bench.target.bounds, preprocess=bench.target.preprocess)
            asking = replace(bench, target=target)
            return judge(ours(in_box, asking, attack)(inputs, labels), in_box, bench)[0]

        return run

    def art_square(asked: Asked) -> Tensor:
        attack = reference("art.attacks.evasion").SquareAttack(
            art_classifier(asked, bench), eps=radius, max_iter=queries // 3 - 1, verbose=False
        )  # three queries per step, and three at the start
        return judge(torch.from_numpy(attack.generate(inputs.numpy(), labels.numpy())), in_box, bench)[0]

    def starts() -> Tensor:
        low, high = bench.target.bounds
        noise = torch.rand_like(inputs) * (high - low) + low
        is_fault = bench.target.forward(noise).argmax(1) != labels
        other = (labels[:, None] != labels).float().argmax(1)
        return torch.where(is_fault.view(-1, 1, 1, 1), noise, inputs[other])

    @torch.no_grad()
    def foolbox_jump(asked: Asked) -> Tensor:
        foolbox = reference("foolbox")
        attack = foolbox.attacks.HopSkipJumpAttack(initial_gradient_eval_steps=n_first, constraint="linf")
        model = foolbox.PyTorchModel(asked, bounds=bench.target.bounds, device="cpu")
        asked.watch(inputs, labels, radius, queries)
        with contextlib.suppress(QueriesSpentError):
            attack.run(model, inputs, foolbox.criteria.Misclassification(labels), starting_points=starts())
        return asked.is_broken

    def art_jump(asked: Asked) -> Tensor:
        attack = reference("art.attacks.evasion").HopSkipJump(
            art_classifier(asked, bench), norm="inf", max_iter=1000, init_eval=n_first, verbose=False
        )
        is_broken, first = [], starts()
        for k in range(len(inputs)):
            one = slice(k, k + 1)
            asked.watch(inputs[one], labels[one], radius, queries)
            with contextlib.suppress(QueriesSpentError):
                attack.generate(inputs[one].numpy(), labels[one].numpy(), x_adv_init=first[one].numpy())
            is_broken.append(asked.is_broken)
        return torch.cat(is_broken)

    return {
        "square": {"Themis": themis("square"), "ART": art_square},
        "square_label": {"Themis": themis("square_label"), "foolbox": foolbox_jump, "ART": art_jump},
    }


def measure_asking(
    name: str, tools: dict[str, Callable[[Asked], Tensor]], bench: AttackedModel, repeats: int
) -> dict[str, Any]:
    result: dict[str, Any] = {"model": bench.name, "attack": name, "theta": bench.box, "n": len(bench.inputs)}
    for _ in range(repeats):
        for tool, attack in tools.items():
            torch.manual_seed(0)
            np.random.seed(0)
            asked = Asked(bench.target).eval()
            start = process_time()
            is_broken = attack(asked)
            seconds = process_time() - start - asked.seconds
            result[tool] = {
                "success": float(is_broken.float().mean()),
                "queries": asked.n_asked / len(bench.inputs),
                "cpu_seconds": min(seconds, result.get(tool, {}).get("cpu_seconds", math.inf)),
            }
    return result


def compare_asking(benches: list[AttackedModel], queries: list[int], path: str | None) -> None:
    """Print and store every comparison without a gradient as soon as it is finished."""
    for module in ("foolbox", "art.attacks.evasion", "art.estimators.classification"):
        reference(module)  # importing takes time that is not the attack's
    results: list[dict[str, Any]] = []
    for bench in benches:
        narrow = replace(bench, box=ASKING_RADIUS.get(bench.name, bench.box))
        for name, tools in asking_attacks(narrow, 20).items():
            measure_asking(name, tools, narrow, 1)  # warm up
        for n in queries:
            for name, tools in asking_attacks(narrow, n).items():
                results.append({"queries": n, **measure_asking(name, tools, narrow, REPEATS if n < 1000 else 1)})
                print(results[-1], flush=True)
                if path:
                    write_json(path, bench.inputs.device, results)


def in_batches(attack: Callable[[Tensor, Tensor], Tensor], bench: AttackedModel) -> tuple[Tensor, float]:
    """The attacked pictures, and the seconds that the attack took."""
    device = bench.inputs.device
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    size = BATCH[device.type]
    wait()
    start = perf_counter()
    batches = zip(torch.split(bench.inputs, size), torch.split(bench.labels, size), strict=True)
    attacked = torch.cat([attack(*pair) for pair in batches])
    wait()
    return attacked, perf_counter() - start


def judge(attacked: Tensor, row: Row, bench: AttackedModel) -> tuple[Tensor, Tensor]:
    """Which pictures were broken, and how far each was changed."""
    with torch.no_grad():
        batches = torch.split(attacked, BATCH[attacked.device.type])
        outputs = torch.cat([bench.target.forward(batch) for batch in batches])
    margin = Wrong().compare(outputs, outputs, bench.labels).margin
    change = (attacked - bench.inputs).flatten(1)
    length = change.norm(dim=1) if row.norm == "l2" else change.abs().amax(1)
    is_broken = (margin < -(row.theta if row.attack == "cw" else 0.0)) & attacked.flatten(1).any(1)
    if row.attack != "cw":
        assert float(length.max()) <= row.theta * (1 + 1e-4) + 1e-6, "inside the ball"
    return is_broken, length


def measure(row: Row, bench: AttackedModel, repeats: int) -> dict[str, Any]:
    sides = {"ours": ours(row, bench), "theirs": row.theirs}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    judged: dict[str, tuple[Tensor, Tensor]] = {}
    torch.manual_seed(0)
    for _ in range(repeats):
        for side, attack in sides.items():
            attacked, elapsed = in_batches(attack, bench)
            seconds[side].append(elapsed)
            judged.setdefault(side, judge(attacked, row, bench))
    both = judged["ours"][0] & judged["theirs"][0]
    result: dict[str, Any] = {"model": bench.name, "attack": row.attack, "theta": row.theta, "steps": row.steps}
    for side, (is_broken, length) in judged.items():
        result[side] = {
            "success": float(is_broken.float().mean()),
            "distortion": float(length[both].mean()) if bool(both.any()) else None,
            "seconds": seconds[side],
            "per_second": len(bench.inputs) / min(seconds[side]),
        }
    result["n"], result["n_both"] = len(bench.inputs), int(both.sum())
    result["ratio"] = result["ours"]["per_second"] / result["theirs"]["per_second"]
    return result


def is_met(result: dict[str, Any]) -> bool:
    a, b = result["ours"], result["theirs"]
    is_near = a["distortion"] is None or a["distortion"] <= MORE * b["distortion"]
    return bool(a["success"] >= b["success"] - POINTS / 100 - 1e-9 and is_near and result["ratio"] >= 1)


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"Ours / theirs; aim: {POINTS:g} point of success, {MORE - 1:.0%} of distortion, and as fast")
    columns = ("model", "attack", "theta", "steps", "pictures", "success %", "distortion", "pictures/s", "ratio", "aim")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "attack", "aim") else "right")
    for r in results:
        both = [r["ours"], r["theirs"]]
        table.add_row(
            r["model"], r["attack"], f"{r['theta']:.4g}", r["steps"], str(r["n"]),
            " / ".join(f"{100 * side['success']:.1f}" for side in both),
            " / ".join("-" if side["distortion"] is None else f"{side['distortion']:.4f}" for side in both),
            " / ".join(f"{side['per_second']:,.1f}" for side in both),
            f"{r['ratio']:.2f}", "met" if is_met(r) else "missed",
        )  # fmt: skip
    console.print(table)


def benches(arguments: argparse.Namespace, device: torch.device) -> list[AttackedModel]:
    """Every model with `--n` correctly classified pictures."""
    models = []
    if os.environ.get("THEMIS_DATA") or (arguments.data and arguments.weights):
        pictures, target = read_pictures(arguments.data), read_target(arguments.weights, device)
        models.append(("ResNet-56", target, pictures.inputs, pictures.labels, (0.5 / 255, 0.1, 5.0, 0.01, 1e-3)))
    if os.environ.get("THEMIS_DATA"):
        from themis_lab import zoo

        target, digits = zoo.load("lenet5-mnist"), zoo.data("lenet5-mnist")
        models.append(("LeNet-5", target, digits.inputs, digits.labels, (0.1, 1.0, 5.0, 0.3, 1.0)))
    if not models:
        from themis_lab.cli.demo import make_data, make_model

        digits = make_data()
        models.append(
            ("LeNet-5, digits", Target(make_model()), digits.inputs, digits.labels, (0.1, 1.5, 5.0, 0.3, 1.0))
        )
    attacked_models = []
    for name, target, inputs, labels, strength in models:
        if arguments.models and name not in arguments.models.split(","):
            continue
        target.module.eval().to(device)
        assert labels is not None
        window = slice(arguments.skip, arguments.skip + 2 * arguments.n)
        inputs, labels = inputs[window].to(device), labels[window].to(device)
        with torch.no_grad():
            answers = torch.cat([target.forward(batch).argmax(1) for batch in torch.split(inputs, BATCH[device.type])])
        correct = (answers == labels).nonzero().squeeze(1)[: arguments.n]
        attacked_models.append(AttackedModel(name, target, inputs[correct].contiguous(), labels[correct], *strength))
    return attacked_models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    add_quick(parser)
    parser.add_argument("--n", type=int, help="pictures per model; a quarter of them for cw")
    parser.add_argument("--skip", type=int, default=0, help="number of pictures to leave out at the beginning")
    parser.add_argument("--attacks", help="apgd needs ART, the others foolbox")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--queries", help="compare the attacks that only ask the model, with these numbers of queries")
    parser.add_argument("--models", help="only these, such as LeNet-5")
    parser.add_argument(
        "--long",
        action="store_true",
        help="also compare Carlini and Wagner's attack with a longer search of the reference",
    )
    parser.add_argument("--data", type=Path, help="NumPy archive of CIFAR-10's test set, instead of the data folder")
    parser.add_argument("--weights", type=Path, help="ResNet-56's state dict, instead of the data folder's")
    parser.add_argument("--json", "--out", help="write the raw results to this file")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    device = torch.device(arguments.device)
    reference("foolbox")
    attacked_models = benches(arguments, device)
    if arguments.queries:
        compare_asking(attacked_models, [int(n) for n in arguments.queries.split(",")], arguments.json)
        return
    results = []
    for bench in attacked_models:
        fewer = replace(bench, inputs=bench.inputs[: arguments.n // 4], labels=bench.labels[: arguments.n // 4])
        for row in rows(bench, arguments.attacks.split(","), arguments.long):
            is_long = row.steps != SHORT and row.attack == "cw"
            if not is_long:
                measure(row, replace(bench, inputs=bench.inputs[:8], labels=bench.labels[:8]), 1)  # warm up
            results.append(measure(row, fewer if row.attack == "cw" else bench, 1 if is_long else arguments.repeats))
    show(results, Console(width=None if sys.stdout.isatty() else 140))
    if arguments.json:
        write_json(arguments.json, device, results)


if __name__ == "__main__":
    main()
