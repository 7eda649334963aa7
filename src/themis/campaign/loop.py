"""The campaign: measure, judge, search, and again until something says stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from themis.campaign.budget import affordable, portion, round_size
from themis.campaign.callback import Callbacks
from themis.campaign.criterion import Guide
from themis.campaign.interrupt import held_back
from themis.campaign.objectives import measure_next
from themis.campaign.setup import class_numbers, describe_start
from themis.campaign.state import UnderWay, load, save
from themis.campaign.stop import stop_reason
from themis.data.seeds import Seeds
from themis.errors import StoreError, UsageError
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
from themis.measure.moments import Moments
from themis.measure.panel import Panel, Shape, choose_panel
from themis.measure.tally import Tally
from themis.measure.tests import Results, Tests
from themis.oracle import choose_oracle
from themis.perturb import Perturbation
from themis.runs.faults import Faults
from themis.runs.replay import LiveRun
from themis.runs.run import Round, Run, Seconds
from themis.runs.store.tensors import Tensors
from themis.runs.store.writer import Checkpoint, Writer
from themis.search import Policy, Space
from themis.search.policy import UNIFORM_STREAM, Novelty
from themis.settings import Settings
from themis.target.target import AnyTarget

STREAMS = ("uniform", "search")


class Campaign:
    """One campaign on an open target."""

    def __init__(
        self,
        target: AnyTarget,
        seeds: Seeds,
        perturbation: Perturbation,
        policy: Policy,
        settings: Settings,
        callbacks: Callbacks,
        store: Writer | None,
        environment: dict[str, Any],
        chunk: int | None = None,
        guide: Guide | None = None,
    ) -> None:
        self.began = perf_counter()
        self.seconds = dict.fromkeys(("measure", "judge", "search"), 0.0)
        self.settings, self.policy, self.guide, self.callbacks, self.store = settings, policy, guide, callbacks, store
        self.target, self.seeds, self.perturbation, self.environment = target, seeds, perturbation, environment
        self.rule = Rule(settings.tolerance, settings.draws, settings.alpha)
        self.rounds: list[Round] = []
        self.under_way: UnderWay | None = None
        self._untold: deque[tuple[str, Any]] = deque()
        self._is_torn = False
        with self._timed("measure"):
            self._sweep(chunk)
        self.space = self._space()
        if settings.max_passes is not None and settings.max_passes < self.calculator.passes + self.cost:
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
        handle = LiveRun(self.calculator, settings.random_seed)
        self.faults = Faults(perturbation.name, theta, layers, handle)
        blank = torch.zeros(self.calculator.n_neurons, dtype=torch.float64, device=target.device)
        self.open_neurons = sample_neurons(blank, settings.sample).sort().values

    def restore(self, checkpoint: Checkpoint, rounds: list[Round], faults: Faults) -> None:
        """Go on where an earlier campaign was at its last checkpoint."""
        load(self, checkpoint)
        self.rounds = rounds
        if len(faults):
            self.faults.add(**faults.columns)

    def run(self) -> Run:
        """Rounds until a stop reason."""
        self.start = describe_start(self)
        if self.store:
            self.store.note("start", self.start.as_dict())
        self.callbacks.call("on_start", self.start)
        try:
            stop = self._loop()
        except Exception as error:
            self._fail(error)
            raise
        result = self._finish(*stop)
        if self.store:
            self.store.end(result.summary())
        self.callbacks.call("on_end", result)
        return result

    def _loop(self) -> tuple[str, str]:
        try:
            while self.under_way or (stop := stop_reason(self.settings, self.rounds, self.cost, self.guide)) is None:
                self._round()
            self._save(now=True)
        except KeyboardInterrupt:
            stop, self.callbacks.is_stopping = ("user", "the user stopped it"), True
            if not self._is_torn:
                self._save(now=True)
            self._judge_the_rest()
        return stop

    def _fail(self, error: Exception) -> None:
        """The model, the disk or Themis failed in mid-campaign: what was found until then is kept."""
        if self.store and not isinstance(error, StoreError):
            with suppress(Exception):  # the error itself must come through
                self.store.note("failed", f"Stopped because it failed: {error}.")
                self._save(now=True, is_checkpoint=False)
                self._judge_the_rest()
                self.store.end(self._finish("error", f"it failed: {error}").summary())
        self.callbacks.call("on_error", error)

    def _judge_the_rest(self) -> None:
        """Judge a round cut short, for the summary: a resumed campaign measures the rest of it first."""
        if not self.rounds or self.rounds[-1].tests < self.tally.tests:
            self._judge()
            self._save(now=True, is_checkpoint=False)

    # Keeping what was found

    def _save(self, *, now: bool = False, is_checkpoint: bool = True) -> None:
        """Bring faults, rounds and the state to the disk when it is time to, then tell the callbacks of them."""
        if self.store is None or self.store.flush(partial(save, self) if is_checkpoint else None, now=now):
            while self._untold:
                self.callbacks.call(*self._untold.popleft())

    # Phase 1, measure

    def _sweep(self, chunk: int | None) -> None:
        settings = self.settings
        self.calculator = Calculator(
            self.target,
            self.seeds,
            self.perturbation,
            choose_oracle(self.target.oracle),
            batch_size=settings.batch_size,
            chunk=chunk,
            clean_bytes=int(settings.clean_memory_gib * 2**30),
            min_ssim=settings.min_ssim,
        )
        self.calculator.max_passes = settings.max_passes
        self.calculator.view = None if self.guide is None else self.guide.view(self.calculator)
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

    def _measure(self, under_way: UnderWay, stream: str) -> None:
        """Run the next chunk of a stream, count and keep its faults."""
        tests, self.stream = under_way.left(stream), stream
        with self._timed("measure"):
            results = measure_next(self, tests, stream)
        tests = tests[: len(results)]
        with self._timed("search"):
            self.tally.add(tests, results, stream == "uniform")
            self._keep_faults(tests, results, stream)
            under_way.results.setdefault(stream, []).append(replace(results, faults=None))
            under_way.keep(stream, affordable(self, under_way.left(stream)))  # non-finite outputs cost more passes
            if under_way.n_done(stream) == len(under_way.tests[stream]):
                self.policy.observe(under_way.tests[stream], Results.join(under_way.results[stream]))

    def _keep_faults(self, tests: Tests, results: Results, stream: str) -> None:
        at, details = np.flatnonzero(results.is_fault), results.faults
        assert details is not None
        n, rows, columns, tensors = len(at), tests.seed[at], None, None
        if n:
            columns = {
                "id": tests.number[at],
                "seed_id": self.seeds.seed_id.numpy()[rows],
                "theta": tests.theta[at],
                "noise_seed": tests.noise_seed[at],
                "round": np.full(n, len(self.rounds) + 1),
                "stream": np.full(n, stream),
                "kind": tests.kind[at],
                "label": self.classes[rows],
                "clean_answer": self.clean_answers[rows],
                "answer": results.outcome[at],
                "clean_value": self.clean_values[rows],
                "value": details.value,
                "confidence": details.confidence,
                "margin": results.margin[at],
                "distance": details.distance,
                "linf": details.linf,
                "ssim": details.ssim,
                "signature": details.signature,
                "position": details.position,
                "chunk": np.full(n, self.calculator.chunk),
                "raised": np.zeros(n, dtype=bool) if results.raised is None else results.raised[at],
            }
            self.faults.add(**columns)
            if self.callbacks.wants("on_fault"):
                self._untold += [("on_fault", fault) for fault in self.faults.latest()]
            id = torch.from_numpy(columns["id"])
            tensors = Tensors(id, self.seeds.take(torch.from_numpy(rows)), details.inputs, details.outputs)
        if self.store:
            self.store.add_faults(int(tests.number[-1]) + 1, columns, tensors)

    # Phase 2, judge

    def _total(self) -> Moments:
        uniform, search = (self.moments[stream].moments() for stream in STREAMS)
        return uniform.merge(search).checked(self.calculator.layers)

    def _is_dead(self, moments: Moments) -> Tensor:
        return (self.clean.m2 == 0) & (moments.m2 == 0) & (moments.mean == 0)

    def _cover(self, moments: Moments, judge: Any) -> tuple[Coverage, Tensor | None]:
        return cover(
            rescale(moments, self.scale),
            self.calculator.layers,
            is_dead=self._is_dead(moments),
            rule=self.rule,
            goal=self.settings.coverage or 1.0,
            k=self.settings.sample,
            judge=judge,
            random_seed=self.settings.random_seed + len(self.rounds),
            names_neurons=self.policy.climbs or self.space.climb_cost is not None,
        )

    def _judge(self) -> None:
        """Judge what was measured, and close the round."""
        with self._timed("judge"):
            total = self._total()
            coverage, open_neurons = self._cover(total, choose_judge(self.settings.judge))
            if coverage.sampled >= (self.settings.coverage or torch.inf) and self.settings.judge == "exact":
                coverage, open_neurons = self._cover(total, gibbs)  # a stop is confirmed by real chains
        if open_neurons is not None and len(open_neurons):
            self.open_neurons = open_neurons
        tally = self.tally
        done = Round(
            number=len(self.rounds) + 1,
            tests=tally.tests,
            dropped=tally.dropped,
            passes=self.calculator.passes,
            faults=tally.faults,
            distinct_faults=len(tally.distinct),
            failing_seeds=len(tally.failing_seeds),
            coverage=coverage,
            seconds=self.elapsed(),
            criterion_score=None if self.guide is None else self.guide.criterion.score(),
        )
        self.rounds.append(done)
        self.under_way = None
        if self.store:
            self.store.add_round(done)
        self._untold.append(("on_round", done))

    # Phase 3, search

    def _space(self) -> Space:
        calculator = self.calculator
        usable = calculator.usable.cpu()
        outputs = calculator.clean_outputs
        clean = calculator.oracle.compare(outputs, outputs, calculator.labels)
        margin = clean.margin.cpu()[usable].numpy()
        self.clean_answers = clean.outcome.cpu().numpy()
        value = torch.full_like(clean.margin, torch.nan) if clean.value is None else clean.value
        self.clean_values = value.cpu().numpy()
        self.classes = class_numbers(self.seeds.labels, len(self.seeds))
        seed_id = self.seeds.seed_id[usable].numpy()
        answers = self.clean_answers[usable.numpy()]
        cost = calculator.cost(True) / calculator.cost(False) if self.target.has_gradient else None
        what = (self.perturbation, usable.numpy(), seed_id, margin)
        return Space.of(*what, self.settings.random_seed, answers, cost)

    def _begin_round(self) -> UnderWay:
        n = round_size(self)
        due = round((self.tally.tests + n) * self.settings.uniform_share)
        n_uniform = min(n, max(0, due - self.tally.uniform_tests))
        proposed = {}
        if n_uniform:
            number = np.arange(self.tally.tests, self.tally.tests + n_uniform)
            counter = np.arange(self.tally.uniform_tests, self.tally.uniform_tests + n_uniform)
            proposed["uniform"] = self.novelty.ensure(self.space.uniform_tests(number, UNIFORM_STREAM, counter))
        return UnderWay(proposed, n - n_uniform)

    def _propose(self, under_way: UnderWay) -> None:
        """Ask the policy for its next portion of the round, which the budget may cut short."""
        first = self.tally.tests
        tests = self.policy.propose(np.arange(first, first + portion(self, under_way.left_to_propose)))
        n = affordable(self, tests)
        if n < len(tests):  # ascents cost more than a round counts on
            under_way.left_to_propose = n
        if n:
            under_way.propose(self.novelty.ensure(tests[:n]))

    @property
    def cost(self) -> int:
        """Passes of one test of the policy."""
        return self.calculator.cost(self.policy.climbs, len(getattr(self.policy, "rivals", ())))

    # The loop

    def _round(self) -> None:
        """Measure, judge and search once."""
        if self.under_way is None:
            with held_back(), self._timed("search"), self._tearing():
                self.under_way = self._begin_round()
        while (stream := self.under_way.stream()) is not None or self.under_way.left_to_propose:
            with held_back(), self._tearing():
                if stream is None:
                    with self._timed("search"):
                        self._propose(self.under_way)
                else:
                    self._measure(self.under_way, stream)
            self._save()
        self._judge()
        self._save()

    def _finish(self, reason: str, why: str) -> Run:
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
                start=self.start,
                fault_rate=fault_rate(
                    tally.uniform_tests_by_seed[self.space.seeds], tally.uniform_faults_by_seed[self.space.seeds]
                ),
                residual_risk=residual_risk(tally.times_seen(), int(tally.uniform_tests_by_seed.sum())),
                coverage_uniform=self._cover(uniform, exact)[0].all if tally.uniform_tests else None,
                coverage_interval=coverage_interval(
                    blocks, coverage.all, self.rule, is_judged, coverage.n_neurons - coverage.n_dead
                ),
                design_effect=design_effect(blocks),
                normality=describe_normality(self.shape),
                near_ties=tally.near_ties,
                kinds=tally.kinds,
                raised=tally.raised,
                policy=getattr(self.policy, "report", dict)(),
                of_criterion=self.guide.criterion.report() if self.guide else {},
                seconds=Seconds(**self.seconds, total=0.0),
                environment=self.environment,
            )
        self.calculator.release()
        return replace(result, seconds=Seconds(**self.seconds, total=self.elapsed()))

    def elapsed(self) -> float:
        """Seconds since the campaign began, those of an interrupted one included."""
        return perf_counter() - self.began

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """A block that changes several things which belong together: no checkpoint is taken after an error in it."""
        self._is_torn = True
        yield
        self._is_torn = False

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += perf_counter() - began
