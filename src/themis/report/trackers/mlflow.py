"""MLflow: a run in a database file, or on a tracking server."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.report.trackers.tracker import Plain, Tracker

if TYPE_CHECKING:
    from themis.runs.display.fault import Pixels

MAX_LENGTH = 500
"""Characters of a parameter; some servers refuse longer ones."""


class MLflow(Tracker):
    """Writes through its own client, so the active run of the caller is not affected.

    place: a tracking URI such as sqlite:////data/mlflow.db or http://host:5000, or a folder for a database file.
    """

    name, modules = "mlflow", ("mlflow",)

    def __init__(self, place: str | Path, *, experiment: str = "themis", **rest: Any) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local run sends nothing
        super().__init__(**rest)
        self.place, self.experiment = place, experiment

    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None:
        client: Any = import_module("mlflow.tracking").MlflowClient
        address, artifacts = self._address()
        with _quiet("mlflow.store.db.utils"):  # logs every table that it creates
            self._client = client(tracking_uri=address)
            known = self._client.get_experiment_by_name(self.experiment)
        if known is None:
            id = self._client.create_experiment(self.experiment, artifact_location=artifacts)
        else:
            id = known.experiment_id
        folder = "" if self.run is None else str(self.run.resolve())
        before = self._earlier(id, folder) if tests_before and folder else None
        if before is not None:
            self.run_id = before
            self._client.update_run(before, status="RUNNING")
            return
        self.run_id = self._client.create_run(id, run_name=title, tags={"themis.run": folder}).info.run_id
        for name, value in parameters.items():
            self._client.log_param(self.run_id, _key(name), str(value)[:MAX_LENGTH])

    def log_scalars(self, values: dict[str, float], tests: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, _key(name), float(value), step=tests)

    def log_pictures(self, pictures: list[tuple[str, Pixels]], tests: int) -> None:
        for k, (_, pixels) in enumerate(pictures):
            self._client.log_image(self.run_id, pixels, f"faults/{k}.png")
        self._client.log_text(self.run_id, "\n".join(caption for caption, _ in pictures), "faults/faults.txt")

    def log_verdict(self, text: str, tests: int) -> None:
        self._client.set_tag(self.run_id, "mlflow.note.content", text)

    def log_results(self, results: dict[str, float]) -> None:
        for name, value in results.items():
            self._client.log_metric(self.run_id, f"result/{_key(name)}", float(value))

    def attach(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def end(self, has_failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if has_failed else "FINISHED")

    def _address(self) -> tuple[str, str | None]:
        """The tracking URI, and the place for artifacts unless a server decides that."""
        if "://" in str(self.place):
            return str(self.place), None
        folder = Path(self.place).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}", (folder / "artifacts").as_uri()

    def _earlier(self, experiment: str, folder: str) -> str | None:
        """The MLflow run that the campaign had before it was resumed."""
        runs = self._client.search_runs([experiment], order_by=["attributes.start_time DESC"])
        return next((run.info.run_id for run in runs if run.data.tags.get("themis.run") == folder), None)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Show only the warnings of a logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _key(name: str) -> str:
    """A name with only the characters that MLflow allows."""
    return "".join(char if char.isalnum() or char in "_-. /" else "_" for char in name)
