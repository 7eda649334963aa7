"""Experiment trackers, as callbacks. Each needs a package of its own, which is imported when the tracker is made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from themis.campaign.callback import report_failure
from themis.errors import UsageError, nearest
from themis.report.trackers.mlflow import MLflow
from themis.report.trackers.tensorboard import TensorBoard
from themis.report.trackers.tracker import Tracker, calm
from themis.report.trackers.wandb import Wandb

TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[Wandb]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}
"""The trackers by name."""
__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "Wandb", "choose_trackers", "finish"]


def choose_trackers(specs: Iterable[str], out: str | Path | None) -> list[Tracker]:
    """Trackers by NAME or NAME:PLACE; without a place they write to the folder `track/NAME` of the run."""
    chosen: list[Tracker] = []
    for spec in specs:
        name, _, place = spec.partition(":")
        if name not in TRACKERS:
            raise UsageError(f"unknown tracker {name!r}: {nearest(name, TRACKERS)}")
        if not place and out is None:
            raise UsageError(f"the tracker {name} must have a place, as {name}:FOLDER, the run has no folder: name one")
        chosen.append(TRACKERS[name](place or Path(str(out)) / "track" / name, run=out, stays_open=True))
    return chosen


def finish(trackers: Iterable[Tracker], *files: Path) -> None:
    """Attach files that were written after the campaign, as its report, and close; a failure is a warning."""
    for each in trackers:
        try:
            with calm():
                for file in files:
                    if each.is_open:
                        each.attach(file)
            each.close()
        except Exception as error:
            report_failure(each, f"when it was closed, {len(files)} files may be missing there", error)
