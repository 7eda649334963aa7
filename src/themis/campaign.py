"""The campaign: measure, judge, search, and again until something says stop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from themis.callback import Callback, Callbacks
from themis.data.seeds import Seeds, read_seeds
from themis.environment import describe_environment
from themis.errors import ThemisError, UsageError
from themis.faults import Faults
from themis.judge import choose_judge
from themis.judge.coverage import Coverage, Rule, cover
from themis.judge.exact import exact
from themis.judge.gibbs import gibbs
from themis.judge.interval import coverage_interval, design_effect
from themis.judge.normality import describe_normality
from themis.judge.risk import fault_rate, residual_risk
from themis.judge.sampler import sample_neurons
from themis.judge.scale import relative_scale, rescale
from themis.measure.calculator import Calculator
from themis.measure.fold import Objective
from themis.measure.moments import Moments
from themis.measure.panel import Panel, Shape, choose_panel
from themis.measure.tally import Tally
from themis.measure.tests import Results, Tests
from themis.oracle import choose_oracle
from themis.perturb import Perturbation, choose_perturbation
from themis.replay import replay_fault
from themis.result import Round, Run, Seconds, Start, percent
from themis.search import Policy, Space, choose_policy
from themis.search.policy import UNIFORM_STREAM, Novelty
from themis.settings import Settings
from themis.store import Folder, Store
from themis.target import Target

ROUND_SIZE = 640
"""Tests a round, unless five chunks are more."""
STREAMS = ("uniform", "search")


def run(
    target: Target | nn.Module,
    data: Any,
    perturbation: str | Perturbation,
    *,
    out: str | Path | None = None,
    callbacks: Iterable[Callback] = (),
    **options: Any,
) -> Run:
    """Test `target` on `data` under `perturbation`; options are the fields of `Settings`.

    data: `(inputs, labels)`, a tensor of inputs, a Dataset or a DataLoader. out: folder for the results.
    """
    settings = Settings.of(**options)
    choose_judge(settings.judge)  # refuses an unknown name before anything runs
    policy = choose_policy(settings.policy)
    chosen = choose_perturbation(perturbation, settings.magnitude)
    if isinstance(target, nn.Module):
        target = Target(target)
    if not isinstance(target, Target):
        raise UsageError(f"target must be a themis.Target or an nn.Module, got {type(target).__name__}")
    seeds = read_seeds(data, settings.max_seeds)
    store = None if out is None else Folder(out)
    with target.opened():
        return Campaign(target, seeds, chosen, policy, settings, Callbacks(callbacks), store).run()


class Campaign:
    """One campaign on an open target."""

    def __init__(
        self,
        target: Target,
        seeds: Seeds,
        perturbation: Perturbation,
        policy: Policy,
        settings: Settings,
        callbacks: Callbacks,
        store: Store | None,
    ) -> None:
        self.began = perf_counter()
        self.seconds = dict.fromkeys(("measure", "judge", "search"), 0.0)
        self.settings, self.policy, self.callbacks, self.store = settings, policy, callbacks, store
        self.target, self.seeds, self.perturbation = target, seeds, perturbation
        self.rule = Rule(settings.tolerance, settings.draws, settings.alpha)
        self.rounds: list[Round] = []
        with self._timed("measure"):
            self._sweep()
        self.space = self._space()
        if settings.max_passes is not None and settings.max_passes < self.calculator.passes + self._cost:
            raise UsageError(
                f"max_passes must leave room for a test after the clean sweep's {self.calculator.passes:,}, got "
                f"{settings.max_passes:,}: raise it, or take fewer seeds with max_seeds"
            )
        self.policy.init(self.space)
        self.novelty = Novelty(self.space)
        self.tally = Tally(len(seeds))
        self.moments = {stream: self.calculator.accumulator() for stream in STREAMS}
        theta = tuple(each.name for each in perturbation.theta)
        layers = tuple(layer.name for layer in self.calculator.layers)
        replay = partial(replay_fault, calculator=self.calculator, seeds=seeds)
        self.faults = Faults(perturbation.name, theta, layers, replay)
        blank = torch.zeros(self.calculator.n_neurons, dtype=torch.float64, device=target.device)
        self.open_neurons = sample_neurons(blank, settings.sample).sort().values

    def run(self) -> Run:
        """Rounds until a stop reason."""
        environment = describe_environment(self.target.device)
        start = self._start()
        if self.store:
            self.store.begin(start, environment)
        self.callbacks.call("on_start", start)
        stop: tuple[str, str] | None = None
        try:
            while stop is None:
                is_whole = self._round()
                stop = self._stop() if is_whole else ("user", "the user stopped it")
        except KeyboardInterrupt:
            stop = ("user", "the user stopped it")
            if not self.rounds or self.rounds[-1].tests < self.tally.tests:
                self._judge()
        except ThemisError as error:
            self._fail(start, environment, error)
            raise
        result = self._finish(start, environment, *stop)
        if self.store:
            self.store.end(result)
        self.callbacks.call("on_end", result)
        return result

    def _fail(self, start: Start, environment: dict[str, Any], error: ThemisError) -> None:
        """The model or the disk failed in mid-campaign: what was found until then is kept."""
        self.callbacks.call("on_error", error)
        if self.store and self.rounds:
            with suppress(ThemisError):
                self.store.end(self._finish(start, environment, "error", f"it failed: {error}"))

    # Phase 1, measure

    def _sweep(self) -> None:
        settings = self.settings
        self.calculator = Calculator(
            self.target,
            self.seeds,
            self.perturbation,
            choose_oracle(self.target.oracle, self.seeds.labels is not None),
            batch_size=settings.batch_size,
            clean_bytes=int(settings.clean_memory_gib * 2**30),
        )
        self.clean = self.calculator.sweep()
        self.scale = relative_scale(self.clean, self.calculator.layers) if settings.scale == "relative" else None
        neurons = choose_panel(self.calculator.n_neurons, random_seed=settings.random_seed)
        self.panel, self.shape = Panel.empty(neurons), Shape.empty(len(neurons))
        self.stream = STREAMS[0]
        self.calculator.watch_panel(neurons, self._watch)

    def _watch(self, differences: Tensor, seed: Tensor) -> None:
        self.panel.add(differences.abs(), seed)
        if self.stream == "uniform" or self.settings.uniform_share == 0:
            self.shape.add(differences)

    def _measure(self, tests: Tests, stream: str) -> bool:
        """Run tests, count and keep their faults; False when the user interrupted them."""
        objective = None
        if self.policy.climbs and stream == "search":
            objective = Objective(self.open_neurons, self.scale)
        self.stream = stream
        with self._timed("measure"):
            results = self.calculator.measure(tests, self.moments[stream], objective)
        is_whole = len(results) == len(tests)
        tests = tests[: len(results)]
        with self._timed("search"):
            self.tally.add(tests, results, stream == "uniform")
            self._keep_faults(tests, results, stream)
            self.policy.observe(tests, results)
        return is_whole

    def _keep_faults(self, tests: Tests, results: Results, stream: str) -> None:
        at = np.flatnonzero(results.is_fault)
        if not len(at):
            return
        n = len(at)
        calculator, rows = self.calculator, tests.seed[at]
        labels = np.full(n, -1) if self.seeds.labels is None else self.seeds.labels.numpy()[rows]
        self.faults.add(
            id=tests.number[at],
            seed_id=self.seeds.seed_id.numpy()[rows],
            theta=tests.theta[at],
            noise_seed=tests.noise_seed[at],
            round=np.full(n, len(self.rounds) + 1),
            stream=np.full(n, stream),
            kind=tests.kind[at],
            label=labels,
            clean_answer=self.clean_answers[rows],
            answer=results.outcome[at],
            confidence=results.faults.confidence,
            margin=results.margin[at],
            distance=results.faults.distance,
            ssim=results.faults.ssim,
            signature=results.faults.signature,
            position=at % calculator.chunk,
        )
        if self.store or self.callbacks.wants("on_fault"):
            found = self.faults.latest()
            if self.store:
                self.store.add_faults(found, results.faults.inputs)
            for fault in found:
                self.callbacks.call("on_fault", fault)

    # Phase 2, judge

    def _total(self) -> Moments:
        uniform, search = (self.moments[stream].moments() for stream in STREAMS)
        return self.calculator.checked(uniform.merge(search))

    def _is_dead(self, moments: Moments) -> Tensor:
        return (self.clean.m2 == 0) & (moments.m2 == 0) & (moments.mean == 0)

    def _cover(self, moments: Moments, judge: Any) -> tuple[Coverage, Tensor | None]:
        return cover(
            rescale(moments, self.scale),
            self.calculator.layers,
            is_dead=self._is_dead(moments),
            rule=self.rule,
            goal=self.settings.coverage,
            k=self.settings.sample,
            judge=judge,
            random_seed=self.settings.random_seed + len(self.rounds),
            names_neurons=self.policy.climbs,
        )

    def _judge(self) -> None:
        """Judge what was measured, and close the round."""
        with self._timed("judge"):
            total = self._total()
            coverage, open_neurons = self._cover(total, choose_judge(self.settings.judge))
            if coverage.sampled >= self.settings.coverage and self.settings.judge == "exact":
                coverage, open_neurons = self._cover(total, gibbs)  # a stop is confirmed by real chains
        if open_neurons is not None and len(open_neurons):
            self.open_neurons = open_neurons
        tally = self.tally
        done = Round(
            number=len(self.rounds) + 1,
            tests=tally.tests,
            passes=self.calculator.passes,
            faults=tally.faults,
            distinct_faults=len(tally.distinct),
            failing_seeds=len(tally.failing_seeds),
            coverage=coverage,
            seconds=perf_counter() - self.began,
        )
        self.rounds.append(done)
        if self.store:
            self.store.add_round(done)
        self.callbacks.call("on_round", done)

    # Phase 3, search

    def _space(self) -> Space:
        calculator = self.calculator
        usable = calculator.usable.cpu()
        reference = calculator.oracle.compare(calculator.clean_outputs, calculator.clean_outputs, calculator.labels)
        margin = reference.margin.cpu()[usable].numpy()
        self.clean_answers = reference.outcome.cpu().numpy()
        seed_id = self.seeds.seed_id[usable].numpy()
        return Space.of(self.perturbation, usable.numpy(), seed_id, margin, self.settings.random_seed)

    def _propose(self) -> dict[str, Tests]:
        n = self._round_size()
        n_uniform = round(n * self.settings.uniform_share)
        number = np.arange(self.tally.tests, self.tally.tests + n)
        counter = np.arange(self.tally.uniform_tests, self.tally.uniform_tests + n_uniform)
        proposed = {}
        if n_uniform:
            uniform = self.space.uniform_tests(number[:n_uniform], UNIFORM_STREAM, counter)
            proposed["uniform"] = self.novelty.ensure(uniform)
        if n > n_uniform:
            proposed["search"] = self.novelty.ensure(self.policy.propose(number[n_uniform:]))
        return proposed

    def _round_size(self) -> int:
        """Tests of the next round: fewer where a budget is nearly spent."""
        settings, tests = self.settings, self.tally.tests
        size = settings.round_size or (len(self.space.seeds) if self.policy.climbs else self._whole_chunks())
        if settings.max_tests is not None:
            size = min(size, settings.max_tests - tests)
        if settings.max_passes is not None:
            size = min(size, (settings.max_passes - self.calculator.passes) // self._cost)
        if settings.max_seconds is not None and tests:
            rate = tests / (perf_counter() - self.began)
            size = min(size, int(rate * (settings.max_seconds - perf_counter() + self.began)))
        return max(1, size)

    @property
    def _cost(self) -> int:
        """Passes of one test of the policy."""
        return (3 if self.policy.climbs else 1) + self.perturbation.passes

    def _whole_chunks(self) -> int:
        """A round of about ROUND_SIZE tests or more in which both streams fill their chunks."""
        chunk, share = self.calculator.chunk, self.settings.uniform_share
        n_streams = 1 if share in (0, 1) else 5
        return max(ROUND_SIZE, n_streams * chunk)

    # The loop

    def _round(self) -> bool:
        """Measure, judge and search once; False when the user interrupted it."""
        with self._timed("search"):
            proposed = self._propose()
        is_whole = all(self._measure(tests, stream) for stream, tests in proposed.items())
        self._judge()
        return is_whole

    def _stop(self) -> tuple[str, str] | None:
        settings, last = self.settings, self.rounds[-1]
        if last.coverage.sampled >= settings.coverage:
            return "coverage", (
                f"coverage {percent(last.coverage.sampled)} of the sampled neurons reached the goal of "
                f"{percent(settings.coverage)}, confirmed by Markov chains"
            )
        if settings.max_tests is not None and last.tests >= settings.max_tests:
            return "tests", f"the budget of {settings.max_tests:,} tests is spent"
        if settings.max_passes is not None and last.passes + self._cost > settings.max_passes:
            return "passes", f"the budget of {settings.max_passes:,} passes is spent"
        if settings.max_seconds is not None and last.seconds >= settings.max_seconds:
            return "seconds", f"the budget of {settings.max_seconds:g} seconds is spent"
        if settings.plateau is not None and len(self.rounds) > settings.plateau:
            before = self.rounds[-1 - settings.plateau]
            if (
                before.distinct_faults == last.distinct_faults
                and before.coverage.all >= last.coverage.all
                and before.coverage.sampled >= last.coverage.sampled
            ):
                return "plateau", f"{settings.plateau} rounds brought no new distinct fault and no more coverage"
        return None

    def _start(self) -> Start:
        calculator, labels = self.calculator, self.seeds.labels
        accuracy = None if labels is None else float((torch.from_numpy(self.clean_answers) == labels).double().mean())
        return Start(
            bounds=self.target.bounds,
            perturbation=self.perturbation.name,
            theta=self.perturbation.theta,
            settings=self.settings,
            layers=calculator.layers,
            n_neurons=calculator.n_neurons,
            n_seeds=len(self.seeds),
            n_usable=len(self.space.seeds),
            clean_accuracy=accuracy,
            chunk=calculator.chunk,
            n_kept=calculator.kept.n_kept,
            device=str(calculator.device),
        )

    def _finish(self, start: Start, environment: dict[str, Any], reason: str, why: str) -> Run:
        tally, coverage = self.tally, self.rounds[-1].coverage
        with self._timed("judge"):
            uniform = self.moments["uniform"].moments()
            blocks = rescale(self.panel.blocks(), None if self.scale is None else self.scale[self.panel.neurons])
            is_judged = ~self._is_dead(self._total())[self.panel.neurons]
            result = Run(
                stop=f"Stopped because {why}.",
                stop_reason=reason,
                faults=self.faults,
                rounds=self.rounds,
                start=start,
                fault_rate=fault_rate(
                    tally.uniform_tests_by_seed[self.space.seeds], tally.uniform_faults_by_seed[self.space.seeds]
                ),
                residual_risk=residual_risk(tally.times_seen(), tally.uniform_tests),
                coverage_uniform=self._cover(uniform, exact)[0].all if tally.uniform_tests else None,
                coverage_interval=coverage_interval(
                    blocks, coverage.all, self.rule, is_judged, coverage.n_neurons - coverage.n_dead
                ),
                design_effect=design_effect(blocks),
                normality=describe_normality(self.shape),
                near_ties=tally.near_ties,
                kinds=tally.kinds,
                seconds=Seconds(**self.seconds, total=0.0),
                environment=environment,
            )
        self.calculator.release()
        return replace(result, seconds=Seconds(**self.seconds, total=perf_counter() - self.began))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += perf_counter() - began
