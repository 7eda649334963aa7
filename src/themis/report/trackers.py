"""Experiment trackers, as callbacks. Each needs its own package, which is imported when the tracker is created."""

from __future__ import annotations

import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from shutil import copy
from typing import TYPE_CHECKING, Any, ClassVar

from themis.campaign.callback import Callback, report_failure
from themis.errors import MissingExtraError, ThemisError, UsageError, nearest

if TYPE_CHECKING:
    from themis.judge.estimate import Estimate
    from themis.runs.display.fault import Pixels
    from themis.runs.run import Round, Run, Start

Plain = bool | int | float | str


class Tracker(Callback):
    """Logs parameters at the start, figures per round and, at the end, the most telling faults and the results.

    run: the run folder, whose files are attached. n_pictures: how many faults are drawn; they are replayed after the
    campaign has stopped, so this does not use its budget. stays_open: leave it to the caller to call `close`, for
    example to attach more files before.
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]]
    """The packages that the tracker can use; one of them is enough."""

    def __init__(self, *, run: str | Path | None = None, n_pictures: int = 8, stays_open: bool = False) -> None:
        if not any(map(_can_import, self.modules)):  # import now, before the clock of the campaign starts
            remedy = f'pip install "themis-dl[{self.name}]"'
            raise MissingExtraError(
                f"the tracker {self.name} needs {self.modules[0]}, which is not installed: {remedy}"
            )
        self.run, self.n_pictures, self.stays_open = None if run is None else Path(run), n_pictures, stays_open
        self.is_open = False

    # What a tracker implements

    @abstractmethod
    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None: ...

    @abstractmethod
    def log_scalars(self, values: dict[str, float], tests: int) -> None: ...

    @abstractmethod
    def log_pictures(self, pictures: list[tuple[str, Pixels]], tests: int) -> None: ...

    @abstractmethod
    def log_verdict(self, text: str, tests: int) -> None: ...

    @abstractmethod
    def log_results(self, results: dict[str, float]) -> None: ...

    @abstractmethod
    def attach(self, file: Path) -> None: ...

    @abstractmethod
    def end(self, has_failed: bool) -> None: ...

    # Events of the campaign

    def on_start(self, start: Start) -> None:
        self.parameters, self._tests = parameters_of(start), start.tests_before
        self._covers_neurons = start.covers_neurons
        title = start.perturbation if self.run is None else self.run.resolve().name
        with no_warnings():
            self.begin(title, self.parameters, start.tests_before)
        self.is_open = True

    def on_round(self, round: Round) -> None:
        self._tests = round.tests
        with no_warnings():
            self.log_scalars(scalars_of(round, covers_neurons=self._covers_neurons), round.tests)

    def on_end(self, run: Run) -> None:
        drawn, summary = telling_pictures(run, self.n_pictures), None if self.run is None else self.run / "summary.json"
        with no_warnings():
            if drawn:
                self.log_pictures(drawn, self._tests)
            self.log_verdict(verdict_of(run), self._tests)
            self.log_results(results_of(run))
            if summary is not None and summary.is_file():
                self.attach(summary)
        if not self.stays_open:
            self.close()

    def on_error(self, error: Exception) -> None:
        with no_warnings():
            self.log_verdict(f"The campaign failed: {error}", self._tests)
        self.close(has_failed=True)

    def close(self, *, has_failed: bool = False) -> None:
        """Finish writing."""
        if self.is_open:
            self.is_open = False
            with no_warnings():
                self.end(has_failed)


@contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress the warnings of a tracker's package: they are not about the campaign."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def parameters_of(start: Start) -> dict[str, Plain]:
    """The settings and the subject of the campaign as a flat dict."""
    from themis.settings import policy_name
    from themis.version import __version__

    plain: dict[str, Plain] = {
        "perturbation": start.perturbation,
        "oracle": start.oracle,
        "device": start.device,
        "seeds": start.n_usable,
        "neurons": start.n_neurons,
        "layers": len(start.layers),
        "themis_version": __version__,
    }
    for name, value in vars(start.settings).items():
        if name == "policy":
            value = policy_name(value)
        plain[name] = value if isinstance(value, Plain) else "none" if value is None else str(value)
    for dimension in start.theta:
        plain[f"theta_{dimension.name}"] = f"{dimension.low:g} to {dimension.high:g} {dimension.unit}".strip()
    return plain


def scalars_of(round: Round, *, covers_neurons: bool) -> dict[str, float]:
    """The figures of a round; a model without hidden layers has no coverage."""
    values = {
        "distinct_faults": round.distinct_faults,
        "faults": round.faults,
        "failing_seeds": round.failing_seeds,
        "faults_per_test": round.faults / max(round.tests, 1),
        "passes": round.passes,
        "seconds": round.seconds,
    }
    optional = {
        "coverage": round.coverage.sampled if covers_neurons else None,
        "coverage_all": round.coverage.all if covers_neurons else None,
        "criterion_score": round.criterion_score,
        "residual_risk_high": None if round.residual_risk is None else round.residual_risk.high,
        "reachable_faults": None if round.reachable_faults is None else round.reachable_faults.value,
        "recall": round.recall,
    }
    values |= {name: value for name, value in optional.items() if value is not None}
    return values


def results_of(run: Run) -> dict[str, float]:
    """The figures of the campaign with their intervals."""
    last = run.rounds[-1]
    results: dict[str, float] = {"tests": last.tests, **scalars_of(last, covers_neurons=run.start.covers_neurons)}
    if run.start.clean_accuracy is not None:
        results["clean_accuracy"] = run.start.clean_accuracy
    estimates: dict[str, Estimate | None] = {
        "fault_rate": run.fault_rate,
        "residual_risk": run.residual_risk,
        "reachable_faults": last.reachable_faults,
        "reachable_seeds": last.reachable_seeds,
        "coverage_interval": run.coverage_interval if run.start.covers_neurons else None,
    }
    for name, estimate in estimates.items():
        if estimate is not None:
            figures = asdict(estimate)
            results[name] = figures.pop("value")
            results |= {f"{name}_{end}": value for end, value in figures.items()}
    return results


def verdict_of(run: Run) -> str:
    """The verdict, the stop reason and the summary, as Markdown."""
    from themis.runs.display.text import summary_rows

    rows = [f"| {name} | {text.replace('|', '/')} |" for name, text in summary_rows(run, is_verbose=True)]
    return "\n".join([run.verdict.text, "", run.stop, "", "| figure | value |", "|---|---|", *rows])


def telling_pictures(run: Run, n: int) -> list[tuple[str, Pixels]]:
    """The most telling faults: a caption, and the clean input, the disturbed one and their difference side by side."""
    from themis.runs.display.fault import caption, pictures, strip

    drawn = []
    for fault in run.faults.most_telling(n):
        try:
            parts = pictures(fault.replay())
        except ThemisError:  # the model no longer works; everything else is still logged
            break
        if not parts:
            break
        drawn.append((caption(fault), strip(parts)))
    return drawn


def _can_import(module: str) -> bool:
    try:
        with no_warnings():
            import_module(module)
    except ImportError:
        return False
    return True


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


TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[Wandb]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": Wandb,
}
"""The trackers by name."""


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
