"""The executor `ray`, by which campaigns ask for workers."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Self

from themis.campaign.setup import CampaignPlan, MakeMeasurer, TestedModel
from themis.errors import UsageError
from themis.search import Policy
from themis.settings import Settings
from themis.target.blackbox import BlackBox
from themis.target.target import AnyTarget
from themis_integrations.ray.cluster import RayWorkers, import_ray
from themis_integrations.ray.measurer import start_workers


@dataclass(frozen=True)
class RayExecutor(RayWorkers):
    """Work runs in workers on Ray (`pip install 'themis-dl[ray]'`). Where it runs never changes its results.

    Args:
        workers: Number of workers; each of them holds the model.
        address: Address of a running cluster, `auto` for one that was started on this machine; by default
            `RAY_ADDRESS`, or else a Ray of its own that ends with the work.
        cpus_per_worker: CPUs reserved for each worker, and its number of threads; by default 1, or in a run that is
            resumed as many threads as it was started with. Kernels may round differently with another number.
        gpus_per_worker: GPUs reserved for each worker; 0.5 lets two workers share one.
    """

    def with_threads(self, threads: int | None) -> Self:
        """The same with as many threads per worker; None leaves that to the executor. Raises if Ray is missing."""
        import_ray()
        if threads is None:
            return self
        if self.cpus_per_worker not in (None, threads):
            raise UsageError(
                f"cpus_per_worker must be {threads}, the threads that these results are computed with, got "
                f"{self.cpus_per_worker}: leave it out"
            )
        return replace(self, cpus_per_worker=threads)

    def check_device(self, device: str) -> None:
        """Refuse workers without a GPU for a model on one, and GPUs for a model that uses none."""
        if device == "cuda" and not self.gpus_per_worker:
            raise UsageError("gpus_per_worker must exceed 0 for a cuda model: pass 1, or 0.5 for two workers per GPU")
        if device == "cpu" and self.gpus_per_worker:
            raise UsageError(
                f"gpus_per_worker must be 0 for a CPU model, got {self.gpus_per_worker:g}: move it to cuda"
            )

    def check(self, target: AnyTarget, policy: Policy, settings: Settings) -> None:
        """Refuse campaigns that workers cannot run."""
        self.check_device(target.device.type)
        if isinstance(target, BlackBox):
            raise UsageError(
                "executor ray runs models in its workers, but a black box is asked over a connection of its own: use "
                "the local executor, and BlackBox(..., workers=...) to send several requests at once"
            )
        if settings.criterion is not None or policy.rivals or policy.is_guided:
            raise UsageError(
                "executor ray measures sensitivities only, and a criterion must see every activation in order: use the "
                "local executor, or themis compare --executor ray, which runs whole campaigns in workers"
            )

    def measurers(self, tested: TestedModel, plan: CampaignPlan) -> AbstractContextManager[MakeMeasurer]:
        """Start the workers of a campaign, whose target is not open yet."""
        return start_workers(self, tested, plan)
