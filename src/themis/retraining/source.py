"""What a retraining starts from: a finished campaign of this process, or a run folder, with its model and faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from themis.data.groups import Ints, read_groups
from themis.data.seeds import Seeds, list_seeds, read_seeds
from themis.errors import DataError, ModelError, UsageError
from themis.oracle import Oracle, choose_oracle
from themis.perturb import Perturbation
from themis.retraining.copies import check_trainable
from themis.retraining.material import rows_of
from themis.runs.faults import Faults
from themis.runs.parts import Parts, read_parts
from themis.runs.replay import Replayer, live_handle
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.runs.trust import Trusted
from themis.settings import Settings
from themis.target.blackbox import as_target
from themis.target.fingerprint import hash_seeds
from themis.target.ledger import Ledger, ledger_of
from themis.target.target import AnyTarget, Target


@dataclass(frozen=True)
class Source:
    """The model, the data and the faults that a retraining starts from."""

    target: Target
    """With the settled oracle of the campaign, so that all models have one tolerance."""
    parts: Parts
    perturbation: Perturbation
    faults: Faults
    settings: Settings
    passes: int
    """The passes that the campaign spent."""
    origin: Origin | None
    ledger: Ledger
    """The seeds that the weights were trained on before."""
    data: Seeds
    """All seeds, as before the split."""
    about: dict[str, Any]
    """What identifies this source, as plain data."""
    groups: tuple[Ints, Ints] | None = None
    """What the search and the train seeds belong to; None if each stands for itself."""
    folder: Reader | None = None
    further: tuple[Source, ...] = ()
    """Other runs of the same model on the same seeds, whose perturbations are trained on too."""

    @property
    def all(self) -> tuple[Source, ...]:
        """This source and those of the further runs."""
        return (self, *self.further)

    @property
    def perturbations(self) -> dict[str, Perturbation]:
        """The perturbations that are trained on, by name."""
        return {source.name: source.perturbation for source in self.all}

    @property
    def oracle(self) -> Oracle:
        """The settled oracle of the campaign."""
        return choose_oracle(self.target.oracle)

    @property
    def name(self) -> str:
        """The perturbation with its magnitude, as on the command line."""
        magnitude = self.settings.magnitude
        return self.perturbation.name + ("" if magnitude is None else f":{magnitude:g}")


@dataclass(frozen=True)
class Given:
    """What the caller gives in place of what a run has recorded; each is needed if the run cannot create it again."""

    target: Any = None
    data: Any = None
    """The complete data, as before the split."""
    judge: Any = None
    """Data to judge by, for a run that was not split."""
    perturbation: Perturbation | None = None
    origin: Origin | None = None
    train: Any = None
    """Clean data to train on instead of the train part."""
    trust: Trusted = False
    """Whether code that a folder names may run although it was not made on this machine by this user."""


@contextmanager
def open_source(run: Run | str | Path, given: Given) -> Iterator[Source]:
    """The model, faults and parts of a run; a run folder knows how to make the target and the data again."""
    if isinstance(run, Run):
        yield _with_train(_from_memory(run, given), given.train)
        return
    if not isinstance(run, str | Path):
        raise UsageError(f"run must be a finished Run or the folder of one, got {type(run).__name__}")
    with closing(Reader(run)) as reader:
        yield _with_train(_from_folder(reader, given), given.train)


@contextmanager
def open_sources(runs: Sequence[Run | str | Path], given: Given) -> Iterator[Source]:
    """The first of several runs, with the others as further ones. The model and the data are loaded once."""
    with ExitStack() as stack:
        first = stack.enter_context(open_source(runs[0], given))
        given = replace(given, target=first.target, data=first.data)
        sources = [first, *(stack.enter_context(open_source(run, given)) for run in runs[1:])]
        names = [source.name for source in sources]
        for source in sources[1:]:
            _check_alike(first, source)
            if (n := names.count(source.name)) > 1:
                raise UsageError(
                    f"runs must differ in their perturbation or magnitude, but {n} of them have {source.name}: give one"
                )
        yield replace(first, further=tuple(sources[1:]))


def _check_alike(first: Source, other: Source) -> None:
    """Raise unless two runs tested the same model on the same parts of the same data."""
    if first.target.fingerprint() != other.target.fingerprint():
        raise UsageError(
            f"runs must have tested the same model to be retrained on together, but {first.name} and {other.name} have "
            "different weights: give runs of one model"
        )
    if first.oracle.spec() != other.oracle.spec():
        raise UsageError(
            f"runs must have the same oracle to be retrained on together, but {first.name} has {first.oracle.spec()!r} "
            f"and {other.name} {other.oracle.spec()!r}: give runs with one oracle"
        )
    for part in ("search", "train", "judge"):
        if hash_seeds(getattr(first.parts, part)) != hash_seeds(getattr(other.parts, part)):
            raise UsageError(
                f"runs must have split the same data in the same way to be retrained on together, but the {part} seeds "
                f"of {first.name} and {other.name} differ: run them with the same data, --split, --split-seed and "
                "--split-by"
            )


def _with_train(source: Source, train: Any) -> Source:
    """The same source with other clean data to train on."""
    if train is None:
        return source
    seeds = read_seeds(train)
    _check_like(seeds, source.parts.search, "train")
    is_judge = Ledger.of(source.parts.judge).knows(seeds)
    if is_judge.any():
        raise DataError(
            f"train must share no seed with the judge seeds, but {int(is_judge.sum()):,} are among them "
            f"({list_seeds(seeds, is_judge)}): leave them out"
        )
    return replace(source, parts=replace(source.parts, train=seeds), groups=_groups_with_train(source, seeds))


def _groups_with_train(source: Source, train: Seeds) -> tuple[Ints, Ints] | None:
    """The groups of the search part and of other data, which have other numbers; a file names only those of the run."""
    if source.groups is None or source.settings.split_by is None:
        return None
    groups, first = source.settings.split_by, int(source.groups[0].max()) + 1
    return source.groups[0], first + (read_groups(groups, train) if groups.isdigit() else np.arange(len(train)))


def _from_memory(run: Run, given: Given) -> Source:
    calculator = live_handle(run).calculator
    settings, last = run.start.settings, run.rounds[-1]
    trainable = _trainable(
        calculator.target if given.target is None else as_target(given.target), calculator.clean.oracle
    )
    if settings.split is None:
        seeds = calculator.seeds
    elif given.data is None:
        raise UsageError(
            "data must be passed, because a run in memory keeps only the seeds that it searched: pass the complete data"
        )
    else:
        seeds = read_seeds(given.data, settings.max_seeds)
    tested = {"model_sha256": trainable.fingerprint(), "faults": len(run.faults), "tests": last.tests}
    parts = _parts(run, settings, seeds, given.judge)
    return Source(
        target=trainable,
        parts=parts,
        perturbation=calculator.perturbation,
        faults=run.faults,
        settings=settings,
        passes=last.passes,
        origin=given.origin,
        ledger=ledger_of(trainable, None if given.origin is None else given.origin.weights_path()),
        data=seeds,
        about={"run": None, **_about(settings, calculator.perturbation), **tested},
        groups=_groups(settings, seeds, parts),
    )


def _from_folder(run: Reader, given: Given) -> Source:
    summary = run.summary()
    if summary is None or run.is_running():
        raise UsageError(
            f"the run in {run.path} must have ended, but it has not: wait for it, or finish it with themis resume "
            f"{run.path}"
        )
    target = None if given.target is None else as_target(given.target)
    replayer = Replayer(run, target, given.data, given.perturbation, given.origin, trust=given.trust)
    trainable = _trainable(replayer.target, replayer.oracle)
    then, now = run.record["environment"]["model_sha256"], replayer.target.fingerprint()
    if then != now:
        raise ModelError(
            f"the model must be the same as in the run, but its hash is {now[:12]}... and was {then[:12]}...: load the "
            "same weights"
        )
    settings = Settings.recorded(run.record["settings"])
    _check_searched(run, replayer.seeds)
    replayer.check_same_tests()
    tested = {"model_sha256": now, "faults": run.count(), "tests": summary["tests"]}
    parts = _parts(run, settings, replayer.all_seeds, given.judge)
    return Source(
        target=trainable,
        parts=parts,
        perturbation=replayer.perturbation,
        faults=run.faults(handle=replayer),
        settings=settings,
        passes=summary["passes"],
        origin=replayer.origin,
        ledger=ledger_of(trainable, None if replayer.origin is None else replayer.origin.weights_path()),
        data=replayer.all_seeds,
        about={"run": str(run.path.resolve()), **_about(settings, replayer.perturbation), **tested},
        groups=_groups(settings, replayer.all_seeds, parts),
        folder=run,
    )


def _check_searched(run: Reader, seeds: Seeds) -> None:
    """Raise if the data has other inputs under the same seed ids: stored inputs of the run belong to its own seeds."""
    then, now = run.record["environment"]["data_sha256"], hash_seeds(seeds)
    if then != now:
        raise DataError(
            f"the data must be the same as in the run, but its hash is {now[:12]}... and was {then[:12]}...: pass the "
            "same data"
        )


def _parts(run: Run | Reader, settings: Settings, seeds: Seeds, judge: Any) -> Parts:
    """The parts of the run; if it was not split, all its seeds to learn from and other data to judge by."""
    if seeds.others is not None:
        raise UsageError("retraining needs one input per example, but the data has several: retrain the model yourself")
    if judge is None:
        return read_parts(run, seeds)
    if settings.split is not None:
        raise UsageError("judge must be left out: the run was split before its campaign and has its own judge part")
    judge_seeds = judge if isinstance(judge, Seeds) else read_seeds(judge)
    _check_like(judge_seeds, seeds, "judge")
    Ledger.of(seeds).refuse(judge_seeds, "judge")
    return Parts(seeds, seeds, judge_seeds)


def _groups(settings: Settings, seeds: Seeds, parts: Parts) -> tuple[Ints, Ints] | None:
    """What the search and the train seeds of a run belong to."""
    if settings.split_by is None:
        return None
    groups = read_groups(settings.split_by, seeds)
    return groups[rows_of(parts.search.seed_id.numpy(), seeds)], groups[rows_of(parts.train.seed_id.numpy(), seeds)]


def _check_like(seeds: Seeds, known: Seeds, name: str) -> None:
    if seeds.shape[1:] != known.shape[1:]:
        raise DataError(
            f"{name} must hold inputs like the run's, {list(known.shape[1:])}, got {list(seeds.shape[1:])}: pass other "
            "data"
        )


def _trainable(target: AnyTarget, oracle: Oracle) -> Target:
    check_trainable(target)
    assert isinstance(target, Target)
    return replace(target, oracle=oracle)


def _about(settings: Settings, perturbation: Perturbation) -> dict[str, Any]:
    theta = [[theta.name, theta.low, theta.high] for theta in perturbation.theta]
    split = None if settings.split is None else list(settings.split)
    groups = {} if settings.split_by is None else {"split_by": settings.split_by}
    campaign = {"split": split, **groups, "campaign_seed": settings.random_seed}
    return {"perturbation": perturbation.name, "theta": theta, **campaign}
