"""TensorBoard: event files in a folder, shown by `tensorboard --logdir FOLDER`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.report.trackers.tracker import Plain, Tracker

if TYPE_CHECKING:
    from themis.runs.display.fault import Pixels


class TensorBoard(Tracker):
    """Writes with the writer of torch, or with tensorboardX if only that is installed."""

    name, modules = "tensorboard", ("tensorboard", "tensorboardX")

    def __init__(self, folder: str | Path, **rest: Any) -> None:
        super().__init__(**rest)
        self.folder = Path(folder)

    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None:
        # A resumed campaign replaces the events that it had written after its last checkpoint.
        self._writer = _writer()(str(self.folder), purge_step=tests_before + 1 if tests_before else None)
        rows = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in parameters.items())
        self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", tests_before)

    def log_scalars(self, values: dict[str, float], tests: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, tests)
        self._writer.flush()

    def log_pictures(self, pictures: list[tuple[str, Pixels]], tests: int) -> None:
        for k, (caption, pixels) in enumerate(pictures):
            self._writer.add_image(f"faults/{k}", pixels, tests, dataformats="HWC")
            self._writer.add_text(f"faults/{k}", caption, tests)

    def log_verdict(self, text: str, tests: int) -> None:
        self._writer.add_text("verdict", text, tests)

    def log_results(self, results: dict[str, float]) -> None:
        self._writer.add_hparams(
            self.parameters, {f"result/{name}": value for name, value in results.items()}, None, "."
        )

    def attach(self, file: Path) -> None:
        """Do nothing: event files cannot hold other files."""

    def end(self, has_failed: bool) -> None:
        self._writer.close()


def _writer() -> Any:
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        return import_module("tensorboardX").SummaryWriter
