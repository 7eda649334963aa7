"""Campaigns in workers on Ray: on the cores or GPUs of one machine, or on a cluster."""

from themis_integrations.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
