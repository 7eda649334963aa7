"""The loop of a campaign: search, measure, judge, and again until there is a reason to stop."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from themis.campaign.budget import LAST_STAGE, affordable, default_round_size, portion, round_size, stage_end
from themis.campaign.interrupt import Terminated
from themis.campaign.judging import conclude, judge
from themis.campaign.measurer import Portion
from themis.campaign.objectives import choose_objective
from themis.campaign.recorder import Recorder
from themis.campaign.setup import Setup, describe_start
from themis.campaign.state import PartialRound, State
from themis.campaign.stop import stop_reason
from themis.measure.captured import foreground
from themis.measure.fold import Objective
from themis.measure.tests import Results, Tests
from themis.oracle import Detection, KeyPoints
from themis.runs.environment import record_samples
from themis.runs.run import Run, Start
from themis.search import Policy

DRAWN = (Detection, KeyPoints)
"""Tasks whose clean answers are kept with the faults, to be drawn into their pictures."""


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
    max_tests = setup.settings.max_tests
    if state.partial_round is not None and max_tests is not None:  # it began under a budget that may have been larger
        state.partial_round.limit(max(0, max_tests - state.tally.tests))
    try:
        while state.partial_round or (stop := _stop_reason(setup, state)) is None:
            run_round(setup, state, recorder)
        recorder.keep(state.checkpoint, now=True)
        run = conclude(setup, state, start, recorder.faults, *stop)
        recorder.finish()
    except KeyboardInterrupt as error:
        why = str(error) if isinstance(error, Terminated) else "the user stopped it"
        recorder.callbacks.is_stopping = True
        if not recorder.is_torn:
            recorder.keep(state.checkpoint, now=True)
        _judge_partial_round(setup, state, recorder)
        recorder.finish()
        run = conclude(setup, state, start, recorder.faults, "user", why)
    return run


def has_finished(setup: Setup, state: State) -> bool:
    """Whether no test is left to run."""
    return state.partial_round is None and _stop_reason(setup, state) is not None


def _stop_reason(setup: Setup, state: State) -> tuple[str, str] | None:
    return stop_reason(
        setup.settings, state.rounds, _test_cost(setup, state), setup.criterion, covers_neurons=setup.covers_neurons
    )


def run_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """One round: propose tests (phase 3), measure them chunk by chunk (phase 1), and judge (phase 2)."""
    if state.partial_round is None:
        with recorder.atomic(), state.clock.timed("search"):
            state.partial_round = PartialRound(_round_size(setup, state, state.tally.tests))
    while not state.partial_round.is_done:
        with recorder.atomic():
            if state.partial_round.n_pending:
                _measure(setup, state, recorder, state.partial_round)
            else:
                _propose(setup, state, state.partial_round)
        recorder.keep(state.checkpoint)
    _end_round(setup, state, recorder)
    recorder.keep(state.checkpoint)


def _end_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """Judge the round; an interrupt while that takes its time leaves the round open."""
    setup.measurer.pause()
    round, open_neurons = judge(setup, state)
    with recorder.atomic():
        state.end_round(round, open_neurons)
        recorder.add_round(round)


def _round_size(setup: Setup, state: State, n_tests: int) -> int:
    """The number of tests of the round that begins after `n_tests` tests."""
    return round_size(
        setup.settings,
        _default_round_size(setup, state.policy, n_tests),
        n_tests=n_tests,
        passes=_passes_after(setup, state, n_tests),
        cost=_test_cost(setup, state),
        elapsed=state.clock.elapsed(),
    )


def _passes_after(setup: Setup, state: State, n_tests: int) -> int:
    """The passes spent after `n_tests` tests, if those that have not been run take no gradient."""
    return state.passes + (n_tests - state.tally.tests) * _test_cost(setup, state)


def _test_cost(setup: Setup, state: State) -> int:
    """Passes per test of the policy."""
    return setup.calculator.cost(state.policy.needs_gradient, len(state.policy.rivals))


def _is_spent(setup: Setup, state: State, n_tests: int) -> bool:
    """Whether no test can follow the first `n_tests`."""
    max_tests, max_passes = setup.settings.max_tests, setup.settings.max_passes
    passes = _passes_after(setup, state, n_tests) + _test_cost(setup, state)
    return (max_tests is not None and n_tests >= max_tests) or (max_passes is not None and passes > max_passes)


def _propose(setup: Setup, state: State, partial: PartialRound) -> None:
    """Propose the next tests of the round: those of the uniform stream if its share is due, then those of the policy.

    In the first stages, the policy learns the results of the uniform tests before it proposes. Later they teach it
    little, and both are proposed together, so that the uniform tests run while the policy thinks.
    """
    with state.clock.timed("search"):
        first = state.tally.tests
        end = stage_end(first, first + partial.n_unproposed, setup.settings.uniform_share)
        uniform = _uniform_tests_due(setup, first, state.tally.uniform_tests, end)
        if len(uniform) == 0 or (first >= LAST_STAGE and first + len(uniform) < end):
            search = _search_tests(setup, state, first + len(uniform), end)
        else:
            search = uniform[:0]
        n_affordable = _affordable(setup, state, uniform, search)
        if n_affordable < len(uniform) + len(search):  # ascents cost more than the size of the round allowed for
            partial.n_unproposed = n_affordable
        if n_affordable:
            uniform, search = uniform[:n_affordable], search[: max(0, n_affordable - len(uniform))]
            partial.propose(state.novelty.ensure(uniform), state.novelty.ensure(search))


def _uniform_tests_due(setup: Setup, first: int, n_uniform: int, end: int) -> Tests:
    """The tests, numbered from `first`, that the uniform stream lacks to have its share of the first `end` tests."""
    n_due = max(0, min(end - first, round(end * setup.settings.uniform_share) - n_uniform))
    return setup.uniform_tests(first, n_uniform, n_due) if n_due else setup.uniform_tests(0, 0, 0)


def _search_tests(setup: Setup, state: State, first: int, end: int) -> Tests:
    """The tests that the policy proposes next, numbered from `first` and up to `end`."""
    # A seed takes one step of an ascent at a time, because the next one depends on its gradient.
    is_ascent = state.policy.needs_gradient
    most = len(setup.space.seeds) if is_ascent else portion(end - first, first, setup.calculator.chunk)
    return state.policy.propose(np.arange(first, min(end, first + most)))


def _measure(setup: Setup, state: State, recorder: Recorder, partial: PartialRound) -> None:
    """Run the next chunk of the proposed tests, fold it, count its results and record its faults."""
    stream, pending = partial.stream, partial.pending
    with state.clock.timed("measure"):
        measurement = setup.measurer.measure(
            _portion(setup, state, stream, pending),
            lambda: _upcoming(setup, state, partial),
            _passes_left(setup, state.passes),
        )
        tests = pending[: len(measurement)]
        state.add_panel(measurement, is_shape_sample=stream == "uniform" or setup.settings.uniform_share == 0)
    with state.clock.timed("search"):
        state.add(tests, measurement, stream)
        calculator = setup.calculator
        clean_outputs = calculator.clean_outputs if isinstance(calculator.oracle, DRAWN) else None
        n_rounds = len(state.rounds) + 1
        recorder.add_faults(tests, measurement, setup.seeds, setup.facts, n_rounds, stream, clean_outputs)
        partial.results.append(measurement.results)
        if setup.settings.max_passes is not None:
            partial.truncate(_affordable(setup, state, partial.pending, partial.following))
        if partial.n_done == len(partial.tests):
            state.policy.observe(partial.tests, Results.join(partial.results))
            if len(partial.following):
                partial.advance()


def _portion(setup: Setup, state: State, stream: str, tests: Tests, *, is_next: bool = True) -> Portion:
    """Tests of a stream as they are measured."""

    def choose(tests: Tests) -> tuple[Tests, Objective | None]:
        if stream == "uniform":
            return tests, None
        calculator, open_neurons = setup.calculator, state.open_neurons
        return choose_objective(tests, state.policy, setup.criterion, calculator, open_neurons, setup.scale)

    return Portion(stream, tests, state.moments[stream], choose, is_next)


def _upcoming(setup: Setup, state: State, partial: PartialRound) -> Iterator[Portion]:
    """What is measured after the pending tests: the tests that follow, then the uniform tests of stage after stage.

    Those depend on no result; unless a budget ends a round, they will be the ones that are proposed.
    """
    n_pending, share = partial.n_pending, setup.settings.uniform_share
    if len(partial.following):
        yield _portion(setup, state, "search", partial.following)
    first, n_uniform = state.tally.tests + n_pending, state.tally.uniform_tests
    n_uniform += len(partial.pending) if partial.stream == "uniform" else 0
    round_end, is_next = first + partial.n_unproposed, True
    while share and not _is_spent(setup, state, first):
        if first == round_end:
            round_end += _round_size(setup, state, first)
        end = stage_end(first, round_end, share)
        tests = _uniform_tests_due(setup, first, n_uniform, end)
        if len(tests):
            yield _portion(setup, state, "uniform", tests, is_next=is_next)
        first, n_uniform, is_next = end, n_uniform + len(tests), False  # the policy proposes the rest of the stage


def _judge_partial_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """Judge a round that was cut short, for the summary; a resumed campaign measures the rest of it first."""
    if not state.rounds or state.rounds[-1].tests < state.tally.tests:
        _end_round(setup, state, recorder)
        recorder.keep(None, now=True)


def _default_round_size(setup: Setup, policy: Policy, n_tests: int) -> int:
    if policy.needs_gradient:
        return len(setup.space.seeds)
    follows_criterion = setup.criterion is not None and setup.criterion.leads
    return default_round_size(setup.settings, setup.calculator.chunk, n_tests, follows_criterion=follows_criterion)


def _affordable(setup: Setup, state: State, *portions: Tests) -> int:
    """How many of the first tests of some portions the remaining passes suffice for."""
    n_tests, passes_left = sum(map(len, portions)), _passes_left(setup, state.passes)
    cost, ascent_cost = _test_cost(setup, state), setup.calculator.cost(needs_gradient=True)
    if passes_left is None or n_tests * max(cost, ascent_cost) <= passes_left:
        return n_tests
    return affordable(np.concatenate([tests.kind for tests in portions]), passes_left, cost, ascent_cost)


def _passes_left(setup: Setup, passes: int) -> int | None:
    return None if setup.settings.max_passes is None else setup.settings.max_passes - passes
