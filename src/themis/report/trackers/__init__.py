"""Experiment trackers, as callbacks. Each needs its own package, which is imported when the tracker is created."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from themis.campaign.callback import report_failure
from themis.errors import UsageError, nearest
from themis.report.trackers.mlflow import MLflow
from themis.report.trackers.tensorboard import TensorBoard
from themis.report.trackers.tracker import Tracker, no_warnings
from themis.report.trackers.wandb import Wandb

TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[Wandb]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}
"""The trackers by name."""
__all__ = ["TRACKERS", "MLflow", "TensorBoard", "Tracker", "Wandb", "choose_trackers", "finish"]


def choose_trackers(specs: Iterable[str], out: str | Path | None) -> list[Tracker]:
    """Create trackers from NAME or NAME:PLACE; without a place, a tracker writes to `track/NAME` in the run folder."""
    chosen: list[Tracker] = []
    for spec in specs:
        name, _, place = spec.partition(":")
        if name not in TRACKERS:
            raise UsageError(f"unknown tracker {name!r}: {nearest(name, TRACKERS)}")
        if not place and out is None:
            raise UsageError(f"the tracker {name} must have a place if the run has no folder: write {name}:FOLDER")
        chosen.append(TRACKERS[name](place or Path(str(out)) / "track" / name, run=out, stays_open=True))
    return chosen


def finish(trackers: Iterable[Tracker], *files: Path) -> None:
    """Attach files that were written after the campaign, such as its report, and close; a failure is a warning."""
    for tracker in trackers:
        try:
            with no_warnings():
                for file in files:
                    if tracker.is_open:
                        tracker.attach(file)
            tracker.close()
        except Exception as error:
            report_failure(tracker, f"while closing, so up to {len(files)} files may not be attached", error)
