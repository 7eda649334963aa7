"""Policies propose valid tests, learn from their results, and depend only on counters."""

import copy
from dataclasses import replace

import numpy as np
import pytest

from themis import Theta, UsageError
from themis.measure.tests import Results
from themis.perturb import Perturbation
from themis.search import POLICIES, choose_policy
from themis.search.arithmetic import BORROWED_JITTER, FIRST_FAULT_BONUS, KEPT_MARGIN_OFFSET, Arithmetic
from themis.search.kinds import ASCENT_GROUP, ASCENT_STEP, ASCENTS, TRIAL_SHARE
from themis.search.policy import UNIFORM_STREAM, Novelty, Space
from themis.search.scheduled import TESTS_PER_SEED, Scheduled

pytestmark = pytest.mark.quick

BOX = (Theta("a", -1, 1), Theta("b", 0, 10, unit="px"))


def space(n=50, theta=BOX, is_random=True, random_seed=0, gradient_cost=None):
    perturbation = Perturbation("p", theta, lambda inputs, *rest: inputs, is_random=is_random)
    rows = np.arange(n) * 2  # every second row of the data is usable
    margin = np.linspace(1, 5, n).astype(np.float32)
    return Space.of(perturbation, rows, rows + 1000, margin, random_seed, gradient_cost=gradient_cost)


def results(tests, margin=None, gradient=None):
    n = len(tests)
    margin = np.ones(n, dtype=np.float32) if margin is None else margin.astype(np.float32)
    zeros = np.zeros(n, dtype=np.float32)
    return Results(margin < 0, zeros.astype(int), margin, gradient)


def worth_of(policy, where):
    """How valuable the next test of each seed is."""
    arithmetic = Arithmetic(where)
    return arithmetic.values(policy.state, 1, arithmetic.spreads_above(policy.state))[0]


@pytest.mark.parametrize("name", POLICIES)
def test_proposals_are_usable_seeds_and_theta_inside_the_box(name):
    policy, where = choose_policy(name), space()
    policy.init(where)
    for start in (0, 200):
        tests = policy.propose(np.arange(start, start + 200))
        assert np.isin(tests.seed, where.seeds).all()
        assert (tests.theta >= where.low).all()
        assert (tests.theta <= where.high).all()
        assert tests.theta.dtype == np.float32
        gradient = np.ones_like(tests.theta) if policy.needs_gradient else None
        policy.observe(tests, results(tests, np.sin(np.arange(200)), gradient))


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_random_seed_proposes_the_same_tests_and_state_can_be_restored(name):
    policies = [choose_policy(name) for _ in range(2)]
    for policy in policies:
        policy.init(space())
        tests = policy.propose(np.arange(60))
        policy.observe(tests, results(tests, np.sin(np.arange(60)), np.cos(tests.theta)))
    restored = choose_policy(name)
    restored.init(space())
    restored.state = copy.deepcopy(policies[0].state)
    proposals = [policy.propose(np.arange(60, 120)) for policy in (*policies, restored)]
    for other in proposals[1:]:
        assert (proposals[0].seed == other.seed).all()
        assert (proposals[0].theta == other.theta).all()
        assert (proposals[0].noise_seed == other.noise_seed).all()


