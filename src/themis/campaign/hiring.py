"""Hiring workers for a campaign: what they are sent, and how they create the model and the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import torch

from themis.campaign.measurer import LocalMeasurer
from themis.campaign.remote import RemoteMeasurer
from themis.campaign.setup import Hire
from themis.campaign.tested import read_tested
from themis.campaign.worker import CampaignCase, ChunkWorker
from themis.compute.cluster import RayExecutor, connected
from themis.compute.worker_pool import RayPool
from themis.data.seeds import Seeds
from themis.errors import DataError, UsageError
from themis.measure.calculator import Calculator
from themis.oracle import choose_oracle
from themis.perturb import Perturbation
from themis.runs.source import Origin
from themis.search import Policy
from themis.settings import Settings
from themis.target.activations import Layer
from themis.target.blackbox import BlackBox
from themis.target.fingerprint import hash_tensors
from themis.target.target import AnyTarget


def check_workers(executor: RayExecutor, target: AnyTarget, policy: Policy, settings: Settings) -> None:
    """Refuse campaigns that workers cannot run."""
    executor.check_device(target.device.type)
    if isinstance(target, BlackBox):
        raise UsageError(
            "executor ray runs models in its workers, but a black box is asked over a connection of its own: use the "
            "local executor, and BlackBox(..., workers=...) to send several requests at once"
        )
    if settings.criterion is not None or policy.rivals or policy.is_guided:
        raise UsageError(
            "executor ray measures sensitivities only, and a criterion must see every activation in order: use the "
            "local executor, or themis compare --executor ray, which runs whole campaigns in workers"
        )


@contextmanager
def hired(
    executor: RayExecutor | None,
    target: AnyTarget,
    seeds: Seeds,
    perturbation: Perturbation,
    settings: Settings,
    origin: Origin | None,
) -> Iterator[Hire]:
    """What runs the inputs and tests of a campaign: this process, or workers that end with the block.

    The target must not be open yet.
    """
    if executor is None:
        yield LocalMeasurer
        return
    with connected(executor) as ray:
        words = origin if origin is not None and (origin.data or origin.zoo) else None
        pickled = _pickled(target, words)
        pools: list[RayPool] = []

        def hire(calculator: Calculator) -> RemoteMeasurer:
            recipe = WorkerRecipe(
                pickled,
                words,
                seeds if words is None else None,
                _sample_hash(seeds),
                perturbation,
                calculator.layers,
                calculator.chunk,
                settings,
                f"themis-{uuid4().hex}",
            )
            pools.append(RayPool(ray, executor, recipe))
            return RemoteMeasurer(calculator, pools[-1])

        try:
            yield hire
        finally:
            for pool in pools:
                pool.close()


@dataclass(frozen=True)
class WorkerRecipe:
    """Creates a worker in its own process. The model is sent with it; data that has a name is read by the worker."""

    pickled_target: bytes | None
    """None if workers create the target from the origin too."""
    origin: Origin | None
    seeds: Seeds | None
    """None if workers read them from the origin."""
    sample_hash: str
    perturbation: Perturbation
    layers: tuple[Layer, ...]
    chunk: int
    settings: Settings
    name: str

    def __call__(self) -> ChunkWorker:
        import pickle

        target: AnyTarget
        if self.pickled_target is not None:
            target = pickle.loads(self.pickled_target)
        elif self.origin is not None:
            target = self.origin.target()
        seeds = self.seeds
        if seeds is None and self.origin is not None:
            target, seeds, *_ = read_tested(
                target, self.origin.read(), [self.perturbation], self.settings, self.origin, None, None
            )
        assert seeds is not None
        if _sample_hash(seeds) != self.sample_hash:
            raise DataError(
                "workers must read the same data as the driver, but one of them has read other inputs: make the same "
                "files visible on all machines"
            )
        oracle = choose_oracle(target.oracle)
        return ChunkWorker(
            CampaignCase(target, seeds, self.perturbation, oracle, self.layers, self.chunk, self.settings, self.name)
        )


def _pickled(target: AnyTarget, words: Origin | None) -> bytes | None:
    """The target with its weights, to be sent once; None if it cannot be pickled but has a name."""
    from ray import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(target)
    except Exception as error:
        if words is not None:
            return None
        raise UsageError(
            f"a model that is sent to workers must be picklable, but pickling it raised {type(error).__name__}: "
            f"{' '.join(str(error).split())}; name it as module:factory, on the command line or in origin=..."
        ) from error
    return pickled


def _sample_hash(seeds: Seeds) -> str:
    """A hash of which seeds there are, and of some of their inputs: reading all would take as long as the data is."""
    rows = torch.tensor(sorted({0, len(seeds) // 2, len(seeds) - 1}))
    return hash_tensors({"seed_id": seeds.seed_id, "inputs": seeds.take(rows).cpu()})
