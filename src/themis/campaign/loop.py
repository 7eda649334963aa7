"""The loop of a campaign: search, measure, judge, and again until there is a reason to stop.

Below the loop is what each round decides: how large it is and when to stop, what is due next, how it is judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import inf, log2

import numpy as np
import torch
from torch import Tensor

from themis.campaign.interrupt import Terminated
from themis.campaign.recorder import Recorder
from themis.campaign.setup import CampaignCriterion, Setup, describe_start
from themis.campaign.state import Proposal, State
from themis.judge import choose_judge
from themis.judge.calibration import Calibration, calibration_error, sum_gaps
from themis.judge.coverage import Coverage, Judge, Sample, cover, exact, rescale
from themis.judge.decide import Decision, decide, decide_recall, rate_at_any_time
from themis.judge.estimate import Estimate
from themis.judge.gibbs import gibbs
from themis.judge.interval import coverage_interval, design_effect
from themis.judge.normality import describe_normality
from themis.judge.risk import RECALL_QUANTILE, fault_rate, forecast, residual_risk, unseen_mass
from themis.measure.captured import foreground
from themis.measure.fold import Objective
from themis.measure.moments import Moments
from themis.measure.runner import Portion
from themis.measure.tests import Floats, Ints, Results, Tests
from themis.runs.environment import record_samples
from themis.runs.estimates import correct_by_strength
from themis.runs.faults import Faults
from themis.runs.run import Round, Run, Seconds, Start
from themis.runs.store.writer import Checkpoint
from themis.search.kinds import ASCENTS, MARGIN_ASCENT, SENSITIVITY_ASCENT
from themis.settings import MAX_RISK, UNDECIDED, Settings, read_claim
from themis.text import counted, percent


def run_campaign(setup: Setup, state: State, recorder: Recorder) -> Run:
    """Run rounds until there is a reason to stop."""
    start = describe_start(setup, state.tally.tests)
    recorder.start(start, lambda: record_samples(setup.calculator))
    with foreground(setup.calculator.device), recorder.interrupts.handled():
        try:
            run = _run_rounds(setup, state, recorder, start)
        except Exception as error:
            why = f"it failed: {error}"

            def result_so_far() -> Run:
                _judge_partial_round(setup, state, recorder)
                return conclude(setup, state, start, recorder.faults, "error", why)

            recorder.fail(error, result_so_far)
            raise
    recorder.end(run)
    return run


def _run_rounds(setup: Setup, state: State, recorder: Recorder, start: Start) -> Run:
    """Run rounds until there is a reason to stop, and conclude while the last of them is written."""
    max_tests, checkpoint = setup.settings.max_tests, partial(_checkpoint, setup, state)
    if max_tests is not None:  # proposals were made under a budget that may have been larger
        state.limit(max(0, max_tests - state.tally.tests))
    try:
        while state.is_round_open or (stop := why_to_stop(setup, state)) is None:
            run_round(setup, state, recorder)
        recorder.keep(checkpoint, now=True)
        run = conclude(setup, state, start, recorder.faults, *stop)
        recorder.finish()
    except KeyboardInterrupt as error:
        why = str(error) if isinstance(error, Terminated) else "the user stopped it"
        recorder.callbacks.is_stopping = True
        if not recorder.is_torn:
            recorder.keep(checkpoint, now=True)
        _judge_partial_round(setup, state, recorder)
        recorder.finish()
        run = conclude(setup, state, start, recorder.faults, "user", why)
    return run


def has_finished(setup: Setup, state: State) -> bool:
    """Whether no test is left to run."""
    return not state.is_round_open and why_to_stop(setup, state) is not None


def run_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """One round: propose tests (phase 3), measure them chunk by chunk (phase 1), and judge (phase 2)."""
    checkpoint = partial(_checkpoint, setup, state)
    while True:
        with recorder.atomic():
            _propose(setup, state)
        if state.is_round_complete or not state.pending:
            break
        with recorder.atomic():
            _measure(setup, state, recorder)
        recorder.keep(checkpoint)
    _end_round(setup, state, recorder)
    recorder.keep(checkpoint)


def _checkpoint(setup: Setup, state: State) -> Checkpoint:
    setup.sweep.measurer.gather()
    return state.checkpoint()


def _propose(setup: Setup, state: State) -> None:
    """Propose the tests that are due.

    Early in a campaign, the policy learns the results of a portion before it proposes the next one. From `AHEAD_FROM`
    tests on, it proposes the next portion when the current one starts, using only the results of earlier portions, so
    that the next tests are ready while the current ones run.
    """
    while True:
        first = state.tally.tests + state.n_pending
        is_ahead = state.policy.can_be_ahead and first >= AHEAD_FROM
        if state.is_round_complete and not is_ahead:
            return
        with state.clock.timed("search"):
            round_end = state.round_end
            _observe(state, is_ahead=is_ahead)
            waiting = {each.number for each in state.proposals if each.n_pending or not len(each.tests)}
            if len(waiting) > is_ahead or (first == round_end and is_spent(setup, state, first)):
                return
            if begins_round := first == round_end:
                round_end += next_round_size(setup, state, first)
            uniform, search = _next_tests(setup, state, round_end)
            n = max(0, n_affordable(setup, state, uniform, search) - state.n_pending)
            if n < len(uniform) + len(search):  # ascents cost more than the size of the round allowed for
                round_end = first + n
            for stream, tests in ("uniform", uniform[:n]), ("search", search[: max(0, n - len(uniform))]):
                if len(tests) or not n:
                    new, neurons = state.novelty.ensure(tests), state.open_neurons
                    state.proposals.append(Proposal(first, stream, new, begins_round, round_end, neurons))
        if not n:
            return


def _observe(state: State, *, is_ahead: bool) -> None:
    """Let the policy learn from tests that have been run, but if it is ahead, not from the portion proposed last."""
    while (left := state.proposals) and not left[0].n_pending and not (is_ahead and left[0].number == left[-1].number):
        proposal = left.pop(0)
        if len(proposal.tests):  # else a budget has cut them off
            state.policy.observe(proposal.tests, Results.join(proposal.results))


def _next_tests(setup: Setup, state: State, round_end: int) -> tuple[Tests, Tests]:
    """The next tests of a round, of the uniform stream and of the policy.

    In the first stages, the policy learns the results of the uniform tests before it proposes. Later they teach it
    little, and both are proposed together.
    """
    first = state.tally.tests + state.n_pending
    end = stage_end(first, round_end, setup.settings.uniform_share)
    uniform = uniform_tests_due(setup, first, _n_uniform(state), end)
    n = first + len(uniform)
    if len(uniform) and (first < LAST_STAGE or n == end):
        return uniform, uniform[:0]
    # A seed takes one step of an ascent at a time, because the next one depends on its gradient.
    most = len(setup.space.seeds) if state.policy.needs_gradient else portion(end - n, n, setup.calculator.chunk)
    return uniform, state.policy.propose(np.arange(n, min(end, n + most)))


def _n_uniform(state: State) -> int:
    """The number of tests of the uniform stream that have been run or proposed."""
    n = state.tally.uniform_tests
    for proposal in state.proposals:
        n += proposal.n_pending if proposal.stream == "uniform" else 0
    return n


def _measure(setup: Setup, state: State, recorder: Recorder) -> None:
    """Run the next chunk of the proposed tests, fold it, count its results and record its faults."""
    settings, planned, proposal = setup.settings, _planned(setup, state), state.pending[0]
    with state.clock.timed("measure"):
        left = None if settings.max_passes is None else settings.max_passes - state.passes
        measurement = setup.sweep.measurer.measure(next(planned), planned, left)
        tests, stream = proposal.pending[: len(measurement.results)], proposal.stream
        state.add(tests, measurement, stream, is_shape_sample=stream == "uniform" or settings.uniform_share == 0)
    with state.clock.timed("search"):
        recorder.add_faults(setup, tests, measurement, len(state.rounds) + 1, stream)
        proposal.results.append(measurement.results)
        proposal.n_run += len(tests)
        if (n := n_affordable(setup, state)) < state.n_pending:
            state.limit(n)


def _end_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """Judge the round; an interrupt while that takes its time leaves the round open."""
    setup.sweep.measurer.gather(_planned(setup, state))
    round, open_neurons = judge(setup, state)
    with recorder.atomic():
        if open_neurons is not None and len(open_neurons):
            state.open_neurons = open_neurons
        state.rounds.append(round)
        recorder.add_round(round)


def _judge_partial_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """Judge a round that was cut short, for the summary; a resumed campaign measures the rest of it first."""
    if state.is_round_open or not state.rounds:
        _end_round(setup, state, recorder)
        recorder.keep(None, now=True)


def _choose_objective(setup: Setup, state: State, proposal: Proposal, tests: Tests) -> tuple[Tests, Objective | None]:
    """The first of some tests that share an objective, and that objective; None if they have none.

    An objective is what gradient ascent on theta maximises.
    """
    if proposal.stream == "uniform":
        return tests, None
    ascent = Objective(proposal.open_neurons, setup.scale, MARGIN_ASCENT)
    if state.policy.needs_gradient:
        criterion = setup.criterion
        joint = criterion and state.policy.objective(criterion.criterion, setup.calculator, int(tests.number[0]))
        return tests, joint or ascent
    ascends = (tests.kind == MARGIN_ASCENT) | (tests.kind == SENSITIVITY_ASCENT)
    others = (ascends != ascends[0]).nonzero()[0]
    alike = tests[: others[0]] if len(others) else tests
    return alike, ascent if ascends[0] else None


def _planned(setup: Setup, state: State) -> Iterator[Portion]:
    """What is measured next: the tests that were proposed, then the uniform tests of stage after stage.

    Those depend on no result; unless a budget ends a round, they will be the ones that are proposed.
    """
    for each in state.pending:
        choose = partial(_choose_objective, setup, state, each)
        yield Portion(each.stream, each.pending, state.moments[each.stream], choose)
    first, n_uniform, share = state.tally.tests + state.n_pending, _n_uniform(state), setup.settings.uniform_share
    round_end, is_next = state.round_end, True
    while share and not is_spent(setup, state, first):
        if first == round_end:
            round_end += next_round_size(setup, state, first)
        end = stage_end(first, round_end, share)
        tests = uniform_tests_due(setup, first, n_uniform, end)
        if len(tests):
            yield Portion("uniform", tests, state.moments["uniform"], lambda tests: (tests, None), is_next)
        first, n_uniform, is_next = end, n_uniform + len(tests), False  # the policy proposes the rest of the stage


NEARLY_ALL = 0.95
"""`forecast_faults_tests` are the tests that find this share of what is within reach."""


def judge(setup: Setup, state: State) -> tuple[Round, Tensor | None]:
    """Judge all that was measured so far.

    Returns the round that it ends, and the sampled neurons that have not converged if gradient ascent may aim at them.
    """
    settings, tally = setup.settings, state.tally
    with state.clock.timed("judge"):
        risk = residual_risk(*tally.uniform_columns(), n_tests=int(tally.uniform_tests_by_seed.sum()))
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
        forecast_faults_tests=faults.tests_to(NEARLY_ALL),
    )
    return round, open_neurons


def conclude(setup: Setup, state: State, start: Start, faults: Faults, reason: str, why: str) -> Run:
    """The result of a campaign that stopped for a reason: one word, and a clause that says why."""
    tally, coverage = state.tally, state.rounds[-1].coverage
    tests_by_seed, faults_by_seed = tally.uniform_tests_by_seed, tally.uniform_faults_by_seed
    decision = current_decision(setup, state)
    _observe(state, is_ahead=False)  # what was saved before has not learned from the last tests
    with state.clock.timed("judge"):
        uniform = state.moments["uniform"].moments()
        scale = None if setup.scale is None else setup.scale[setup.panel_neurons]
        blocks = rescale(state.panel.blocks(), scale)
        total = state.total_moments()
        is_judged = ~_is_dead(setup.sweep.moments, total)[setup.panel_neurons]
        run = Run(
            stop=f"Stopped because {why}.",
            stop_reason=reason,
            faults=faults,
            rounds=state.rounds,
            start=start,
            fault_rate=fault_rate(
                tests_by_seed[setup.space.seeds], faults_by_seed[setup.space.seeds], setup.space.seed_weight
            )
            if decision is None or decision.known is not None or not decision.tests
            else rate_at_any_time(decision.tests, decision.faults),
            decision=decision,
            residual_risk=state.rounds[-1].residual_risk,
            residual_risk_uniform=unseen_mass(tally.uniform_columns()[0], int(tests_by_seed.sum())),
            coverage_uniform=_cover(setup, state, uniform, exact)[0].all if tally.uniform_tests else None,
            coverage_interval=coverage_interval(
                blocks, coverage.all, setup.rule, is_judged, coverage.n_neurons - coverage.n_dead
            ),
            design_effect=design_effect(blocks),
            normality=describe_normality(state.shape),
            correct_by_strength=()
            if tally.dropped
            else correct_by_strength(setup.space, tally.uniform_tests, *_uniform_faults(faults)),
            calibration=_calibration(setup, state),
            slices=setup.sliced.rates(setup.columns, tests_by_seed, faults_by_seed),
            near_ties=tally.near_ties,
            kinds=tally.kinds,
            raised=tally.raised,
            policy=state.policy.report(),
            of_criterion={} if state.criterion is None else state.criterion.report(),
            seconds=Seconds(**state.clock.phases, total=0.0),
            environment=setup.environment,
            requests=setup.calculator.sent,
            posterior_means=rescale(total, setup.scale).mean.float().cpu().numpy(),
        )
    setup.sweep.measurer.end()
    return replace(run, seconds=Seconds(**state.clock.phases, total=state.clock.elapsed()))


def _calibration(setup: Setup, state: State) -> Calibration | None:
    """The calibration on clean inputs and on the tests of the uniform stream."""
    if not setup.has_calibration:
        return None
    clean, label = setup.calculator.clean, setup.facts.label
    confidence = clean.oracle.confidence(clean.outputs).cpu().numpy()
    gaps = sum_gaps(np.arange(len(label)), confidence, setup.facts.clean_answer == label)
    tests = state.tally.uniform_tests_by_seed
    disturbed = None if state.gaps is None else calibration_error(state.gaps, tests)
    return Calibration(calibration_error(gaps, np.ones_like(label)), disturbed)


def _uniform_faults(faults: Faults) -> tuple[Ints, Floats]:
    """Seed id and theta of each fault of the uniform stream."""
    columns, is_uniform = faults.columns, faults.columns["stream"] == "uniform"
    return columns["seed_id"][is_uniform], columns["theta"][is_uniform]


def _cover(setup: Setup, state: State, moments: Moments, judge: Judge) -> tuple[Coverage, Tensor | None]:
    """Coverage by a judge, and the sampled neurons that have not converged if gradient ascent may aim at them."""
    settings = setup.settings
    return cover(
        rescale(moments, setup.scale),
        setup.calculator.layers,
        is_dead=_is_dead(setup.sweep.moments, moments),
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


ROUND_SIZE, ROUND_SHARE = 640, 12
"""Tests per round, unless five chunks are more, or this part of the tests run so far: the longer a campaign, the less a
single test changes what is known."""
DECISION_SIZE, DECISION_SHARE = 50, 16
"""The same if the campaign is to decide a claim, which is looked at after every round."""
MIN_GUIDED_ROUND, GUIDED_ROUNDS = 160, 20
"""If the policy follows a criterion: the smallest round, and the number of rounds that a budget is divided into."""
FIRST_PORTION, EARLY_PORTION, PORTION_SHARE = 16, 128, 16
"""Tests that a policy proposes before it learns their results: at first 16, then as many as have been run, up to 128;
once it proposes ahead, a chunk, and then a sixteenth of the tests run so far, in powers of 2."""
AHEAD_FROM = 2560
"""From this test on, the policy proposes ahead, see `_propose`. Before that, it learns too much from each portion."""
LAST_STAGE = 512
"""Up to this number of tests, both streams take short turns, and the policy learns from the uniform tests at once."""


def why_to_stop(setup: Setup, state: State) -> tuple[str, str] | None:
    """Why to stop now, see `stop_reason`; with a claim to decide, also its verdict, or that no seed is left."""
    if state.rounds and (decision := current_decision(setup, state)) is not None:
        if decision.verdict != UNDECIDED:
            return "decided", f"{decision.claim} is decided"
        if state.tally.tests >= setup.last_test:
            return "seeds", "every seed was tested once"
    return stop_reason(
        setup.settings, state.rounds, _test_cost(setup, state), setup.criterion, covers_neurons=setup.covers_neurons
    )


def current_decision(setup: Setup, state: State) -> Decision | None:
    """The verdict on the claim that the campaign is to decide, by the tests so far; None without a claim."""
    claim, tally = setup.settings.decide, state.tally
    if claim is None:
        return None
    figure, limit = read_claim(claim)
    if figure == "recall":
        return decide_recall(claim, limit, tally.uniform_tests, tally.uniform_known)
    n_faults = int(tally.uniform_faults_by_seed.sum())
    return decide(claim, limit, tally.uniform_tests, n_faults, len(setup.space.seeds))


def next_round_size(setup: Setup, state: State, n_tests: int) -> int:
    """The number of tests of the round that begins after `n_tests` tests; smaller if a budget is nearly spent."""
    settings = setup.settings
    size = settings.round_size or 0
    if not size and settings.tests_each_seed_once:
        size = max(DECISION_SIZE, n_tests // DECISION_SHARE)
    elif not size and state.policy.needs_gradient:
        size = len(setup.space.seeds)
    elif not size:  # so many that both streams fill their chunks
        size = max(ROUND_SIZE, (1 if settings.uniform_share in (0, 1) else 5) * setup.calculator.chunk)
        if setup.criterion is not None and setup.criterion.leads:
            budget = settings.max_tests or settings.max_passes or GUIDED_ROUNDS * ROUND_SIZE
            size = min(size, max(MIN_GUIDED_ROUND, budget // GUIDED_ROUNDS))
        else:
            size *= max(1, n_tests // (ROUND_SHARE * size))
    if (most := min(settings.max_tests or inf, setup.last_test)) < inf:
        size = min(size, int(most) - n_tests)
    if settings.max_passes is not None:
        n_affordable_tests = (settings.max_passes - state.passes) // _test_cost(setup, state)
        size = min(size, n_affordable_tests - (n_tests - state.tally.tests))
    if settings.max_seconds is not None and n_tests:
        elapsed = state.clock.elapsed()
        size = min(size, int(n_tests / elapsed * (settings.max_seconds - elapsed)))
    return max(1, size)


def uniform_tests_due(setup: Setup, first: int, n_uniform: int, end: int) -> Tests:
    """The tests, numbered from `first`, that the uniform stream lacks to have its share of the first `end` tests."""
    n_due = max(0, min(end - first, round(end * setup.settings.uniform_share) - n_uniform))
    return setup.uniform_tests(first, n_uniform, n_due) if n_due else setup.uniform_tests(0, 0, 0)


def n_affordable(setup: Setup, state: State, *following: Tests) -> int:
    """How many of the pending tests, and of those that follow them, the remaining passes suffice for."""
    n_tests, max_passes = state.n_pending + sum(map(len, following)), setup.settings.max_passes
    if max_passes is None or not n_tests:
        return n_tests
    cost, ascent_cost = _test_cost(setup, state), setup.calculator.cost(needs_gradient=True)
    left = max_passes - state.passes
    kind = np.concatenate([each.kind for each in (*(proposal.pending for proposal in state.pending), *following)])
    costs = np.where(np.isin(kind, ASCENTS), ascent_cost, cost)
    return int(np.searchsorted(costs.cumsum(), left, side="right"))


def is_spent(setup: Setup, state: State, n_tests: int) -> bool:
    """Whether no test can follow the first `n_tests`, if those that have not been run take no gradient."""
    max_tests, max_passes = setup.settings.max_tests, setup.settings.max_passes
    if n_tests >= min(max_tests or inf, setup.last_test):
        return True
    n_more = n_tests - state.tally.tests + 1
    return max_passes is not None and state.passes + n_more * _test_cost(setup, state) > max_passes


def _test_cost(setup: Setup, state: State) -> int:
    """Passes per test of the policy."""
    return setup.calculator.cost(state.policy.needs_gradient, len(state.policy.rivals))


def stage_end(n_tests: int, round_end: int, uniform_share: float) -> int:
    """The number of tests at which the uniform stream next has exactly its share; it runs first, then the policy.

    The first stages end at 16, 32, 64, ... tests, later ones at the end of the round.
    """
    end = max(FIRST_PORTION, 1 << n_tests.bit_length())
    return round_end if uniform_share in (0, 1) or end > LAST_STAGE else min(end, round_end)


def portion(n: int, n_tests: int, chunk: int) -> int:
    """How many of the `n` tests that a stage has left the policy proposes next, after `n_tests` tests."""
    if n_tests >= AHEAD_FROM:
        return min(n, max(chunk, 1 << int(log2(n_tests / PORTION_SHARE))))
    return min(n, EARLY_PORTION, max(FIRST_PORTION, n_tests))


def is_little_left(goal: float | None, recall: float | None, risk: Estimate | None) -> bool:
    """Whether a search has found about all within its reach; always if `goal` is None.

    `recall` is None if no fault was found. `risk` is the residual risk, None without uniform tests.
    """
    if goal is None:
        return True
    return (risk is None or risk.high <= MAX_RISK) and (recall is None or recall >= goal)


def stop_reason(  # noqa: C901 (one branch per case)
    settings: Settings,
    rounds: list[Round],
    cost: int,
    criterion: CampaignCriterion | None = None,
    *,
    covers_neurons: bool = True,
) -> tuple[str, str] | None:
    """Why to stop after these rounds, as one word and a clause; None to continue. `cost` is the passes per test.

    The coverage that counts is that of the criterion that guides the search if there is one, else that of the
    sensitivities. Reaching it is a reason to stop only if little is left to find. A model without hidden layers
    (`covers_neurons` is False) has no coverage goal: little left to find is then reason enough.
    """
    if not rounds:
        return None
    last, goal = rounds[-1], settings.coverage or inf
    if not is_little_left(settings.recall, last.recall, last.residual_risk):
        goal = inf
    if criterion is not None and criterion.leads:
        score = last.criterion_score or 0
        if criterion.criterion.laws.bounded and score >= goal:
            return (
                "coverage",
                f"{criterion.name} {percent(score)} reached the goal of {percent(goal)}{_little_left(settings, last)}",
            )
    elif not covers_neurons:
        if goal < inf and settings.recall is not None and last.residual_risk is not None:
            return "found", _little_left(settings, last).removeprefix(", and ")
    elif last.coverage.sampled >= goal:
        return "coverage", (
            f"coverage {percent(last.coverage.sampled)} of the sampled neurons reached the goal of "
            f"{percent(goal)}, confirmed by Markov chains{_little_left(settings, last)}"
        )
    if settings.max_tests is not None and last.tests >= settings.max_tests:
        return "tests", f"the budget of {counted(settings.max_tests, 'test')} is spent"
    if settings.max_passes is not None and last.passes + cost > settings.max_passes:
        return "passes", f"the budget of {counted(settings.max_passes, 'pass', 'passes')} is spent"
    if settings.max_seconds is not None and last.seconds >= settings.max_seconds:
        return "seconds", f"the budget of {settings.max_seconds:g} s is spent"
    if settings.plateau is not None and len(rounds) > settings.plateau:
        before = rounds[-1 - settings.plateau]
        if before.distinct_faults == last.distinct_faults and _is_flat(before, last, criterion, covers_neurons):
            measures_coverage = covers_neurons or (criterion is not None and criterion.leads)
            coverage = " and no more coverage" if measures_coverage else ""
            return "plateau", f"{counted(settings.plateau, 'round')} brought no new distinct fault{coverage}"
    return None


def _little_left(settings: Settings, last: Round) -> str:
    """A clause that says how little is left to find."""
    if settings.recall is None:
        return ""
    risk = "" if last.residual_risk is None else f"the residual risk is at most {percent(last.residual_risk.high, 2)}"
    if last.recall is None:
        return f", and no fault was found{': ' * bool(risk)}{risk}"
    found = f"{percent(last.recall)} or more of the distinct faults within reach were found"
    probability = f"with a probability of {percent(RECALL_QUANTILE, 0)}"
    return f", and little is left to find: {probability}, {found}{', and ' * bool(risk)}{risk}"


def _is_flat(before: Round, last: Round, criterion: CampaignCriterion | None, covers_neurons: bool) -> bool:
    if criterion is not None and criterion.leads:
        return (before.criterion_score or 0) >= (last.criterion_score or 0)
    if not covers_neurons:
        return True
    return before.coverage.all >= last.coverage.all and before.coverage.sampled >= last.coverage.sampled
