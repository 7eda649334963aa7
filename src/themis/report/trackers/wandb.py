"""Weights & Biases, offline: a folder that `wandb sync` can upload later."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from shutil import copy
from typing import TYPE_CHECKING, Any

from themis.report.trackers.tracker import Plain, Tracker

if TYPE_CHECKING:
    from themis.runs.display.fault import Pixels


class Wandb(Tracker):
    """Writes its own run, so an open run of the caller is not affected. mode: "online" uploads during the campaign."""

    name, modules = "wandb", ("wandb",)

    def __init__(self, folder: str | Path, *, project: str = "themis", mode: str = "offline", **rest: Any) -> None:
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # an offline run sends nothing
        super().__init__(**rest)
        self.folder, self.project, self.mode = Path(folder), project, mode

    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None:
        self._wandb: Any = import_module("wandb")
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = self._wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        )
        options = {"mode": self.mode, "dir": str(self.folder), "settings": quiet}
        group = None if self.run is None else self.run.resolve().name  # the parts of a resumed campaign
        self._run = self._wandb.init(
            project=self.project, name=title, group=group, config=parameters, reinit="create_new", **options
        )
        self._run.define_metric("*", step_metric="tests")

    def log_scalars(self, values: dict[str, float], tests: int) -> None:
        self._run.log({"tests": tests, **values})

    def log_pictures(self, pictures: list[tuple[str, Pixels]], tests: int) -> None:
        images = [self._wandb.Image(pixels, caption=caption) for caption, pixels in pictures]
        self._run.log({"tests": tests, "pictures": images})

    def log_verdict(self, text: str, tests: int) -> None:
        self._run.notes = text
        self._run.summary["verdict"] = text

    def log_results(self, results: dict[str, float]) -> None:
        self._run.summary.update({f"result/{name}": value for name, value in results.items()})

    def attach(self, file: Path) -> None:
        copied = copy(file, self._run.dir)  # the run folder may be moved before the upload
        self._run.save(copied, base_path=self._run.dir, policy="now")

    def end(self, has_failed: bool) -> None:
        self._run.finish(exit_code=1 if has_failed else 0)
