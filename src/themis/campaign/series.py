"""Campaigns on one model and its seeds under several perturbations: the clean inputs are run once for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from themis.campaign.api import continue_campaign, describe_features, no_faults
from themis.campaign.callback import Callback, Callbacks
from themis.campaign.loop import run_campaign
from themis.campaign.recorder import Recorder
from themis.campaign.setup import CleanSweep, Setup, check_classes, prepare, sweep_clean
from themis.campaign.state import Clock, State, saved_chunk
from themis.campaign.tested import read_tested
from themis.data.features import Features
from themis.data.seeds import Seeds
from themis.errors import DataError, ModelError, UsageError
from themis.judge import choose_judge
from themis.perturb import Perturbation
from themis.perturb.perturbation import is_same_code
from themis.runs.environment import check_same_tests, describe_environment, describe_run, describe_tested
from themis.runs.parts import SeedSplit
from themis.runs.run import Run
from themis.runs.source import Origin
from themis.runs.store.reader import Reader
from themis.runs.store.writer import Writer
from themis.search import choose_policy
from themis.settings import Settings
from themis.target.ledger import ledger_of
from themis.target.target import AnyTarget
from themis.target.traits import refuse_tokens

NO_HASHES: dict[str, Any] = {"train_sha256": None, "criterion_sha256": None, "rivals_sha256": []}
"""What a run records of a criterion and of rivals, which a series does not have."""


@dataclass(frozen=True)
class CampaignSeries:
    """An open target, its seeds and the sweep over them. Every campaign leaves an ordinary run folder."""

    target: AnyTarget
    seeds: Seeds
    split: SeedSplit | None
    settings: Settings
    """Those that all campaigns have in common."""
    origin: Origin | None
    environment: dict[str, Any]
    clean: CleanSweep
    is_trusted: bool = True
    """Whether the code that stored campaigns name may run, so that their folders are signed again."""
    checked: set[Path] = field(default_factory=set)
    """Folders whose tests are known to be those of this model."""

    def run(self, perturbation: Perturbation, out: Path, callbacks: Iterable[Callback] = (), **options: Any) -> Run:
        """Run a campaign in a new folder; options are settings that differ from the common ones."""
        settings = replace(self.settings, **options)
        self.checked.add(out)
        with closing(Writer(out)) as store:
            record = self._record(perturbation, settings)
            record["parts"] = None if self.split is None else self.split.describe()
            store.create(record, settings.max_stored, None if self.split is None else self.split.as_bytes())
            clock = Clock()
            with clock.timed("measure"):
                setup = self._prepare(perturbation, settings)
            state = State.initial(setup, clock)
            return run_campaign(setup, state, Recorder(no_faults(setup), Callbacks(callbacks), store))

    def resume(self, perturbation: Perturbation, out: Path, callbacks: Iterable[Callback] = (), **options: Any) -> Run:
        """Continue the campaign in a folder; options are limits that differ from those before."""
        with closing(Writer(out)) as store, closing(Reader(out, is_brief=True)) as run:
            perturbation = perturbation.within(run.ranges)
            if out not in self.checked:
                self._check_same(run, perturbation)
                self.checked.add(out)
            settings = Settings.recorded({**run.record["settings"], **options})
            record = self._record(perturbation, settings)
            record["environment"] = run.record["environment"]
            checkpoint = run.checkpoint()
            clock = Clock()
            with clock.timed("measure"):
                setup = self._prepare(perturbation, settings, None if checkpoint is None else saved_chunk(checkpoint))
            called = Callbacks(callbacks)
            return continue_campaign(setup, clock, run, store, record, checkpoint, called, signs=self.is_trusted)

    def _record(self, perturbation: Perturbation, settings: Settings) -> dict[str, Any]:
        fitted = perturbation.fitted(tuple(self.seeds.shape[1:]))
        record = describe_run(settings, self.origin, fitted, self.environment)
        return {**record, **describe_features(perturbation, self.seeds), **NO_HASHES}

    def _prepare(self, perturbation: Perturbation, settings: Settings, chunk: int | None = None) -> Setup:
        is_shared = chunk in (None, self.clean.calculator.chunk)  # memory may have run out in an earlier process
        return prepare(
            self.target,
            self.seeds,
            perturbation,
            choose_policy(settings.policy),
            settings,
            self.environment,
            chunk=chunk,
            shared=self.clean if is_shared else None,
        )

    def _check_same(self, run: Reader, perturbation: Perturbation) -> None:
        """Refuse to continue the run of another model, other data or another perturbation."""
        then = run.record["environment"]
        for name, subject, error in (("model_sha256", "model", ModelError), ("data_sha256", "data", DataError)):
            if self.environment[name] != then[name]:
                raise error(
                    f"the {subject} must be the same as in {run.path}, but its hash differs: pass the same {subject}, "
                    "or choose another folder"
                )
        is_same = perturbation.name == run.record["perturbation"]
        if not is_same or not is_same_code(perturbation.code, run.record["perturbation_code"]):
            raise UsageError(
                f"the perturbation must be the same as in {run.path}, {run.record['perturbation']!r}, got "
                f"{perturbation.name!r}: pass the same one, or choose another folder"
            )
        check_same_tests(run, self.target, self.seeds, perturbation, self.clean.calculator.oracle)


@contextmanager
def open_series(
    target: AnyTarget | nn.Module,
    data: Any,
    perturbations: Sequence[Perturbation],
    settings: Settings,
    *,
    origin: Origin | None = None,
    features: Features | str | Path | None = None,
    classes: Sequence[str] | None = None,
) -> Iterator[CampaignSeries]:
    """Run all clean inputs once, for campaigns under these perturbations with these settings in common."""
    choose_judge(settings.judge)
    if settings.criterion is not None or choose_policy(settings.policy).takes_rivals:
        raise UsageError(
            "several perturbations share one clean sweep, so they must have neither a criterion nor a policy with "
            "rivals: leave them out, or test one perturbation with themis run"
        )
    tested = read_tested(target, data, perturbations, settings, origin, features, classes)
    target, seeds, split, origin, class_names = tested
    ledger_of(target, None if origin is None else origin.weights_path()).warn(seeds)
    with target.opened():
        refuse_tokens(target, seeds.take(torch.arange(1))[0])
        environment = describe_environment(target.device) | describe_tested(target, seeds, origin)
        clean = sweep_clean(target, seeds, perturbations[0], settings)
        if class_names is not None:
            check_classes(clean.calculator)
        yield CampaignSeries(target, seeds, split, settings, origin, environment, clean)
