"""Experiment trackers, as callbacks. Each needs its own package, which is imported when the tracker is created."""

from __future__ import annotations

import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from shutil import copy
from typing import TYPE_CHECKING, Any, ClassVar

from themis.errors import ThemisError, needs_extra
from themis.report.tracking import Tracker
from themis.settings import policy_name
from themis.version import __version__

if TYPE_CHECKING:
    from themis.runs.display.fault import Pixels
    from themis.runs.run import Round, Run, Start

Plain = bool | int | float | str


@contextmanager
def no_warnings() -> Iterator[None]:
    """Suppress the warnings of a tracker's package: they are not about the campaign."""
    with warnings.catch_warnings(action="ignore"):
        yield


class PackageTracker(Tracker):
    """Logs parameters at the start, figures per round and, at the end, the most telling faults and the results.

    run: the run folder, whose files are attached. n_pictures: how many faults are drawn; they are replayed after the
    campaign has stopped, so this does not use its budget. stays_open: leave it to the caller to call `close`, for
    example to attach more files before.
    """

    name: ClassVar[str]
    """Of the tracker and of the package that it needs."""
    parameters: dict[str, Plain]
    tests = 0
    is_open = False

    def __init__(self, *, run: str | Path | None = None, n_pictures: int = 8, stays_open: bool = False) -> None:
        need = f"the tracker {self.name} needs {self.name}, which is not installed"
        with needs_extra(self.name, need), no_warnings():
            import_module(self.name)  # now, before the clock of the campaign starts
        self.run, self.n_pictures, self.stays_open = None if run is None else Path(run), n_pictures, stays_open

    @abstractmethod
    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None: ...

    @abstractmethod
    def log_scalars(self, values: dict[str, float], tests: int) -> None: ...

    @abstractmethod
    def log_end(self, verdict: str, results: dict[str, float], pictures: list[tuple[str, Pixels]]) -> None:
        """Log how the campaign ended; there are no results if it failed."""

    @abstractmethod
    def end(self, has_failed: bool) -> None: ...

    def log_file(self, file: Path) -> None:
        """Attach a file, if the tracker can hold files."""

    # Events of the campaign

    @no_warnings()
    def on_start(self, start: Start) -> None:
        self.parameters, self.tests = parameters_of(start), start.tests_before
        self._covers_neurons = start.covers_neurons
        title = start.perturbation if self.run is None else self.run.resolve().name
        self.begin(title, self.parameters, start.tests_before)
        self.is_open = True

    @no_warnings()
    def on_round(self, round: Round) -> None:
        self.tests = round.tests
        self.log_scalars(scalars_of(round, covers_neurons=self._covers_neurons), round.tests)

    @no_warnings()
    def on_end(self, run: Run) -> None:
        self.log_end(verdict_of(run), results_of(run), telling_pictures(run, self.n_pictures))
        if self.run is not None and (self.run / "summary.json").is_file():
            self.attach(self.run / "summary.json")
        if not self.stays_open:
            self.close()

    @no_warnings()
    def on_error(self, error: Exception) -> None:
        self.log_end(f"The campaign failed: {error}", {}, [])
        self.close(has_failed=True)

    @no_warnings()
    def attach(self, file: Path) -> None:
        if self.is_open:
            self.log_file(file)

    @no_warnings()
    def close(self, *, has_failed: bool = False) -> None:
        if self.is_open:
            self.is_open = False
            self.end(has_failed)


def parameters_of(start: Start) -> dict[str, Plain]:
    """The settings and the subject of the campaign as a flat dict."""
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
    names = ("distinct_faults", "faults", "failing_seeds", "passes", "seconds", "criterion_score", "recall")
    values: dict[str, float | None] = {
        **{name: getattr(round, name) for name in names},
        "faults_per_test": round.faults / max(round.tests, 1),
        "coverage": round.coverage.sampled if covers_neurons else None,
        "coverage_all": round.coverage.all if covers_neurons else None,
        "residual_risk_high": None if round.residual_risk is None else round.residual_risk.high,
        "reachable_faults": None if round.reachable_faults is None else round.reachable_faults.value,
    }
    return {name: value for name, value in values.items() if value is not None}


