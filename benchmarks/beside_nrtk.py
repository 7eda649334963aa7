"""Gaussian noise on ResNet-56 and CIFAR-10, in MAITE's workflow with NRTK and with Themis, and in a Themis campaign.

    THEMIS_DATA=... python benchmarks/beside_nrtk.py [--no-quick] [--json FILE]

Needs `pip install maite nrtk scikit-image`. Model and data are those of the zoo, behind MAITE's protocols. Seconds are
CPU time; rows are stored as they are finished.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from paper import write_json
from searching.arguments import add_quick, complete

import themis
from themis_integrations import as_augmentation
from themis_lab import zoo

STANDARD_DEVIATIONS = (0.02, 0.04, 0.06, 0.08, 0.1)


class Model:
    """ResNet-56 as a model of MAITE."""

    def __init__(self) -> None:
        self.target: Any = zoo.load("resnet56-cifar10")
        self.target.module.eval()
        self.metadata = {"id": "resnet56"}

    def __call__(self, batch: Sequence[Any]) -> Sequence[Any]:
        pictures = torch.from_numpy(np.stack(list(map(np.asarray, batch)))).float()
        with torch.no_grad():
            return list(self.target.forward(pictures).numpy())


class Data:
    """The first test pictures of CIFAR-10 as a data set of MAITE, with how bright each is."""

    def __init__(self, n: int) -> None:
        seeds = zoo.data("resnet56-cifar10")[:n]
        assert seeds.labels is not None
        self.pictures, self.targets = seeds.inputs[:].numpy(), np.eye(10)[seeds.labels.numpy()]
        self.metadata = {"id": "cifar10"}

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, k: int) -> tuple[Any, Any, dict[str, Any]]:
        return self.pictures[k], self.targets[k], {"id": k, "brightness": float(self.pictures[k].mean())}


class Accuracy:
    """The share of correct answers as a metric of MAITE."""

    metadata = {"id": "accuracy"}  # noqa: RUF012

    def reset(self) -> None:
        self.hits: list[bool] = []

    def update(self, answers: Sequence[Any], targets: Sequence[Any], metadata: Sequence[Any]) -> None:
        self.hits += [bool(np.argmax(a) == np.argmax(t)) for a, t in zip(answers, targets, strict=True)]

    def compute(self) -> dict[str, float]:
        return {"accuracy": float(np.mean(self.hits))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, metavar="N")
    parser.add_argument("--json", help="write the raw results to this file")
    add_quick(parser)
    arguments = complete(parser.parse_args(), {"seeds": 200}, {"seeds": 2000})
    n = arguments.seeds
    if not os.environ.get("THEMIS_DATA"):
        print("skipped: this benchmark needs the data folder: set THEMIS_DATA")
        return
    try:
        from maite.tasks import evaluate
        from nrtk.impls.perturb_image.photometric.noise import GaussianNoisePerturber
        from nrtk.interop import MAITEImageClassificationAugmentation
    except ImportError as error:
        print(f"skipped: this benchmark needs MAITE and NRTK ({error}): pip install maite nrtk scikit-image")
        return
    model: Any = Model()
    data = Data(n)

    def nrtk(sigma: float) -> Any:
        noise = GaussianNoisePerturber(mean=0.0, var=sigma**2, seed=0, is_static=False)
        return MAITEImageClassificationAugmentation(augment=noise, augment_id="noise")

    results: dict[str, Any] = {"pictures": n, "rows": []}

    def store() -> None:
        if arguments.json:
            write_json(arguments.json, torch.device("cpu"), results)

    print("| standard deviation | accuracy, NRTK | accuracy, Themis | seconds, NRTK | seconds, Themis |")
    print("|---:|---:|---:|---:|---:|")
    for sigma in STANDARD_DEVIATIONS:
        row: dict[str, Any] = {"standard deviation": sigma}
        tools = {"NRTK": nrtk(sigma), "Themis": as_augmentation("gaussian", sigma=sigma)}
        for tool, augmentation in tools.items():
            began = time.process_time()
            options = {"model": model, "metric": Accuracy(), "dataset": data, "batch_size": 100}
            figures, *_ = evaluate(**options, augmentation=augmentation)
            row[tool] = {"accuracy": figures["accuracy"], "cpu_seconds": time.process_time() - began}
        accuracies, seconds = ([row[tool][key] for tool in tools] for key in ("accuracy", "cpu_seconds"))
        cells = [f"{sigma:g}", *(f"{each:.1%}" for each in accuracies), *(f"{each:.1f}" for each in seconds)]
        print("|", " | ".join(cells), "|", flush=True)
        results["rows"].append(row)
        store()
    began = time.process_time()
    run = themis.run(model, data, "gaussian(sigma=0:0.1)", max_passes=n * (1 + len(STANDARD_DEVIATIONS)))
    results["campaign"] = {
        "cpu_seconds": time.process_time() - began,
        "passes": run.counts.passes,
        "distinct_faults": run.counts.distinct_faults,
        "fault_rate": run.fault_rate and asdict(run.fault_rate),
        "correct_by_strength": [asdict(part) for part in run.correct_by_strength],
        "slices": [{**asdict(rate), "is_worse": rate in run.worst_slices} for rate in run.slices],
    }
    store()
    print(run)
    spent = f"{results['campaign']['cpu_seconds']:.0f} s, {run.counts.passes} passes"
    print(f"{spent}, clean accuracy {run.start.clean_accuracy:.1%}")
    for part in run.correct_by_strength:
        print(part)
    for rate in run.slices:
        print(rate)


if __name__ == "__main__":
    main()
