"""A claim is decided early, and wrongly in at most 5% of campaigns, however often one looks."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from themis.judge.decide import decide, decide_recall, rate_at_any_time, recall_stakes, stakes
from themis.measure.tests import Results, Tally, Tests
from themis.search.policy import UNIFORM_STREAM, Space
from themis.settings import FAILS, HOLDS, UNDECIDED

LIMIT = 0.02


def campaign_looks(most):
    """The numbers of tests after which a campaign looks."""
    looks = [50]
    while looks[-1] < most:
        looks.append(min(most, looks[-1] + max(50, looks[-1] // 16)))
    return looks


def verdicts(rate, limit, looks):
    """The exact chances by each look that it holds and that it does not, if faults occur at this rate."""
    chance, decided, before = np.ones(1), np.zeros((len(looks), 2)), 0
    for row, n in enumerate(looks):
        chance = np.convolve(chance, stats.binom.pmf(np.arange(n - before + 1), n - before, rate))
        smaller, larger = stakes(limit, np.full(n + 1, n), np.arange(n + 1))
        ends = np.array([smaller >= 20, larger >= 20])
        decided[row] = decided[max(row - 1, 0)] + (ends * chance).sum(1)
        chance, before = np.where(ends.any(0), 0.0, chance), n
    return decided


def look_that_decides(rate, limit, share, most):
    """The number of tests after which so many campaigns have the right verdict."""
    looks = campaign_looks(most)
    decided = verdicts(rate, limit, looks)[:, int(rate > limit)]
    assert decided[-1] >= share
    return looks[int((decided >= share).argmax())]


@pytest.mark.parametrize("limit", [0.005, 0.02, 0.3])
@pytest.mark.parametrize("relative", [0.5, 0.9, 1, 1.1, 2])
def test_a_look_after_every_test_gives_a_wrong_verdict_in_at_most_5_percent(limit, relative):
    holds, fails = verdicts(relative * limit, limit, range(1, 1001))[-1]
    wrong = [holds] * (relative >= 1) + [fails] * (relative <= 1)  # a limit that is just exceeded does not hold
    assert max(wrong) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("relative", [0.9, 1, 1.1])
def test_the_same_over_many_thousand_tests(relative):
    holds, fails = verdicts(relative * LIMIT, LIMIT, range(1, 8001))[-1]
    assert max([holds] * (relative >= 1) + [fails] * (relative <= 1)) <= 0.05


def wrong_verdicts(relative, spread, n_campaigns, n_seeds):
    """How many verdicts are wrong, of campaigns on seeds with rates of their own, which look after every test."""
    rate, space_of = relative * LIMIT, [np.float32([end]) for end in (0, 1, 0)]
    seeds, margin, wrong = np.arange(n_seeds), np.zeros(n_seeds, np.float32), 0
    counter = np.arange(n_seeds)
    for k in range(n_campaigns):
        random = np.random.default_rng((k, int(1000 * relative)))
        own = (
            random.random(n_seeds) < rate
            if spread is None
            else random.beta(rate * spread, (1 - rate) * spread, n_seeds)
        )
        space = Space(seeds, seeds, margin, *space_of, is_random=True, random_seed=k, tests_each_seed_once=True)
        tests = space.uniform_tests(counter, UNIFORM_STREAM, counter)
        smaller, larger = stakes(LIMIT, counter + 1, np.cumsum(tests.theta[:, 0] < own[tests.seed]))
        reached = np.array([smaller >= 20, larger >= 20])
        first = np.where(reached.any(1), reached.argmax(1), n_seeds)
        wrong += first[0] < first[1] if relative > 1 else first[1] < first[0]
    return wrong


@pytest.mark.parametrize("spread", [None, 1, 50], ids=["seeds always or never fail", "very different", "alike"])
@pytest.mark.parametrize("relative", [0.5, 1, 1.05, 2])
def test_seeds_of_different_rates_are_judged_as_rightly(relative, spread):
    assert wrong_verdicts(relative, spread, 200, 800) <= stats.binom.ppf(0.999, 200, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [None, 1, 50], ids=["seeds always or never fail", "very different", "alike"])
@pytest.mark.parametrize("relative", [0.9, 1, 1.05, 1.2])
def test_seeds_of_different_rates_are_judged_as_rightly_in_2000_campaigns(relative, spread):
    assert wrong_verdicts(relative, spread, 2000, 3000) <= 0.05 * 2000


PAGE = Path(__file__).parents[2] / "docs" / "decide.md"


@pytest.mark.parametrize(("name", "relative"), [("0", 0), ("1/4", 0.25), ("1/2", 0.5), ("2", 2), ("5", 5), ("10", 10)])
def test_the_tests_needed_are_those_of_the_documentation(name, relative):
    [row] = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |") and line.count("|") == 5]
    half, most, fixed = (int(cell.replace(",", "")) for cell in row.split("|")[2:5])
    assert look_that_decides(relative * LIMIT, LIMIT, 0.5, 4000) == half
    assert look_that_decides(relative * LIMIT, LIMIT, 0.95, 4000) == most
    assert next(n for n in range(1, 4000) if chance_of_interval(n, relative) >= 0.95) == fixed


def chance_of_interval(n, relative):
    """The chance that a fixed number of tests gives an interval on the right side of the limit."""
    faults = np.arange(n + 1)
    tail = stats.binom.cdf(faults, n, LIMIT) if relative < 1 else stats.binom.sf(faults - 1, n, LIMIT)
    return (stats.binom.pmf(faults, n, relative * LIMIT) * (tail <= 0.025)).sum()


def test_all_seeds_are_tested_once_before_one_is_tested_again():
    seeds, counter = np.arange(30) * 2, np.arange(40)
    box = (np.float32([end]) for end in (0, 1, 0))
    space = Space(
        seeds, seeds, np.zeros(30, np.float32), *box, is_random=True, random_seed=0, tests_each_seed_once=True
    )
    drawn = space.uniform_tests(counter, UNIFORM_STREAM, counter).seed
    assert sorted(drawn[:30]) == seeds.tolist() != drawn[:30].tolist()
    assert sorted(set(drawn[30:])) == sorted(drawn[30:])


@pytest.mark.parametrize("rate", [0.001, 0.02, 0.3])
def test_the_interval_contains_the_rate_at_all_times_together(rate):
    chance = np.ones(1)
    for n in range(10, 601, 10):
        chance = np.convolve(chance, stats.binom.pmf(np.arange(11), 10, rate))
        ends = [rate_at_any_time(n, k) for k in range(n + 1)]
        chance = np.where([end.low <= rate <= end.high for end in ends], chance, 0.0)
    assert chance.sum() >= 0.95


def test_the_interval_has_the_closed_form_at_the_ends():
    none, all_of_them = rate_at_any_time(100, 0), rate_at_any_time(100, 100)
    assert none.low == none.value == 0
    assert all_of_them.high == all_of_them.value == 1
    assert none.high == pytest.approx(1 - all_of_them.low)
    log_gain = np.log(20) - np.log(stats.betabinom.pmf(0, 100, 0.5, 0.5))
    assert 1 - none.high == pytest.approx(np.exp(-log_gain / 100))


def test_a_verdict_says_what_it_is_based_on():
    decision = decide("fault_rate<=0.02", LIMIT, 250, 0, 1000)
    assert decision.verdict == HOLDS
    assert decision.clause == "fault_rate<=0.02 holds (certain at 95%): 0 faults on 250 seeds, each tested once"
    assert decide("fault_rate<=0.02", LIMIT, 50, 10, 1000).verdict == FAILS


def test_an_open_claim_says_how_many_more_seeds_it_would_take():
    decision = decide("fault_rate<=0.02", LIMIT, 100, 0, 100)
    assert decision.verdict == UNDECIDED
    more = decision.more_tests
    assert decision.more_seeds == more
    assert decide("fault_rate<=0.02", LIMIT, 100 + more, 0, 100).verdict == HOLDS
    assert decide("fault_rate<=0.02", LIMIT, 98 + more, 0, 100).verdict == UNDECIDED
    assert "would probably take 94 more tests, and 94 more seeds" in decision.clause
    assert "for which the data has the seeds" in decide("fault_rate<=0.02", LIMIT, 100, 0, 10_000).clause


def test_a_rate_at_the_limit_is_not_forecast_to_be_decided():
    decision = decide("fault_rate<=0.02", LIMIT, 1000, 20, 2000)
    assert (decision.verdict, decision.more_tests, decision.more_seeds) == (UNDECIDED, None, None)
    assert "too close to the limit" in decision.clause


@pytest.mark.parametrize("limit", [1e-9, 0.02, 0.9, 0.999999])
def test_any_limit_can_be_decided_both_ways(limit):
    n = int(40 / min(-np.log1p(-limit), 1)) + 10
    assert decide("c", limit, n, 0, n).verdict == HOLDS
    times = int(20 / -np.log(limit)) + 10
    assert decide("c", limit, 10 * times, 10 * times, n).verdict == FAILS


@pytest.mark.parametrize("limit", [0.3, 0.9])
@pytest.mark.parametrize("recall", [0.0, 0.5, 1.0])
def test_the_bet_on_a_recall_is_fair_at_its_limit_and_loses_on_average_below(limit, recall):
    recalls = limit * np.linspace(recall, 1, 11)  # it grows to the limit
    paths = np.array(list(product([False, True], repeat=11)))
    chance = np.where(paths, recalls, 1 - recalls).prod(1)
    stake = np.array([np.exp(recall_stakes(limit, path)[-1]) for path in paths])
    mean = float(chance @ stake)
    assert mean == pytest.approx(1) if recall == 1 else mean < 1


@pytest.mark.parametrize("limit", [0.5, 0.9, 0.97])
@pytest.mark.parametrize("tests_to_grow", [1, 30, 300])
def test_a_recall_just_under_its_limit_is_rarely_said_to_hold(limit, tests_to_grow):
    n, random = 2000, np.random.default_rng((int(100 * limit), tests_to_grow))
    recall = (limit - 0.001) * -np.expm1(-np.arange(1, n + 1) * 5 / tests_to_grow)
    wrong = sum(recall_stakes(limit, random.random(n) < recall).max() >= np.log(20) for _ in range(400))
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)


def faults_of(seed):
    """Tests of these seeds, which all fail."""
    n = np.arange(len(seed))
    tests = Tests(n, seed, np.zeros((len(n), 1), np.float32), n, np.full(len(n), "uniform"))
    return tests, Results(np.ones(len(n), bool), np.ones_like(n), np.full(len(n), -1, np.float32), None)


@pytest.mark.parametrize("searched", [0.85, 0.89, 0.899])
def test_campaigns_whose_recall_passes_the_limit_slowly_are_rarely_wrong(searched):
    """The search found a seed with this share of the faults; the random tests find the rest, on 500 others."""
    wrong, n, random = 0, 1000, np.random.default_rng(int(1000 * searched))
    for _ in range(300):
        tally, seed = Tally(501), np.where(random.random(n) < searched, 0, random.integers(1, 501, n))
        tally.add(*faults_of(np.zeros(1, np.int64)), is_uniform=False)
        tally.add(*faults_of(seed), is_uniform=True)
        is_shown = recall_stakes(0.9, tally.uniform_known) >= np.log(20)
        n_found = np.cumsum(~np.array(tally.uniform_known))
        recall = searched + (1 - searched) * n_found / 500
        wrong += bool(is_shown.any() and recall[is_shown.argmax()] < 0.9)
    assert wrong <= stats.binom.ppf(0.999, 300, 0.05)


@pytest.mark.parametrize(("limit", "n"), [(0.8, 25), (0.9, 54), (0.95, 111)])
def test_the_known_faults_that_show_a_recall_are_those_of_the_documentation(limit, n):
    assert [decide_recall("c", limit, k, [True] * k).verdict for k in (n - 1, n)] == [UNDECIDED, HOLDS]
    assert f"| {limit:.0%} | {n} |" in PAGE.read_text()


def test_a_recall_that_has_held_holds_whatever_follows():
    assert decide_recall("c", 0.9, 1000, [True] * 60 + [False] * 200).verdict == HOLDS


def test_an_open_claim_about_the_recall_says_how_many_more_tests_it_would_take():
    decision = decide_recall("recall>=0.9", 0.9, 500, [False] * 20 + [True] * 30)
    assert decision.verdict == UNDECIDED
    assert decide_recall("c", 0.9, 0, [False] * 20 + [True] * (30 + decision.more_tests // 10)).verdict == HOLDS
    assert "of the last 25 random faults, 25 had been found before; it would probably take" in decision.clause
    hopeless = decide_recall("recall>=0.9", 0.9, 500, [False, True] * 30)
    assert hopeless.more_tests is None
    assert "more of the faults must be found first" in hopeless.clause
    assert decide_recall("recall>=0.9", 0.9, 500, []).verdict == UNDECIDED
