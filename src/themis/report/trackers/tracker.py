"""The base class of trackers: callbacks that log a campaign to an experiment tracker."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from themis.campaign.callback import Callback
from themis.errors import MissingExtraError, ThemisError

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
