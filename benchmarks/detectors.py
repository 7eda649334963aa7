"""Retraining a detector of torchvision by its own losses, on scenes of digits.

    THEMIS_DATA=FOLDER python benchmarks/detectors.py --no-quick --device cuda [--model fcos] [--json FILE]

The detector is trained from scratch on scenes of one to four digits of MNIST in colour, on textured grounds, for
--train-seconds. A campaign then disturbs scenes of other digits, and `themis.retrain` trains copies of the detector,
as its documentation says. Scores are F1 scores on judge scenes, which nothing was searched, trained or chosen on.
--quick, the default on a CPU, trains for a moment and stops there: such a detector finds nothing yet.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import asdict
from math import cos, pi
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from searching.arguments import add_quick, complete
from searching.files import write_results
from torch import Tensor, nn

import themis
from themis.experiments import CellEnd, Listener
from themis.retraining.grading import own_loss
from themis.target.detections import Detections
from themis_lab.zoo.datasets import read_mnist

SIDE, PLACE, N_PLACES, DIGIT = 128, 64, 4, 28
"""Pixels of a scene, and of the square quarters that may show a digit each; pixels of a digit of MNIST."""
SIZES = (26, 56)
"""The least and the greatest width of a digit in a scene, with its margin."""
SHOWN = 0.6
"""How likely a quarter shows a digit."""
LEAST_SCORE = 0.3
"""From which score a detection counts."""
N_CLASSES = 11
"""Ten digits; class 0 is what torchvision calls the background."""
BATCH_SIZE, PEAK_RATE, WARM_UP = 32, 1e-3, 0.05
RANDOM_SEEDS, EPOCHS, DRAWS = 2, 2, 4
QUICK: dict[str, Any] = {"train_seconds": 5.0, "retrain_seconds": 1.0, "train_scenes": 64, "scenes": 80, "tests": 0}
FULL: dict[str, Any] = {
    "train_seconds": 45.0,
    "retrain_seconds": 12.0,
    "train_scenes": 16_000,
    "scenes": 1_200,
    "tests": 1_200,
}


class Clock(Listener):
    """Prints what has ended, with the seconds since the start of the program."""

    def __init__(self) -> None:
        self.start, self.steps = perf_counter(), dict[str, float]()

    def tell(self, text: str) -> None:
        self.steps[text] = round(perf_counter() - self.start, 1)
        print(f"{self.steps[text]:7.1f} s  {text}", flush=True)

    def on_progress(self, text: str) -> None:
        self.tell(text)

    def on_cell_end(self, end: CellEnd) -> None:
        self.tell(end.text)


def draw_scenes(digits: Tensor, labels: Tensor, n: int, random_seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Scenes `[n, 3, 128, 128]` in 0..1, and their objects `[n, 4, 5]`: left, top, right, bottom and the digit."""
    rng = torch.Generator(device).manual_seed(random_seed)
    digits, labels = digits.to(device), labels.to(device)
    scenes, objects = [], []
    for first in range(0, n, 500):
        scene, found = _draw(digits, labels, min(500, n - first), rng)
        scenes.append(scene.cpu())
        objects.append(found.cpu())
    return torch.cat(scenes), torch.cat(objects)


