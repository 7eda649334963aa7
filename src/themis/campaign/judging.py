"""Phase 2 of a round: from the moments of a campaign to its coverage, and at the end to its result."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor

from themis.campaign.planning import is_little_left
from themis.campaign.setup import Setup, class_numbers
from themis.campaign.state import State
from themis.judge import choose_judge
from themis.judge.coverage import Coverage, Sample, cover, rescale
from themis.judge.estimate import Estimate
from themis.judge.gibbs import gibbs
from themis.judge.interval import coverage_interval, design_effect
from themis.judge.normality import describe_normality
from themis.judge.posterior import Judge, exact
from themis.judge.reach import forecast
from themis.judge.risk import fault_rate, residual_risk, unseen_mass
from themis.measure.moments import Moments
from themis.measure.tally import Tally
from themis.measure.tests import Floats, Ints
from themis.runs.estimates import correct_by_strength, rates_by_class
from themis.runs.fault import gives_answers
from themis.runs.faults import Faults
from themis.runs.run import Round, Run, Seconds, Start

MOST = 0.95
"""`forecast_faults_tests` are the tests that find this share of what is within reach."""


def judge(setup: Setup, state: State) -> tuple[Round, Tensor | None]:
    """Judge all that was measured so far.

    Returns the round that it ends, and the sampled neurons that have not converged if gradient ascent may aim at them.
    """
    settings, tally = setup.settings, state.tally
    with state.clock.timed("judge"):
        risk = _residual_risk(tally)
        faults = forecast(tally.distinct.values(), tally.tests)
        seeds = forecast(tally.failing_seeds.values(), tally.tests, len(setup.space.seeds))
        total = state.total_moments().checked(setup.calculator.layers)
        coverage, open_neurons = _cover(setup, state, total, choose_judge(settings.judge))
        stops_at_coverage = setup.covers_neurons and not (setup.criterion is not None and setup.criterion.leads)
        is_goal_reached = stops_at_coverage and coverage.sampled >= (settings.coverage or torch.inf)
        if is_goal_reached and settings.judge == "exact" and is_little_left(settings.recall, faults.recall, risk):
            coverage, open_neurons = _cover(setup, state, total, gibbs)  # chains confirm a stop
    round = Round(
        number=len(state.rounds) + 1,
        tests=tally.tests,
        dropped=tally.dropped,
        passes=state.passes,
        faults=tally.faults,
        distinct_faults=len(tally.distinct),
        failing_seeds=len(tally.failing_seeds),
        coverage=coverage,
        seconds=state.clock.elapsed(),
        criterion_score=None if state.criterion is None else state.criterion.score(),
        residual_risk=risk,
        reachable_faults=faults.estimate,
        reachable_seeds=seeds.estimate,
        recall=faults.recall,
        forecast_faults_tests=faults.tests_to(MOST),
    )
    return round, open_neurons


def conclude(setup: Setup, state: State, start: Start, faults: Faults, reason: str, why: str) -> Run:
    """The result of a campaign that stopped for a reason: one word, and a clause that says why."""
    tally, coverage = state.tally, state.rounds[-1].coverage
    tests_by_seed, faults_by_seed = tally.uniform_tests_by_seed, tally.uniform_faults_by_seed
    with state.clock.timed("judge"):
        uniform = state.moments["uniform"].moments()
        scale = None if setup.scale is None else setup.scale[setup.panel_neurons]
        blocks = rescale(state.panel.blocks(), scale)
        total = state.total_moments()
        is_judged = ~_is_dead(setup.clean, total)[setup.panel_neurons]
        run = Run(
            stop=f"Stopped because {why}.",
            stop_reason=reason,
            faults=faults,
            rounds=state.rounds,
            start=start,
            fault_rate=fault_rate(tests_by_seed[setup.space.seeds], faults_by_seed[setup.space.seeds]),
            residual_risk=state.rounds[-1].residual_risk,
            residual_risk_uniform=unseen_mass(tally.times_seen(), int(tests_by_seed.sum())),
            coverage_uniform=_cover(setup, state, uniform, exact)[0].all if tally.uniform_tests else None,
            coverage_interval=coverage_interval(
                blocks, coverage.all, setup.rule, is_judged, coverage.n_neurons - coverage.n_dead
            ),
            design_effect=design_effect(blocks),
            normality=describe_normality(state.shape),
            correct_by_strength=()
            if tally.dropped
            else correct_by_strength(setup.space, tally.uniform_tests, *_uniform_faults(faults)),
            by_class=()
            if tally.dropped
            else rates_by_class(
                _classes(setup)[setup.space.seeds],
                tests_by_seed[setup.space.seeds],
                faults_by_seed[setup.space.seeds],
            ),
            near_ties=tally.near_ties,
            kinds=tally.kinds,
            raised=tally.raised,
            policy=state.policy.report(),
            of_criterion={} if state.criterion is None else state.criterion.report(),
            seconds=Seconds(**state.clock.phases, total=0.0),
            environment=setup.environment,
            requests=None if setup.calculator.sent is None else asdict(setup.calculator.sent),
            posterior_means=rescale(total, setup.scale).mean.cpu().numpy(),
        )
    setup.measurer.end()
    return replace(run, seconds=Seconds(**state.clock.phases, total=state.clock.elapsed()))


def _classes(setup: Setup) -> Ints:
    """The class of each seed: its label, or its clean answer without labels; -1 in tasks without classes."""
    calculator, n = setup.calculator, len(setup.seeds)
    if not gives_answers(calculator.clean.oracle.spec().partition(":")[0]):
        return np.full(n, -1)
    if calculator.clean.labels is not None:
        return class_numbers(calculator.clean.labels.cpu(), n)
    outputs = calculator.clean.outputs
    return outputs.argmax(1).cpu().numpy() if outputs.ndim == 2 and outputs.shape[1] > 1 else np.full(n, -1)


def _uniform_faults(faults: Faults) -> tuple[Ints, Floats]:
    """Seed id and theta of each fault of the uniform stream."""
    columns = faults.columns
    if not columns:
        return np.zeros(0, np.int64), np.zeros((0, len(faults.theta)), np.float32)
    is_uniform = columns["stream"] == "uniform"
    return columns["seed_id"][is_uniform], columns["theta"][is_uniform]


def _residual_risk(tally: Tally) -> Estimate | None:
    return residual_risk(
        tally.times_seen(),
        tally.first_seen(),
        tally.is_among(tally.uniform_new),
        tally.is_among(tally.searched),
        n_tests=int(tally.uniform_tests_by_seed.sum()),
        n_unplaced=tally.uniform_unplaced,
    )


def _cover(setup: Setup, state: State, moments: Moments, judge: Judge) -> tuple[Coverage, Tensor | None]:
    """Coverage by a judge, and the sampled neurons that have not converged if gradient ascent may aim at them."""
    settings = setup.settings
    return cover(
        rescale(moments, setup.scale),
        setup.calculator.layers,
        is_dead=_is_dead(setup.clean, moments),
        rule=setup.rule,
        goal=settings.coverage or 1.0,
        sample=Sample(
            settings.sample,
            judge,
            settings.random_seed + len(state.rounds),
            names_neurons=state.policy.needs_gradient or setup.space.gradient_cost is not None,
        ),
    )


def _is_dead(clean: Moments, moments: Moments) -> Tensor:
    """Which neurons are constant on clean and disturbed inputs alike."""
    return (clean.m2 == 0) & (moments.m2 == 0) & (moments.mean == 0)
