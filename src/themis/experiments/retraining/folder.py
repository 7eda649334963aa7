"""The folder of a retraining: its plan, every finished step, each a file of its own, and the results."""

from __future__ import annotations

from typing import Any

from themis.experiments.folder import PlannedFolder
from themis.experiments.retraining.plan import FREE

RESULT, TABLE, FIGURE, WEIGHTS = "retrain.json", "table.md", "figure.png", "weights.safetensors"


class Folder(PlannedFolder):
    """Where a retraining is kept."""

    work = "retraining"

    def decisive(self, record: dict[str, Any]) -> dict[str, Any]:
        """What decides a step: most of the plan's options, the recipe, the run."""
        plan = {name: value for name, value in record["plan"].items() if name not in FREE}
        return {**record, **plan, **record["recipe"], "plan": None, "recipe": None}
