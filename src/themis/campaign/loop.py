"""The loop of a campaign: search, measure, judge, and again until there is a reason to stop."""

from __future__ import annotations

from collections.abc import Iterator

from themis.campaign.interrupt import Terminated
from themis.campaign.judging import conclude, judge
from themis.campaign.measurer import Portion
from themis.campaign.planning import (
    LAST_STAGE,
    is_spent,
    n_affordable,
    next_round_size,
    passes_left,
    search_tests,
    stage_end,
    uniform_tests_due,
    why_to_stop,
)
from themis.campaign.recorder import Recorder
from themis.campaign.setup import Setup, describe_start
from themis.campaign.state import PartialRound, State
from themis.measure.captured import foreground
from themis.measure.fold import Objective
from themis.measure.tests import Results, Tests
from themis.runs.environment import record_samples
from themis.runs.run import Run, Start
from themis.search.ascent import MARGIN_ASCENT, SENSITIVITY_ASCENT


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
        while state.partial_round or (stop := why_to_stop(setup, state)) is None:
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
    return state.partial_round is None and why_to_stop(setup, state) is not None


def run_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """One round: propose tests (phase 3), measure them chunk by chunk (phase 1), and judge (phase 2)."""
    if state.partial_round is None:
        with recorder.atomic(), state.clock.timed("search"):
            state.partial_round = PartialRound(next_round_size(setup, state, state.tally.tests))
    while not state.partial_round.is_done:
        with recorder.atomic():
            if state.partial_round.n_pending:
                _measure(setup, state, recorder, state.partial_round)
            else:
                _propose(setup, state, state.partial_round)
        recorder.keep(state.checkpoint)
    _end_round(setup, state, recorder)
    recorder.keep(state.checkpoint)


def _propose(setup: Setup, state: State, partial: PartialRound) -> None:
    """Propose the next tests of the round: those of the uniform stream if its share is due, then those of the policy.

    In the first stages, the policy learns the results of the uniform tests before it proposes. Later they teach it
    little, and both are proposed together, so that the uniform tests run while the policy thinks.
    """
    with state.clock.timed("search"):
        first = state.tally.tests
        end = stage_end(first, first + partial.n_unproposed, setup.settings.uniform_share)
        uniform = uniform_tests_due(setup, first, state.tally.uniform_tests, end)
        if len(uniform) == 0 or (first >= LAST_STAGE and first + len(uniform) < end):
            search = search_tests(setup, state, first + len(uniform), end)
        else:
            search = uniform[:0]
        n = n_affordable(setup, state, uniform, search)
        if n < len(uniform) + len(search):  # ascents cost more than the size of the round allowed for
            partial.n_unproposed = n
        if n:
            uniform, search = uniform[:n], search[: max(0, n - len(uniform))]
            partial.propose(state.novelty.ensure(uniform), state.novelty.ensure(search))


def _measure(setup: Setup, state: State, recorder: Recorder, partial: PartialRound) -> None:
    """Run the next chunk of the proposed tests, fold it, count its results and record its faults."""
    stream, pending = partial.stream, partial.pending
    with state.clock.timed("measure"):
        measurement = setup.measurer.measure(
            _portion(setup, state, stream, pending),
            lambda: _upcoming(setup, state, partial),
            passes_left(setup, state),
        )
        tests = pending[: len(measurement)]
        state.add_panel(measurement, is_shape_sample=stream == "uniform" or setup.settings.uniform_share == 0)
    with state.clock.timed("search"):
        state.add(tests, measurement, stream)
        recorder.add_faults(setup, tests, measurement, len(state.rounds) + 1, stream)
        partial.results.append(measurement.results)
        if setup.settings.max_passes is not None:
            partial.truncate(n_affordable(setup, state, partial.pending, partial.following))
        if partial.n_done == len(partial.tests):
            state.policy.observe(partial.tests, Results.join(partial.results))
            if len(partial.following):
                partial.advance()


def _end_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """Judge the round; an interrupt while that takes its time leaves the round open."""
    setup.measurer.pause()
    round, open_neurons = judge(setup, state)
    with recorder.atomic():
        state.end_round(round, open_neurons)
        recorder.add_round(round)


def _judge_partial_round(setup: Setup, state: State, recorder: Recorder) -> None:
    """Judge a round that was cut short, for the summary; a resumed campaign measures the rest of it first."""
    if not state.rounds or state.rounds[-1].tests < state.tally.tests:
        _end_round(setup, state, recorder)
        recorder.keep(None, now=True)


def _portion(setup: Setup, state: State, stream: str, tests: Tests, *, is_next: bool = True) -> Portion:
    """Tests of a stream as they are measured."""

    def choose(tests: Tests) -> tuple[Tests, Objective | None]:
        return (tests, None) if stream == "uniform" else _choose_objective(setup, state, tests)

    return Portion(stream, tests, state.moments[stream], choose, is_next)


def _choose_objective(setup: Setup, state: State, tests: Tests) -> tuple[Tests, Objective | None]:
    """The first of some tests of the search that share an objective, and that objective; None if they have none.

    An objective is what gradient ascent on theta maximises.
    """
    ascent = Objective(state.open_neurons, setup.scale, MARGIN_ASCENT)
    if state.policy.needs_gradient:
        criterion = setup.criterion
        joint = criterion and criterion.objective(state.policy, setup.calculator, int(tests.number[0]))
        return tests, joint or ascent
    ascends = (tests.kind == MARGIN_ASCENT) | (tests.kind == SENSITIVITY_ASCENT)
    others = (ascends != ascends[0]).nonzero()[0]
    alike = tests[: others[0]] if len(others) else tests
    return alike, ascent if ascends[0] else None


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
    while share and not is_spent(setup, state, first):
        if first == round_end:
            round_end += next_round_size(setup, state, first)
        end = stage_end(first, round_end, share)
        tests = uniform_tests_due(setup, first, n_uniform, end)
        if len(tests):
            yield _portion(setup, state, "uniform", tests, is_next=is_next)
        first, n_uniform, is_next = end, n_uniform + len(tests), False  # the policy proposes the rest of the stage
