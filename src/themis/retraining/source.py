"""What a retraining starts from: a finished campaign of this process, or a run folder, with its model and faults."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from themis.campaign.series import refuse_changes
from themis.data.groups import Ints, read_groups
from themis.data.seeds import Seeds, list_seeds, read_seeds
from themis.errors import DataError, UsageError
from themis.oracle import Oracle, choose_oracle
from themis.perturb import Perturbation
from themis.retraining.material import rows_of
from themis.retraining.weights import check_trainable
from themis.runs.faults import Faults
from themis.runs.parts import PARTS, Parts, read_parts
from themis.runs.replay import Replayer, live_handle
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.runs.trust import Trusted
from themis.settings import Settings
from themis.suites.folder import is_suite
from themis.suites.result import SuiteRun
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
    member: str | None = None
    """What a suite calls this run."""
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
        """The name in a suite, or the perturbation with its magnitude, as on the command line."""
        if self.member is not None:
            return self.member
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


def list_runs(runs: Sequence[Any]) -> list[Any]:
    """The runs, with the folders of its members in place of that of a suite."""
    found: list[Any] = []
    for run in runs:
        is_folder = isinstance(run, str | Path) and is_suite(run)
        suite = SuiteRun(run) if is_folder else run if isinstance(run, SuiteRun) else None
        found += [run] if suite is None else [str(suite.folder(name)) for name in suite.members]
    return found


@contextmanager
def open_source(run: Run | str | Path, given: Given) -> Iterator[Source]:
    """The model, faults and parts of a run; a run folder knows how to make the target and the data again."""
    if isinstance(run, Run):
        yield _from_memory(run, given)
        return
    if not isinstance(run, str | Path):
        raise UsageError(f"run must be a finished Run or the folder of one, got {type(run).__name__}")
    with closing(Reader(run)) as reader:
        yield _from_folder(reader, given)


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
    """Raise unless two runs tested the same model, with the same oracle, on the same parts of the same data."""

    def identity(source: Source) -> dict[str, str]:
        parts = {f"{name} seeds": hash_seeds(getattr(source.parts, name)) for name in PARTS}
        return {"model": source.target.fingerprint(), "oracle": source.oracle.spec(), **parts}

    others = identity(other)
    for what, value in identity(first).items():
        if value != others[what]:
            raise UsageError(
                f"runs must have the same {what} to be retrained on together, but those of {first.name} and "
                f"{other.name} differ: give runs of one model with the same oracle, data, --split, --split-seed and "
                "--split-by"
            )


def _from_memory(run: Run, given: Given) -> Source:
    calculator, settings, last = live_handle(run).calculator, run.start.settings, run.rounds[-1]
    if settings.split is not None and given.data is None:
        raise UsageError(
            "data must be passed, because a run in memory keeps only the seeds that it searched: pass the complete data"
        )
    seeds = calculator.seeds if settings.split is None else read_seeds(given.data, settings.max_seeds)
    target = calculator.target if given.target is None else as_target(given.target)
    tested = target, calculator.clean.oracle, calculator.perturbation, given.origin
    return _source(run, given, seeds, tested, settings, run.faults, (last.tests, last.passes))


def _from_folder(run: Reader, given: Given) -> Source:
    summary = run.summary()
    if summary is None or run.is_running():
        raise UsageError(
            f"the run in {run.path} must have ended, but it has not: wait for it, or finish it with themis resume "
            f"{run.path}"
        )
    target = None if given.target is None else as_target(given.target)
    replayer = Replayer(run, target, given.data, given.perturbation, given.origin, trust=given.trust)
    check_trainable(replayer.target)
    now = {"model_sha256": replayer.target.fingerprint(), "data_sha256": hash_seeds(replayer.seeds)}
    refuse_changes(now, run.record["environment"], "run")
    replayer.check_same_tests()
    tested = replayer.target, replayer.oracle, replayer.perturbation, replayer.origin
    settings, faults = Settings(**run.record["settings"]), run.faults(handle=replayer)
    spent = summary["tests"], summary["passes"]
    return _source(run, given, replayer.all_seeds, tested, settings, faults, spent)


def _source(
    run: Run | Reader,
    given: Given,
    seeds: Seeds,
    tested: tuple[AnyTarget, Oracle, Perturbation, Origin | None],
    settings: Settings,
    faults: Faults,
    spent: tuple[int, int],
) -> Source:
    """A source from what a run in memory and a run folder have in common; `spent` are its tests and passes."""
    (target, oracle, perturbation, origin), (n_tests, passes) = tested, spent
    check_trainable(target)
    assert isinstance(target, Target)
    folder = run if isinstance(run, Reader) else None
    parts, groups = _parts(run, settings, seeds, given), None
    if (split_by := settings.split_by) is not None:
        numbers = read_groups(split_by, seeds)
        search = numbers[rows_of(parts.search.seed_id.numpy(), seeds)]
        if given.train is None:
            train = numbers[rows_of(parts.train.seed_id.numpy(), seeds)]
        else:  # other data belong to other groups; a file names only those of the run
            own = read_groups(split_by, parts.train) if split_by.isdigit() else np.arange(len(parts.train))
            train = int(search.max()) + 1 + own
        groups = search, train
    about = {
        "run": None if folder is None else str(folder.path.resolve()),
        "perturbation": perturbation.name,
        "theta": [[theta.name, theta.low, theta.high] for theta in perturbation.theta],
        "split": None if settings.split is None else list(settings.split),
        **({} if settings.split_by is None else {"split_by": settings.split_by}),
        "campaign_seed": settings.random_seed,
        "model_sha256": target.fingerprint(),
        "faults": len(faults),
        "tests": n_tests,
    }
    return Source(
        target=replace(target, oracle=oracle),
        parts=parts,
        perturbation=perturbation,
        faults=faults,
        settings=settings,
        passes=passes,
        origin=origin,
        ledger=ledger_of(target, None if origin is None else origin.weights_path()),
        data=seeds,
        about=about,
        groups=groups,
        folder=folder,
        member=None if folder is None or not is_suite(folder.path.parent) else folder.path.name,
    )


def _parts(run: Run | Reader, settings: Settings, seeds: Seeds, given: Given) -> Parts:
    """The parts of the run, or other data in their place; if it was not split, all its seeds are to learn from."""
    if given.judge is None:
        parts = read_parts(run, seeds)
    elif settings.split is None:
        parts = Parts(seeds, seeds, _read_like(given.judge, seeds, "judge"))
        Ledger.of(seeds).refuse(parts.judge, "judge")
    else:
        raise UsageError("judge must be left out: the run was split before its campaign and has its own judge part")
    if given.train is None:
        return parts
    train = _read_like(given.train, seeds, "train")
    is_judge = Ledger.of(parts.judge).knows(train)
    if is_judge.any():
        raise DataError(
            f"train must share no seed with the judge seeds, but {int(is_judge.sum()):,} are among them "
            f"({list_seeds(train, is_judge)}): leave them out"
        )
    return replace(parts, train=train)


def _read_like(data: Any, known: Seeds, name: str) -> Seeds:
    seeds = data if isinstance(data, Seeds) else read_seeds(data)
    if seeds.shape[1:] != known.shape[1:]:
        raise DataError(
            f"{name} must hold inputs like the run's, {list(known.shape[1:])}, got {list(seeds.shape[1:])}: pass other "
            "data"
        )
    return seeds
