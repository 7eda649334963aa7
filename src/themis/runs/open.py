"""A run folder as the result of its campaign: what `themis.run` gave, or what there is of a run that goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import UsageError
from themis.runs.faults import Fault, Replay
from themis.judge.estimate import Estimate
from themis.judge.normality import Normality
from themis.perturb import Perturbation
from themis.perturb.perturbation import Theta
from themis.target.activations import Layer
from themis.runs.replay import Replayer
from themis.runs.run import Run, Seconds, Start
from themis.settings import Settings
from themis.runs.store.reader import Reader

if TYPE_CHECKING:
    from torch import nn

    from themis.runs.store.writer import Checkpoint
    from themis.target.target import AnyTarget

OWN = ("score", "raised", "faults_selected", "distinct_faults_selected")
"""What a run itself says of its criterion."""


class Replays:
    """Runs faults of a folder again. Target and data are made once, the folder is open only while it is read."""

    def __init__(self, path: Path, target: AnyTarget | None, data: Any, perturbation: Perturbation | None) -> None:
        self._path, self._given = path, (target, data, perturbation)
        self._made: Replayer | None = None

    @contextmanager
    def replayer(self) -> Iterator[Replayer]:
        """A replayer over the folder, open."""
        with closing(Reader(self._path)) as run:
            self._made = self._made or Replayer(run, *self._given)
            self._made.run = run
            yield self._made

    def __call__(self, fault: Fault) -> Replay:
        with self.replayer() as replayer:
            return replayer(fault)


def open_run(
    path: str | Path,
    target: AnyTarget | nn.Module | None = None,
    data: Any = None,
    *,
    perturbation: Perturbation | None = None,
) -> Run:
    """The run in a folder, as `themis.run` returned it; of one that goes on, or was killed, what there is by now.

    target, data, perturbation: needed to replay faults where the run cannot make them again, as a model that lives in
    memory. Figures that are worked out when a campaign ends are None before.
    """
    from themis.target.target import as_target
    from themis.runs.estimates import phase_seconds, read_checkpoint, uniform_estimates
    from themis.report.view import state_of, stop_of

    replays = Replays(Path(path), None if target is None else as_target(target), data, perturbation)
    with closing(Reader(path)) as run:
        summary, rounds, checkpoint = run.summary(), run.rounds(), read_checkpoint(run)
        if not rounds:
            raise UsageError(f"a run must have a round to be opened, {run.path} has none yet: wait for its first")
        state, counted = state_of(run, summary), _counted(checkpoint)
        known = {**uniform_estimates(checkpoint), **(summary or {})}
        return Run(
            stop=stop_of(run, summary, state),
            stop_reason=known.get("stop_reason", state),
            faults=run.faults(replay=replays),
            rounds=rounds,
            start=_start(run.record),
            fault_rate=_estimate(known["fault_rate"]),
            residual_risk=_estimate(known["residual_risk"]),
            coverage_uniform=known.get("coverage_uniform"),
            coverage_interval=_estimate(known.get("coverage_interval")),
            design_effect=known.get("design_effect"),
            normality=None if known.get("normality") is None else Normality(**known["normality"]),
            near_ties=[] if checkpoint is None else checkpoint.arrays["/tally/near_ties"].tolist(),
            seconds=Seconds(**(phase_seconds(summary, checkpoint) or dict.fromkeys(Seconds.__annotations__, 0.0))),
            kinds=known.get("kinds", counted.get("kinds", {})),
            raised=(known.get("criterion") or counted.get("counts", {})).get("raised", 0),
            policy={name: value for name, value in known.get("policy", {}).items() if name != "name"},
            of_criterion=_of_criterion(known.get("criterion") or {}, run.record["start"]["criterion"] or {}),
            environment=run.record["environment"],
        )


def _start(record: dict[str, Any]) -> Start:
    plain = record["start"]
    classes = plain.get("classes")
    whole = {
        "bounds": tuple(plain["bounds"]),
        "theta": tuple(Theta(**{**each, "limits": _limits(*each["limits"])}) for each in record["theta"]),
        "settings": Settings(**record["settings"]),
        "layers": tuple(Layer(**{**each, "shape": tuple(each["shape"])}) for each in plain["layers"]),
        "classes": None if classes is None else tuple(classes),
    }
    return Start(**{**plain, **whole})


def _limits(low: float | None, high: float | None) -> tuple[float, float]:
    """What JSON cannot hold is without a limit."""
    return -math.inf if low is None else low, math.inf if high is None else high


def _counted(checkpoint: Checkpoint | None) -> dict[str, Any]:
    return {} if checkpoint is None else dict(checkpoint.values["tally"])


def _estimate(plain: dict[str, float] | None) -> Estimate | None:
    return None if plain is None else Estimate(**plain)


def _of_criterion(said: dict[str, Any], start: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in said.items() if name not in OWN and name not in start}