def _draw(digits: Tensor, labels: Tensor, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    device = rng.device

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng, device=device)

    ground = 0.15 + 0.25 * uniform(n, 3, 1, 1)
    for cells, strength in ((4, 0.25), (16, 0.15), (SIDE, 0.08)):
        texture = F.interpolate(uniform(n, 3, cells, cells) - 0.5, SIDE, mode="bilinear")
        ground = ground + strength * texture
    n_places = n * N_PLACES
    rows = (uniform(n_places) * len(digits)).long()
    size = SIZES[0] + (SIZES[1] - SIZES[0]) * uniform(n_places)
    centre = size[:, None] / 2 + uniform(n_places, 2) * (PLACE - size[:, None])
    scale = PLACE / size
    shift = (PLACE - 2 * centre) / size[:, None]
    zero = torch.zeros_like(scale)
    matrix = torch.stack([torch.stack([scale, zero, shift[:, 0]], 1), torch.stack([zero, scale, shift[:, 1]], 1)], 1)
    grid = F.affine_grid(matrix, [n_places, 1, PLACE, PLACE], align_corners=False)
    ink = F.grid_sample(digits[rows], grid, align_corners=False)
    is_shown = uniform(n, N_PLACES) < SHOWN
    is_shown[:, 0] |= ~is_shown.any(1)
    ink = ink * is_shown.view(-1, 1, 1, 1)
    colour = 0.55 + 0.45 * uniform(n_places, 3, 1, 1)
    boxes = torch.stack(_bounds(ink[:, 0] > 0.3), 1).float().view(n, N_PLACES, 4)
    corner = PLACE * torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], device=device)
    boxes = boxes + corner.repeat(1, 2)
    number = torch.where(is_shown, labels[rows].view(n, N_PLACES), -1)
    objects = torch.cat([boxes * is_shown[..., None], number[..., None].float()], 2)
    ink, colour = (_in_scene(values.expand(-1, 3, PLACE, PLACE), n) for values in (ink, colour))
    return torch.lerp(ground, colour, ink).clamp(0, 1), objects


def _in_scene(quarters: Tensor, n: int) -> Tensor:
    """Quarters `[n * 4, 3, 64, 64]`, in the order of reading, put together."""
    return quarters.reshape(n, 2, 2, 3, PLACE, PLACE).permute(0, 3, 1, 4, 2, 5).reshape(n, 3, SIDE, SIDE)


def _bounds(mask: Tensor) -> tuple[Tensor, ...]:
    """Left, top, right and bottom of what is true."""
    across, down = mask.any(1).long(), mask.any(2).long()
    return across.argmax(1), down.argmax(1), PLACE - across.flip(1).argmax(1), PLACE - down.flip(1).argmax(1)


def make_fcos() -> nn.Module:
    """FCOS on the last three stages of a ResNet-18."""
    from torchvision.models.detection import FCOS
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    backbone = resnet_fpn_backbone(
        backbone_name="resnet18",
        weights=None,
        norm_layer=nn.BatchNorm2d,
        trainable_layers=5,
        returned_layers=[2, 3],
    )
    anchors = AnchorGenerator(((8,), (16,), (32,)), ((1.0,),) * 3)
    sizes = {"min_size": SIDE, "max_size": SIDE}
    model = FCOS(backbone, N_CLASSES, anchor_generator=anchors, topk_candidates=100, **sizes)
    nn.init.constant_(model.head.regression_head.bbox_reg.bias, 1.5)  # from 0, a ReLU behind it may never recover
    whole: nn.Module = model
    return whole


def make_faster_rcnn() -> nn.Module:
    """Faster R-CNN on MobileNetV3-Large."""
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    sizes = {"min_size": 2 * SIDE, "max_size": 2 * SIDE}
    model: nn.Module = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=N_CLASSES, **sizes
    )
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"fcos": make_fcos, "faster-rcnn": make_faster_rcnn}