def results_of(run: Run) -> dict[str, float]:
    """The figures of the campaign with their intervals."""
    last = run.rounds[-1]
    results: dict[str, float] = {"tests": last.tests, **scalars_of(last, covers_neurons=run.start.covers_neurons)}
    if run.start.clean_accuracy is not None:
        results["clean_accuracy"] = run.start.clean_accuracy
    estimates = {
        "fault_rate": run.fault_rate,
        "residual_risk": run.residual_risk,
        "reachable_faults": last.reachable_faults,
        "reachable_seeds": last.reachable_seeds,
        "coverage_interval": run.coverage_interval if run.start.covers_neurons else None,
    }
    for name, estimate in estimates.items():
        if estimate is not None:
            results |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    return results


def verdict_of(run: Run) -> str:
    """The verdict, the stop reason and the summary, as Markdown."""
    from themis.runs.display.text import summary_rows

    rows = [f"| {name} | {text.replace('|', '/')} |" for name, text in summary_rows(run, is_verbose=True)]
    return "\n".join([run.verdict.text, "", run.stop, "", "| figure | value |", "|---|---|", *rows])


def telling_pictures(run: Run, n: int) -> list[tuple[str, Pixels]]:
    """The most telling faults: a caption, and the clean input, the disturbed one and their difference side by side."""
    from themis.runs.display.fault import describe_fault, pictures, strip

    drawn = []
    for fault in run.faults.most_telling(n):
        try:
            parts = pictures(fault.replay())
        except ThemisError:  # the model no longer works; everything else is still logged
            break
        if not parts:
            break
        drawn.append((describe_fault(fault), strip(parts)))
    return drawn


MAX_LENGTH = 500
"""Characters of a parameter; some servers refuse longer ones."""


class MLflow(PackageTracker):
    """Writes through its own client, so the active run of the caller is not affected.

    place: a tracking URI such as sqlite:////data/mlflow.db or http://host:5000, or a folder for a database file.
    """

    name = "mlflow"

    def __init__(self, place: str | Path, *, experiment: str = "themis", **rest: Any) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a local run sends nothing
        super().__init__(**rest)
        self.place, self.experiment = place, experiment

    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None:
        address, artifacts = str(self.place), None  # a server decides where artifacts are
        if "://" not in address:
            home = Path(self.place).resolve()
            home.mkdir(parents=True, exist_ok=True)
            address, artifacts = f"sqlite:///{home / 'mlflow.db'}", (home / "artifacts").as_uri()
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)  # it logs every table that it creates
        client: Any = import_module("mlflow.tracking").MlflowClient
        self._client = client(tracking_uri=address)
        known = self._client.get_experiment_by_name(self.experiment)
        id = known and known.experiment_id
        if known is None:
            id = self._client.create_experiment(self.experiment, artifact_location=artifacts)
        folder = "" if self.run is None else str(self.run.resolve())
        if tests_before and folder:  # of a resumed campaign
            for run in self._client.search_runs([id], order_by=["attributes.start_time DESC"]):
                if run.data.tags.get("themis.run") == folder:
                    self.run_id = run.info.run_id
                    self._client.update_run(self.run_id, status="RUNNING")
                    return
        self.run_id = self._client.create_run(id, run_name=title, tags={"themis.run": folder}).info.run_id
        for name, value in parameters.items():
            self._client.log_param(self.run_id, _key(name), str(value)[:MAX_LENGTH])

    def log_scalars(self, values: dict[str, float], tests: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, _key(name), float(value), step=tests)

    def log_end(self, verdict: str, results: dict[str, float], pictures: list[tuple[str, Pixels]]) -> None:
        self._client.set_tag(self.run_id, "mlflow.note.content", verdict)
        for name, value in results.items():
            self._client.log_metric(self.run_id, f"result/{_key(name)}", float(value))
        for k, (_, pixels) in enumerate(pictures):
            self._client.log_image(self.run_id, pixels, f"faults/{k}.png")
        if pictures:
            self._client.log_text(self.run_id, "\n".join(caption for caption, _ in pictures), "faults/faults.txt")

    def log_file(self, file: Path) -> None:
        self._client.log_artifact(self.run_id, str(file))

    def end(self, has_failed: bool) -> None:
        self._client.set_terminated(self.run_id, "FAILED" if has_failed else "FINISHED")