def test_the_uniform_stream_is_uniform_over_seeds_and_box():
    where = space(n=10)
    tests = where.uniform_tests(np.arange(20_000), 0, np.arange(20_000))
    counts = np.bincount(tests.seed // 2, minlength=10)
    assert abs(counts - 2000).max() < 5 * 2000**0.5
    unit = (tests.theta - where.low) / where.width
    assert abs(unit.mean(0) - 0.5).max() < 0.01
    assert abs(np.corrcoef(unit.T)[0, 1]) < 0.03
    assert len(np.unique(tests.noise_seed)) == 20_000


def test_corners_visits_every_seed_equally_and_never_proposes_the_identity():
    policy = choose_policy("corners")
    policy.init(space(n=10))
    tests = policy.propose(np.arange(40))
    assert (np.bincount(tests.seed // 2) == 4).all()
    assert set(tests.theta[:, 0]) == {-1.0, 1.0}
    assert set(tests.theta[:, 1]) == {10.0}  # its lower end is the identity


@pytest.mark.parametrize("is_random", [True, False])
def test_paper_follows_its_gradient_and_redraws_tests_that_are_stuck(is_random):
    policy, where = choose_policy("paper"), space(n=5, is_random=is_random)
    policy.init(where)
    first = policy.propose(np.arange(5))
    assert set(first.kind) == {"draw"}
    gradient = np.tile(np.float32([2.0, 0.1]), (5, 1))  # in shares of the range: 4 and 1
    policy.observe(first, results(first, gradient=gradient))
    second = policy.propose(np.arange(5, 10))
    assert set(second.kind) == {"ascent"}
    assert (second.noise_seed == first.noise_seed).all()
    expected = (first.theta + np.float32([ASCENT_STEP * 2, ASCENT_STEP * 10 / 4])).clip(where.low, where.high)
    np.testing.assert_allclose(second.theta, expected, rtol=1e-6)
    for start in range(10, 110, 5):
        policy.observe(second, results(second, gradient=gradient))
        last, second = second, policy.propose(np.arange(start, start + 5))
        at_the_top = (last.theta == where.high).all(1)
        assert set(second.kind[at_the_top]) <= {"bound" if is_random else "draw"}
        if is_random:  # continues at the bound with new noise
            assert (second.theta[at_the_top] == where.high).all()
            assert (second.noise_seed[at_the_top] != last.noise_seed[at_the_top]).all()


def test_paper_redraws_a_test_without_a_gradient():
    policy = choose_policy("paper")
    policy.init(space(n=5))
    tests = policy.propose(np.arange(5))
    policy.observe(tests, results(tests, gradient=np.zeros((5, 2), dtype=np.float32)))
    assert set(policy.propose(np.arange(5, 10)).kind) == {"draw"}


def test_scheduled_prefers_small_margins_and_lets_failed_seeds_rest():
    policy, where = choose_policy("scheduled"), space(n=100)
    policy.init(where)
    first = policy.propose(np.arange(40))
    weakest = first.seed[first.kind != "sweep"] // 2  # margins ascend
    assert np.sort(weakest).tolist() == list(range(len(weakest)))
    assert len(weakest) > 25
    assert len(np.unique(first.seed)) == 40
    noise = np.random.default_rng(0)
    for start in range(0, 4000, 200):
        tests = policy.propose(np.arange(start, start + 200))
        margin = 0.1 + np.abs(noise.normal(size=200))
        margin[
            tests.seed // 2 % 2 == 0
        ] *= -1  # every other seed breaks, with the same outcome, while the others barely withstand
        policy.observe(tests, results(tests, margin))
    last = policy.propose(np.arange(4000, 4040))
    chosen = last.seed[last.kind != "sweep"] // 2
    assert len(chosen) > 10
    assert (chosen % 2 == 1).mean() > 0.9
    assert policy.state["faults"][1::2].sum() == 0
    assert policy.state["new_faults"][0].sum() == 50  # only the first fault of a seed was new
    assert policy.state["new_faults"][1:].sum() == 0


def test_scheduled_leaves_seeds_that_withstand_and_learns_how_far_margins_fall():
    policy, where = choose_policy("scheduled"), space(n=100)
    policy.init(where)
    every = where.tests(np.arange(100), np.arange(100), np.tile(where.high, (100, 1)), "corner")
    before = worth_of(policy, where)
    held = where.margin.copy()
    held[50:] -= 3  # to 0..2, while the other half stays at 1..3
    for _ in range(10):
        # As if the policy had proposed them.
        spreads = Arithmetic(where).spreads_above(policy.state)
        policy.state["waiting"] = np.stack([every.number, np.arange(100), np.zeros(100), spreads], 1)
        policy.observe(every, results(every, held))
    after = worth_of(policy, where) * (KEPT_MARGIN_OFFSET + policy.state["margin"] / np.maximum(where.margin, 1e-12))
    before *= 1 + KEPT_MARGIN_OFFSET
    assert (np.diff(before) < 0).all()
    assert after[50] > after[0]
    assert after[50] > 2 * after[49]
    assert (after < before).all()  # none has broken


def test_scheduled_learns_what_a_margin_is_worth():
    policy, where = choose_policy("scheduled"), space(n=1000)
    policy.init(where)
    noise = np.random.default_rng(0)
    for start in range(0, 900, 300):
        tests = policy.propose(np.arange(start, start + 300))
        policy.observe(tests, results(tests, np.where(noise.random(300) < 0.8, -1.0, 1.0)))
    fresh = policy.state["tests"] == 0
    assert fresh.any()
    worth = worth_of(policy, where)
    assert 0.6 < worth[fresh].mean() / (1 + FIRST_FAULT_BONUS) < 0.95  # though their clean margins are large
    assert worth[fresh].mean() > 2 * worth[policy.state["faults"] > 0].mean()  # whose next fault may be the same


def test_scheduled_ignores_the_rate_of_the_uniform_stream_and_keeps_its_faults():
    policy, where = choose_policy("scheduled"), space(n=10)
    policy.init(where)
    weak = where.tests(np.arange(10), np.arange(10), np.tile(where.low, (10, 1)), "uniform")
    before = Arithmetic(where).spreads_above(policy.state)
    policy.observe(weak, results(weak, np.where(np.arange(10) == 3, -1.0, 5.0)))
    np.testing.assert_array_equal(Arithmetic(where).spreads_above(policy.state), before)
    assert policy.state["faults"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    worth = worth_of(policy, where)
    assert worth[3] < worth[2:5:2].min()  # its next fault may be the same


@pytest.mark.parametrize("n_uniform", [5, 20, 30])
def test_scheduled_learns_nothing_of_tests_that_a_budget_has_cut_off(n_uniform):
    policy, where = choose_policy("scheduled"), space(n=1000)
    policy.init(where)
    proposed = policy.propose(np.arange(40))
    policy.observe(proposed[:20], results(proposed[:20]))
    assert policy.state["tests"].sum() == 20
    number = np.arange(20, 20 + n_uniform)  # the numbers of the other 20 are given again
    uniform = where.uniform_tests(number, UNIFORM_STREAM, number)
    policy.observe(uniform, results(uniform))
    assert policy.state["tests"].sum() == 20
    assert len(policy.state["waiting"]) == max(0, 20 - n_uniform)


def test_without_noise_scheduled_tries_every_corner_once_before_it_draws():
    policy, where = choose_policy("scheduled"), space(n=3, theta=(*BOX, Theta("c", -2, 2)), is_random=False)
    policy.init(where)
    tests = policy.propose(np.arange(3000))
    for seed in where.seeds:
        own = tests[(tests.seed == seed) & np.isin(tests.kind, ("corner", "sweep", "flip"))]
        corners = own.theta[own.kind != "flip"]
        assert len(np.unique(corners, axis=0)) == len(corners) > 0
        assert len(np.unique(own.theta, axis=0)) == 4
        assert (corners[:, 1] == 10).all()  # its lower end is the identity
    assert (tests.kind == "draw").any()


def test_a_sweep_takes_the_seeds_with_the_fewest_corners_tried():
    policy, where = choose_policy("scheduled"), space(n=100)
    policy.init(where)
    for start in range(0, 2000, 200):
        before = policy.state["corners"].copy()
        tests = policy.propose(np.arange(start, start + 200))
        swept = where.position(tests.seed[tests.kind == "sweep"])
        assert len(swept)
        np.add.at(before, where.position(tests.seed[tests.kind != "sweep"]), 1)
        left = np.setdiff1d(np.arange(100), swept)
        if len(left):
            assert before[swept].max() <= before[left].min()
        policy.observe(tests, results(tests))


def test_scheduled_prefers_the_kind_that_pays_off():
    policy, where = choose_policy("scheduled"), space(n=1000)
    policy.init(where)
    for start in range(0, 2000, 200):
        tests = policy.propose(np.arange(start, start + 200))
        policy.observe(tests, results(tests, np.where(tests.kind == "flip", -1.0, 1.0)))
    assert (tests.kind == "flip").mean() > 0.6


def test_scheduled_keeps_the_smallest_margin_of_each_seed_and_its_theta():
    policy, where = choose_policy("scheduled"), space(n=3)
    policy.init(where)
    theta = np.float32([[0.1, 1], [0.2, 2], [0.3, 3], [0.4, 4]])
    tests = where.tests(np.arange(4), np.array([0, 0, 0, 1]), theta, "corner")
    policy.observe(tests, results(tests, np.array([0.5, 0.25, 0.75, 9.0])))
    assert policy.state["margin"].tolist() == [0.25, 3.0, 5.0]
    assert policy.state["theta"][0].tolist() == theta[1].tolist()


def test_scheduled_offers_the_theta_of_faults_to_other_seeds():
    policy, where = choose_policy("scheduled"), space(n=30)
    policy.init(where)
    odd = np.float32([[0.123, 4.56]])
    fault = where.tests(np.arange(1), np.array([7]), odd, "uniform")
    policy.observe(fault, results(fault, np.array([-1.0])))
    tests = policy.propose(np.arange(1, 301))
    borrowed = tests.kind == "borrowed"
    assert 40 < borrowed.sum() < 160
    moved = np.abs(tests.theta[borrowed] - odd) / where.width
    assert 0 < moved.max() <= BORROWED_JITTER
    assert (tests.seed[borrowed] != fault.seed).any()


def test_scheduled_leaves_a_borrowed_theta_at_its_bounds():
    policy, where = choose_policy("scheduled"), space(n=30)
    policy.init(where)
    at_a_bound = np.float32([[1.0, 4.56]])
    fault = where.tests(np.arange(1), np.array([7]), at_a_bound, "uniform")
    policy.observe(fault, results(fault, np.array([-1.0])))
    tests = policy.propose(np.arange(1, 301))
    borrowed = tests.theta[tests.kind == "borrowed"]
    assert (borrowed[:, 0] == 1).all()
    assert len(np.unique(borrowed[:, 1])) > 10


def test_scheduled_borrows_from_seeds_with_the_same_answer():
    where = replace(space(n=30), answers=np.arange(30) % 2)
    policy = choose_policy("scheduled")
    policy.init(where)
    theta = np.float32([[0.25, 1.0], [0.75, 2.0]])
    faults = where.tests(np.arange(2), np.array([4, 5]), theta, "uniform")  # of answers 0 and 1
    policy.observe(faults, results(faults, np.array([-1.0, -1.0])))
    tests = policy.propose(np.arange(2, 302))
    borrowed = tests.kind == "borrowed"
    assert borrowed.sum() > 30
    moved = np.abs(tests.theta[borrowed] - theta[tests.seed[borrowed] // 2 % 2]) / where.width
    assert moved.max() <= BORROWED_JITTER


def test_the_same_test_never_runs_twice_unless_noise_makes_it_new():
    where = space(n=5, theta=BOX[1:], is_random=False)
    policy, novelty = choose_policy("corners"), Novelty(where)
    policy.init(where)
    seen = set()
    for start in range(0, 60, 10):
        tests = novelty.ensure(policy.propose(np.arange(start, start + 10)))
        keys = set(zip(tests.seed.tolist(), tests.theta[:, 0].tolist(), strict=True))
        assert len(keys) == 10
        assert not keys & seen
        seen |= keys


def test_nothing_is_redrawn_if_noise_makes_every_test_new():
    where = space(is_random=True)
    policy = choose_policy("corners")
    policy.init(where)
    tests = policy.propose(np.arange(100))
    assert Novelty(where).ensure(tests) is tests


def test_the_error_for_an_unknown_policy_names_the_nearest_one():
    with pytest.raises(UsageError, match="did you mean 'scheduled'"):
        choose_policy("schedule")


# Ascents


def climb(policy, where, n_rounds, pays, n=400):
    """Rounds in which tests break according to `pays(tests)`, and gradients point up in the first dimension."""
    spent, every = dict.fromkeys(ASCENTS, 0), []
    for start in range(0, n_rounds * n, n):
        tests = policy.propose(np.arange(start, start + n))
        climbing = np.isin(tests.kind, list(ASCENTS))
        gradient = np.where(climbing[:, None], np.float32([1.0, 0.0]), 0.0).astype(np.float32)
        policy.observe(tests, results(tests, np.where(pays(tests), -1.0, 1.0), gradient))
        for kind in ASCENTS:
            spent[kind] += 3 * (tests.kind == kind).sum()
        every.append(tests)
    return spent, every


def test_scheduled_gives_an_unprofitable_gradient_only_a_trial():
    policy, where = choose_policy("scheduled"), space(n=1000, gradient_cost=3.0)
    policy.init(where)
    spent, every = climb(policy, where, 40, lambda tests: (tests.kind == "corner") & (tests.number % 5 == 0))
    for kind in ASCENTS:
        assert 0 < spent[kind] <= TRIAL_SHARE * 40 * 400 * 1.1 + 3 * ASCENT_GROUP
    for tests in every:  # ascents come last, one kind after the other, with each seed once
        kinds = [kind for kind in tests.kind.tolist() if kind in ASCENTS]
        assert kinds == sorted(kinds)
        assert all(not 0 < kinds.count(kind) < ASCENT_GROUP / TESTS_PER_SEED for kind in ASCENTS)
        assert not np.isin(tests.kind[: len(tests) - len(kinds)], list(ASCENTS)).any()


def test_scheduled_follows_gradients_more_often_if_they_pay_for_the_backward_pass():
    policy, where = choose_policy("scheduled"), space(n=1000, gradient_cost=3.0)
    policy.init(where)
    spent, every = climb(policy, where, 20, lambda tests: tests.kind == "margin ascent")
    assert (every[-1].kind == "margin ascent").mean() > 0.3
    assert spent["sensitivity ascent"] < spent["margin ascent"] / 4


def test_an_ascent_follows_its_gradient_with_the_same_noise_to_the_top():
    policy, where = choose_policy("scheduled"), space(n=1000, gradient_cost=3.0)
    policy.init(where)
    _, every = climb(policy, where, 40, lambda tests: np.zeros(len(tests), dtype=bool))
    steps = {}
    for tests in every:
        for k in np.flatnonzero(tests.kind == "margin ascent"):
            steps.setdefault((int(tests.seed[k]), int(tests.noise_seed[k])), []).append(tests.theta[k])
    climbs = [np.array(each) for each in steps.values() if len(each) > 1]
    assert len(climbs) >= ASCENT_GROUP
    for thetas in climbs:
        np.testing.assert_allclose(np.diff(thetas[:, 0])[:-1], ASCENT_STEP * 2, rtol=1e-5)
        assert 0 < np.diff(thetas[:, 0])[-1] <= ASCENT_STEP * 2 + 1e-6  # up to the bound
        assert (thetas[:, 1] == thetas[0, 1]).all()


def test_there_is_no_ascent_without_a_gradient():
    policy, where = choose_policy("scheduled"), space(n=1000)
    policy.init(where)
    _, every = climb(policy, where, 10, lambda tests: np.zeros(len(tests), dtype=bool))
    assert not any(np.isin(tests.kind, list(ASCENTS)).any() for tests in every)


def test_scheduled_learns_however_long_nothing_breaks():
    policy, where = Scheduled(), space()
    policy.init(where)
    tests = policy.propose(np.arange(10_000))
    for _ in range(40):
        Arithmetic(where).learn_margins(
            policy.state, where.position(tests.seed), results(tests), np.full(len(tests), 3.0)
        )
    assert np.abs(policy.state["curve"]).max() < 50  # and not ever more certain


def test_boundary_divides_the_line_to_a_test_that_changed_the_answer_and_keeps_its_noise():
    policy, where = choose_policy("boundary"), space(n=4)
    policy.init(where)
    tests = policy.propose(np.arange(4))
    assert set(tests.kind) <= {"corner", "uniform theta"}
    first, found = tests[tests.seed == 2], np.zeros(4, dtype=int)
    found[tests.seed == 2] = 7  # one seed is answered differently
    none = np.zeros(4, dtype=bool)
    policy.observe(tests, Results(none, found, np.full(4, 0.5, dtype=np.float32), None))
    changes_at, ends = 0.3, []
    for start in range(4, 60, 4):
        tests = policy.propose(np.arange(start, start + 4))
        step = tests.kind == "between"
        if not step.any():
            break
        assert tests.seed[step] == [2]
        assert tests.noise_seed[step] == first.noise_seed
        share = np.linalg.norm(tests.theta[step] - where.identity) / np.linalg.norm(first.theta - where.identity)
        ends.append(abs(share - changes_at))
        is_fault = step & (ends[-1] < 0.01)
        outcome = np.where(step & (share > changes_at), 7, 0)
        policy.observe(tests, Results(is_fault, outcome, np.full(4, 0.5, dtype=np.float32), None))
    assert ends[-1] < 0.01  # a fault, with which the line ends
    assert len(ends) < 10
