"""What is retrained: a finished campaign of this process, or its folder, with its model, its faults and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from themis.data.seeds import Seeds, list_seeds, read_seeds
from themis.errors import DataError, ModelError, UsageError
from themis.experiments.retraining.copies import check_trainable
from themis.oracle import Oracle, choose_oracle
from themis.perturb import Perturbation
from themis.runs.faults import Faults
from themis.runs.parts import Parts, read_parts
from themis.runs.replay import Replayer, live_handle, recorded_oracle
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.settings import Settings
from themis.target.fingerprint import hash_seeds
from themis.target.ledger import Ledger, ledger_of
from themis.target.target import AnyTarget, Target, as_target


@dataclass(frozen=True)
class Source:
    """All that a retraining starts from."""

    target: Target
    """Its oracle is the campaign's, settled: one tolerance for all models."""
    parts: Parts
    perturbation: Perturbation
    faults: Faults
    settings: Settings
    passes: int
    """That the campaign spent."""
    origin: Origin | None
    ledger: Ledger
    """What the weights were trained on before."""
    data: Seeds
    """All seeds, as they were before the split."""
    about: dict[str, Any]
    """What tells this source from others; plain data."""
    folder: Reader | None = None

    @property
    def oracle(self) -> Oracle:
        """The campaign's, settled."""
        return choose_oracle(self.target.oracle)

    @property
    def name(self) -> str:
        """The perturbation with its magnitude, as it is named on the command line."""
        magnitude = self.settings.magnitude
        return self.perturbation.name + ("" if magnitude is None else f":{magnitude:g}")


@contextmanager
def opened(
    run: Run | str | Path,
    target: Any = None,
    data: Any = None,
    judge: Any = None,
    perturbation: Perturbation | None = None,
    origin: Origin | None = None,
    train: Any = None,
) -> Iterator[Source]:
    """A run's model, faults and parts; target and data are made again as a run folder remembers them.

    train: clean data to train on in the place of the train part.
    """
    if isinstance(run, Run):
        yield _learning(_of_process(run, target, data, judge, origin), train)
        return
    if not isinstance(run, str | Path):
        raise UsageError(f"run must be a finished Run or the folder of one, got {type(run).__name__}")
    with closing(Reader(run)) as reader:
        yield _learning(_of_folder(reader, target, data, judge, perturbation, origin), train)


def _learning(source: Source, train: Any) -> Source:
    """The same with other clean data to train on."""
    if train is None:
        return source
    seeds = read_seeds(train)
    _check_like(seeds, source.parts.search, "train")
    is_judge = Ledger.of(source.parts.judge).knows(seeds)
    if is_judge.any():
        raise DataError(
            f"train must share no seed with those to judge by, {int(is_judge.sum()):,} are among them "
            f"({list_seeds(seeds, is_judge)}): leave them out"
        )
    return replace(source, parts=replace(source.parts, train=seeds))


def _of_process(run: Run, target: Any, data: Any, judge: Any, origin: Origin | None) -> Source:
    calculator = live_handle(run).calculator
    settings = run.start.settings
    made = _trainable(calculator.target if target is None else as_target(target), calculator.oracle)
    if settings.split is None:
        whole = calculator.seeds
    elif data is None:
        raise UsageError("data must be given, all of it: a run in memory keeps the seeds alone that it searched")
    else:
        whole = read_seeds(data, settings.max_seeds)
    parts = _parts(run, settings, whole, judge)
    last = run.rounds[-1]
    tested = {"model_sha256": made.fingerprint(), "faults": len(run.faults), "tests": last.tests}
    about = {"run": None, **_about(settings, calculator.perturbation), **tested}
    ledger = ledger_of(made, None if origin is None else origin.weights_path())
    what = (made, parts, calculator.perturbation, run.faults, settings, last.passes, origin, ledger, whole)
    return Source(*what, about)


def _of_folder(
    run: Reader, target: Any, data: Any, judge: Any, perturbation: Perturbation | None, origin: Origin | None
) -> Source:
    summary = run.summary()
    if summary is None or run.is_running():
        raise UsageError(
            f"the run in {run.path} must have ended, it has not: wait for it, or end it with themis resume {run.path}"
        )
    made = Replayer(run, None if target is None else as_target(target), data, perturbation, origin)
    tested = _trainable(made.target, recorded_oracle(run, made.target.oracle))
    then, now = run.record["environment"]["model_sha256"], made.target.fingerprint()
    if then != now:
        raise ModelError(
            f"the model must be the one that the run tested, its hash is {now[:12]}..., the run's was {then[:12]}...: "
            "give the same weights"
        )
    settings = Settings(**run.record["settings"])
    whole = made.all_seeds
    _check_searched(run, made.seeds)
    parts = _parts(run, settings, whole, judge)
    weights = None if made.origin is None else made.origin.weights_path()
    about = {"run": str(run.path.resolve()), **_about(settings, made.perturbation), "model_sha256": now}
    about |= {"faults": run.count(), "tests": summary["tests"]}
    what = (tested, parts, made.perturbation, run.faults(handle=made), settings, summary["passes"], made.origin)
    return Source(*what, ledger_of(tested, weights), whole, about, run)


def _check_searched(run: Reader, seeds: Seeds) -> None:
    """Refuse other pictures under the same seed ids: the run's inputs, which it may have kept, are of its own."""
    then, now = run.record["environment"]["data_sha256"], hash_seeds(seeds)
    if then != now:
        raise DataError(
            f"the data must be the one that the run searched, its hash is {now[:12]}..., the run's was {then[:12]}...: "
            "give the same data"
        )


def _parts(run: Run | Reader, settings: Settings, whole: Seeds, judge: Any) -> Parts:
    """The run's parts; of one that was not split, all its seeds to learn from, and others to judge by."""
    if judge is None:
        return read_parts(run, whole)
    if settings.split is not None:
        raise UsageError("judge must be left out, the run was split before its campaign: its judge part is taken")
    others = judge if isinstance(judge, Seeds) else read_seeds(judge)
    _check_like(others, whole, "judge")
    Ledger.of(whole).refuse(others, "judge")
    return Parts(whole, whole, others)


def _check_like(seeds: Seeds, known: Seeds, name: str) -> None:
    if seeds.shape[1:] != known.shape[1:]:
        raise DataError(
            f"{name} must hold inputs like the run's, {list(known.shape[1:])}, got {list(seeds.shape[1:])}: give others"
        )


def _trainable(target: AnyTarget, oracle: Oracle) -> Target:
    check_trainable(target)
    assert isinstance(target, Target)
    return replace(target, oracle=oracle)


def _about(settings: Settings, perturbation: Perturbation) -> dict[str, Any]:
    theta = [[each.name, each.low, each.high] for each in perturbation.theta]
    split = None if settings.split is None else list(settings.split)
    return {"perturbation": perturbation.name, "theta": theta, "split": split, "campaign_seed": settings.random_seed}