def _key(name: str) -> str:
    """A name with only the characters that MLflow allows."""
    return "".join(char if char.isalnum() or char in "_-. /" else "_" for char in name)


class Wandb(PackageTracker):
    """Writes its own run, so an open run of the caller is not affected. mode: "online" uploads during the campaign."""

    name = "wandb"

    def __init__(self, folder: str | Path, *, project: str = "themis", mode: str = "offline", **rest: Any) -> None:
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # an offline run sends nothing
        super().__init__(**rest)
        self.folder, self.project, self.mode = Path(folder), project, mode

    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None:
        self._wandb: Any = import_module("wandb")
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False, "x_disable_stats": True}
        group = None if self.run is None else self.run.resolve().name  # the parts of a resumed campaign
        options = {"project": self.project, "name": title, "group": group, "config": parameters, "mode": self.mode}
        settings = self._wandb.Settings(**quiet)
        self._run = self._wandb.init(dir=str(self.folder), settings=settings, reinit="create_new", **options)
        self._run.define_metric("*", step_metric="tests")

    def log_scalars(self, values: dict[str, float], tests: int) -> None:
        self._run.log({"tests": tests, **values})

    def log_end(self, verdict: str, results: dict[str, float], pictures: list[tuple[str, Pixels]]) -> None:
        self._run.notes = verdict
        self._run.summary.update({"verdict": verdict, **{f"result/{name}": value for name, value in results.items()}})
        if pictures:
            images = [self._wandb.Image(pixels, caption=caption) for caption, pixels in pictures]
            self._run.log({"tests": self.tests, "pictures": images})

    def log_file(self, file: Path) -> None:
        copied = copy(file, self._run.dir)  # the run folder may be moved before the upload
        self._run.save(copied, base_path=self._run.dir, policy="now")

    def end(self, has_failed: bool) -> None:
        self._run.finish(exit_code=1 if has_failed else 0)


class TensorBoard(PackageTracker):
    """Writes event files with the writer of torch."""

    name = "tensorboard"

    def __init__(self, folder: str | Path, **rest: Any) -> None:
        super().__init__(**rest)
        self.folder = Path(folder)

    def begin(self, title: str, parameters: dict[str, Plain], tests_before: int) -> None:
        # A resumed campaign replaces the events that it had written after its last checkpoint.
        writer: Any = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(self.folder), purge_step=tests_before + 1 if tests_before else None)
        rows = "\n".join(f"| {name} | {str(value).replace('|', '/')} |" for name, value in parameters.items())
        self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", tests_before)

    def log_scalars(self, values: dict[str, float], tests: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, tests)
        self._writer.flush()

    def log_end(self, verdict: str, results: dict[str, float], pictures: list[tuple[str, Pixels]]) -> None:
        self._writer.add_text("verdict", verdict, self.tests)
        if results:
            named = {f"result/{name}": value for name, value in results.items()}
            self._writer.add_hparams(self.parameters, named, None, ".")
        for k, (caption, pixels) in enumerate(pictures):
            self._writer.add_image(f"faults/{k}", pixels, self.tests, dataformats="HWC")
            self._writer.add_text(f"faults/{k}", caption, self.tests)

    def end(self, has_failed: bool) -> None:
        self._writer.close()