def train(target: themis.Target, scenes: Tensor, objects: Tensor, seconds: float, clock: Clock) -> dict[str, float]:
    """Train the model of a target from scratch, with a rate that rises at first and then falls like a cosine."""
    optimiser = torch.optim.AdamW(target.module.parameters(), PEAK_RATE)
    pictures, boxes = scenes.mul(255).to(torch.uint8).to(target.device), objects.to(target.device)
    target.module.train()
    rng = torch.Generator().manual_seed(0)
    start, steps, shown = perf_counter(), 0, 0.0
    while (part := (perf_counter() - start) / seconds) < 1:
        rate = PEAK_RATE * min(1.0, part / WARM_UP, (1 + cos(pi * part)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        rows = torch.randint(len(pictures), (BATCH_SIZE,), generator=rng).to(target.device)
        loss = own_loss(target, pictures[rows].float() / 255, boxes[rows])
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(target.module.parameters(), 10.0)
        optimiser.step()
        steps += 1
        if part >= shown:
            shown += 0.1
            clock.tell(f"step {steps}, loss {float(loss.detach()):.3f}")
    target.module.eval()
    spent = perf_counter() - start
    return {"steps": steps, "seconds": round(spent, 2), "seconds_per_step": spent / steps, "loss": float(loss.detach())}


def measure(arguments: argparse.Namespace) -> None:
    """Train, search, retrain and examine, and store what is known after each step."""
    clock, device = Clock(), arguments.device
    folder = Path(os.environ["THEMIS_DATA"]) / "mnist"
    data = {}
    for part, (split, n) in enumerate((("train", arguments.train_scenes), ("test", arguments.scenes))):
        digits = read_mnist(folder, split=split)
        assert digits.labels is not None  # MNIST has them
        inputs = digits.take(torch.arange(len(digits)))
        data[split] = draw_scenes(inputs, digits.labels, n, part, device)
    clock.tell(f"drew {arguments.train_scenes:,} and {arguments.scenes:,} scenes")
    torch.manual_seed(0)
    target = themis.Target(
        MODELS[arguments.model]().to(device),
        oracle=f"detection:0.5,score={LEAST_SCORE}",
        preprocess=list,  # type: ignore[arg-type]  # the model takes a list of pictures
        output=Detections("torchvision", first_class=1),
        neurons="channel",
    )
    results: dict[str, Any] = {"settings": vars(arguments), "parameters": _count(target.module)}

    def store() -> None:
        results["steps"] = clock.steps
        if arguments.json:
            write_results(arguments.json, device, results)

    results["training"] = train(target, *data["train"], arguments.train_seconds, clock)
    clock.tell(f"trained for {results['training']['steps']:,} steps")
    store()
    if not arguments.tests:
        return
    run = themis.run(
        target,
        data["test"],
        arguments.perturb,
        magnitude=arguments.magnitude,
        max_tests=arguments.tests,
        coverage=None,
        split=(0.5, 0.2, 0.3),
    )
    last = run.rounds[-1]
    results["campaign"] = {
        "clean_map": run.start.clean_map,
        "usable": run.start.n_usable,
        "tests": last.tests,
        "faults": last.faults,
        "distinct_faults": last.distinct_faults,
        "fault_rate": None if run.fault_rate is None else asdict(run.fault_rate),
        "seconds": run.seconds.total,
    }
    clock.tell(f"campaign: mAP {run.start.clean_map:.3f} when clean, {last.distinct_faults:,} distinct faults")
    store()
    batches = max(1, round(arguments.retrain_seconds / EPOCHS / results["training"]["seconds_per_step"]))
    scenes, objects = data["train"]
    n_judge = round(0.3 * arguments.scenes)
    retrained = themis.retrain(
        run,
        target=target,
        data=data["test"],
        train=(scenes[: arguments.scenes], objects[: arguments.scenes]),
        listener=clock,
        random_seeds=RANDOM_SEEDS,
        epochs=EPOCHS,
        batches=batches,
        batch_size=BATCH_SIZE,
        draws=DRAWS,
        passes=n_judge + arguments.tests // 2,
    )
    results["retraining"] = {
        "batches": batches,
        "seeds": retrained.seeds,
        "share": retrained.model.share,
        "verdict": retrained.verdict,
        "change": {
            name: asdict(shift) for name, shift in vars(retrained.outcomes[0].change).items() if hasattr(shift, "after")
        },
        "frontier": [asdict(point) for point in retrained.frontier],
        "histories": [[asdict(epoch) for epoch in model.history] for model in retrained.models],
    }
    clock.tell("retrained")
    store()
    for sentence in retrained.verdict:
        print(sentence)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_quick(parser)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", choices=MODELS, default="fcos")
    parser.add_argument("--perturb", default="gaussian")
    parser.add_argument("--magnitude", type=float, default=0.25)
    parser.add_argument("--train-seconds", type=float, help="of training from scratch")
    parser.add_argument("--retrain-seconds", type=float, help="of the steps of each retraining, about")
    parser.add_argument("--train-scenes", type=int)
    parser.add_argument("--scenes", type=int, help="scenes that the split divides")
    parser.add_argument("--tests", type=int, help="tests of the campaign; 0 stops before it")
    parser.add_argument("--json", help="file for the results")
    arguments = complete(parser.parse_args(), QUICK, FULL)
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:  # it may have been built for another torch
        print(f"skipped: this benchmark needs torchvision: {error}")
        return
    measure(arguments)


if __name__ == "__main__":
    main()
