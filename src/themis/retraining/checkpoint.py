"""The checkpoint of a training: its complete state after an epoch, in one file that is written atomically."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.errors import StoreError, UsageError
from themis.oracle import Oracle
from themis.perturb import Perturbation
from themis.reading import open_regular
from themis.retraining.grading import name_loss
from themis.retraining.material import Material
from themis.retraining.recipe import Recipe
from themis.runs.store.files import explained, write_file
from themis.target.fingerprint import hash_tensors, hash_text
from themis.target.ledger import Ledger
from themis.target.target import Target

CHECKPOINT_FILE = "checkpoint.pt"

State = dict[str, Any]
"""Plain data and tensors."""


def training_key(
    target: Target,
    material: Material,
    perturbations: Mapping[str, Perturbation],
    recipe: Recipe,
    oracle: Oracle,
    ledger: Ledger,
) -> str:
    """Identifies a training by everything that its weights depend on, except for devices and versions."""
    tensors = {
        "disturbed": material.disturbed,
        "labels": material.disturbed_labels,
        "seed": material.seed,
        "seeds": torch.from_numpy(ledger.hashes.view(np.int64)),
        **({} if material.groups is None else {"groups": torch.from_numpy(np.concatenate(material.groups))}),
    }
    cases = [
        (name, perturbation.name, [(theta.name, theta.low, theta.high) for theta in perturbation.theta])
        for name, perturbation in perturbations.items()
    ]
    options = recipe.of_training()
    if not recipe.shortens(perturbations.values()):
        del options["attack_steps"]  # it has no effect
    parts = [options, cases, oracle.spec(), target.fingerprint(), hash_tensors(tensors)]
    return hash_text(json.dumps(parts if material.loss is None else [*parts, name_loss(material.loss)]))


def take_weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters and buffers, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in _named_tensors(module).items()}


def put_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a module, converted to the types of the module."""
    with torch.no_grad():
        for name, tensor in _named_tensors(module).items():
            tensor.copy_(weights[name])


def save(folder: Path, state: State) -> None:
    """Write the state, replacing the previous one."""
    with explained(folder):
        folder.mkdir(exist_ok=True)  # not its parents: the folder of the retraining may have been deleted
        content = BytesIO()
        torch.save(state, content)
        write_file(folder / CHECKPOINT_FILE, content.getvalue())


def load(folder: Path, key: str) -> State | None:
    """The state from which a training resumes; None if there is no checkpoint."""
    path = folder / CHECKPOINT_FILE
    try:
        with open_regular(path) as file:
            state: State = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise ValueError("it holds no state")
    except FileNotFoundError:
        return None
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{path} must be the checkpoint of a training, but it is damaged: remove it to start again"
        ) from error
    if state.get("key") != key:
        raise UsageError(
            f"{path} must belong to this training, but it is from one with another model, material or recipe: give "
            "another folder, or remove the file to start again"
        )
    return state


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
