"""Opening a run folder: the run as `themis.run` returned it, or as much as there is while the campaign is running."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import StoreError, UsageError
from themis.judge.estimate import Estimate
from themis.judge.normality import Normality
from themis.perturb import Perturbation
from themis.perturb.perturbation import Theta
from themis.runs.estimates import phase_seconds, read_progress, stored_by_class, stored_by_strength, uniform_estimates
from themis.runs.replay import StoredRun
from themis.runs.run import Run, Seconds, Start
from themis.runs.store.reader import Reader
from themis.runs.trust import Trusted
from themis.settings import Settings
from themis.target.activations import Layer
from themis.target.blackbox import as_target

if TYPE_CHECKING:
    from torch import nn

    from themis.target.target import AnyTarget

RUN_FIGURES = ("score", "raised", "faults_selected", "distinct_faults_selected")
"""What the run adds to what its criterion reports."""


def open_run(
    path: str | Path,
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    *,
    perturbation: Perturbation | None = None,
    trust: Trusted = False,
) -> Run:
    """Open a run folder and return the run as `themis.run` returned it, or as far as it got if it has not ended.

    Figures that are computed at the end of a campaign are None before it ends.

    Args:
        path: The run folder.
        target: Needed to replay faults if the run does not record how to create its model, for example because the
            model lives in memory.
        data: The same for the data.
        perturbation: The same for the perturbation.
        trust: Opening and showing a run never runs code that its folder names. Replaying faults does, and only if the
            folder was made on this machine by this user, or with True. Files to unpickle can be listed too.
    """
    handle = StoredRun(Path(path), None if target is None else as_target(target), data, perturbation, trust)
    with closing(Reader(path)) as run:
        summary, rounds, progress = run.summary(), run.rounds(), read_progress(run)
        if not rounds:
            raise UsageError(
                f"a run must have finished a round to be opened, but {run.path} has none yet: wait for the first one"
            )
        state = run.state(summary)
        figures, estimates = summary or {}, uniform_estimates(summary, progress, rounds)
        criterion = figures.get("criterion") or {}
        return Run(
            stop=run.stop_sentence(summary, state),
            stop_reason=figures.get("stop_reason") or state,
            faults=run.faults(handle=handle),
            rounds=rounds,
            start=_start(run.record),
            fault_rate=estimates.fault_rate,
            residual_risk=estimates.residual_risk,
            residual_risk_uniform=estimates.residual_risk_uniform,
            coverage_uniform=figures.get("coverage_uniform"),
            coverage_interval=_estimate(figures.get("coverage_interval")),
            design_effect=figures.get("design_effect"),
            normality=None if figures.get("normality") is None else Normality(**figures["normality"]),
            correct_by_strength=stored_by_strength(summary),
            by_class=stored_by_class(summary),
            near_ties=[] if progress is None else progress.near_ties,
            seconds=phase_seconds(summary, progress) or Seconds(0.0, 0.0, 0.0, 0.0),
            kinds=figures.get("kinds", {} if progress is None else progress.kinds),
            raised=(criterion or ({} if progress is None else progress.counts)).get("raised", 0),
            policy={name: value for name, value in figures.get("policy", {}).items() if name != "name"},
            of_criterion=_criterion_figures(criterion, run.record["start"].get("criterion") or {}),
            environment=run.record["environment"],
            requests=figures.get("requests"),
            folder=run.path,
        )


def _start(record: dict[str, Any]) -> Start:
    plain = record["start"]
    classes = plain.get("classes")
    values = {
        "bounds": tuple(plain["bounds"]),
        "theta": tuple(_theta(theta) for theta in record["theta"]),
        "settings": Settings.recorded(record["settings"]),
        "layers": tuple(Layer(**{**layer, "shape": tuple(layer["shape"])}) for layer in plain["layers"]),
        "classes": None if classes is None else tuple(classes),
    }
    return Start(**{**plain, **values})


def _theta(plain: dict[str, Any]) -> Theta:
    try:
        return Theta(**{**plain, "limits": _limits(*plain["limits"])})
    except UsageError as error:
        raise StoreError(
            f"the theta of a run must be valid, but {error}; restore the run folder from a copy"
        ) from error


def _limits(low: float | None, high: float | None) -> tuple[float, float]:
    """JSON has no infinity: None stands for no limit."""
    return -math.inf if low is None else low, math.inf if high is None else high


def _estimate(plain: dict[str, float] | None) -> Estimate | None:
    return None if plain is None else Estimate(**plain)


def _criterion_figures(reported: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    """What the criterion itself reports: neither recorded at the start nor added by the run."""
    return {name: value for name, value in reported.items() if name not in RUN_FIGURES and name not in start}
