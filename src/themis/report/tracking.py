"""The experiment trackers that `--track` names; packages add them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from themis.campaign.callback import Callback, report_failure
from themis.errors import UsageError, nearest
from themis.plugins import Extensible


class Tracker(Callback):
    """A callback that logs a campaign to an experiment tracker; whoever creates it must close it."""

    def attach(self, file: Path) -> None:
        """Attach a file that was written after the campaign, if the tracker can hold files."""

    def close(self) -> None:
        """Finish writing."""


TRACKERS: Extensible[Callable[..., Tracker]] = Extensible("themis.trackers", {})
"""Functions `(place, *, run, stays_open) -> Tracker`, by name."""


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


def close_trackers(trackers: Iterable[Tracker], *files: Path) -> None:
    """Attach files such as the report, and close the trackers; a failure becomes a warning."""
    for tracker in trackers:
        try:
            for file in files:
                tracker.attach(file)
            tracker.close()
        except Exception as error:
            report_failure(tracker, f"while closing, so up to {len(files)} files may not be attached", error)
