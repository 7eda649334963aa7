"""SCC, compared with a slow reference and with the judge of campaigns, and MindArmour's chains."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import DEVICE, HAS_GPU, needs_triton
from moments import moments_of
from scipy.stats import chi2

from themis.compute.native import library
from themis.errors import UsageError
from themis.judge.coverage import Rule, Sample, cover
from themis.target.activations import Layer
from themis_lab.criteria import kernels_cuda, scc
from themis_lab.criteria.readings import Layout, Readings
from themis_lab.criteria.scc import SCC

TOLERANCE = 0.005
WAYS = (scc.converge, scc.converge_in_torch)
needs_c = pytest.mark.skipif(library() is None, reason="not compiled on this machine")


def stream(seed, n=40, neurons=12):
    """Clean and disturbed activations: many spreads, two dead neurons, one that never moves, one that moves once."""
    rng = np.random.default_rng(seed)
    clean = rng.normal(size=(n, neurons)).astype("float32")
    values = clean + rng.normal(size=(n, neurons)).astype("float32") * np.geomspace(0.01, 3, neurons, dtype="float32")
    clean[:, :2] = values[:, :2] = 0.5
    values[:, 2] = clean[:, 2]
    clean[:, 3] = values[:, 3] = 1.0
    values[n // 2, 3] = 2.0
    return torch.from_numpy(values), torch.from_numpy(clean)


def reference(values, clean, tolerance=TOLERANCE, draws=4000, alpha=0.95):
    """The score after each test, from all sensitivities so far."""
    scores, kept = [0.0], []
    factor = 1.0 if alpha is None else np.sqrt((draws - 1) / chi2.ppf(1 - alpha, draws - 1))
    for row, base in zip(values.double().numpy(), clean.double().numpy(), strict=True):
        if np.isfinite(row - base).all():
            kept.append((abs(row - base), base))
        n, converged, judged = len(kept), 0, 0
        for neuron in range(values.shape[1] if n else 0):
            moved = np.array([each[0][neuron] for each in kept])
            bases = {each[1][neuron] for each in kept}
            if not moved.any() and len(bases) == 1:
                continue
            judged += 1
            if n > 3 and (moved.any() or n >= 3000):
                sd = np.sqrt(((moved - moved.mean()) ** 2).sum() / (n * (n - 3)))
                converged += factor * sd / np.sqrt(draws) < tolerance * np.sqrt(4000 / draws)
        scores.append(converged / max(judged, 1))
    return scores


@pytest.mark.parametrize("options", [{}, {"alpha": None}, {"draws": 1000}, {"tolerance": 0.02}])
@pytest.mark.parametrize("seed", [0, 1])
def test_reference(seed, options):
    values, clean = stream(seed)
    scores = reference(values, clean, **options)
    criterion = SCC(**{"tolerance": TOLERANCE} | options)
    raised = criterion.update(values, clean=clean)
    assert raised.tolist() == [b > a for a, b in pairwise(scores)]
    assert criterion.score() == scores[-1]
    assert 0 < criterion.score() < 1
    assert criterion.tests == 40


def parts(n, sizes):
    start = 0
    while start < n:
        size = sizes[start % len(sizes)]
        yield slice(start, start + size)
        start += size


@settings(max_examples=25)
@given(st.integers(0, 99), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_batches_equal_single_tests_to_the_bit(seed, sizes):
    values, clean = stream(seed)
    values[7, 5] = torch.nan
    one, many, whole = (SCC(TOLERANCE) for _ in range(3))
    raised = torch.cat([one.update(values[k : k + 1], clean=clean[k : k + 1]) for k in range(len(values))])
    assert torch.cat([many.update(values[p], clean=clean[p]) for p in parts(len(values), sizes)]).equal(raised)
    assert whole.update(values, clean=clean).equal(raised)
    assert one.state.keys() == whole.state.keys()
    for name, each in one.state.items():
        assert each.equal(many.state[name]), name
        assert each.equal(whole.state[name]), name


@needs_c
@settings(max_examples=25)
@given(st.integers(0, 99), st.sampled_from([1, 3, 255, 256, 257, 700]), st.booleans())
def test_c_agrees_with_torch_to_the_bit(seed, n, is_late):
    values, clean = stream(seed, n=23, neurons=max(n, 4))
    values, clean = values[:, :n].contiguous(), clean[:, :n].contiguous()
    values[5, n // 2] = torch.inf if seed % 2 else 1.0
    before = 2990 if is_late else 0
    counts, states = torch.arange(before + 1, before + 24), [state_of(clean, before) for _ in range(2)]
    limits = torch.logspace(-6, 2, 23, dtype=torch.float64).flip(0).contiguous()
    found = [way(values, clean, None, counts, limits, each) for way, each in zip(WAYS, states, strict=True)]
    assert torch.equal(*found)
    for name, each in states[0].items():
        assert each.nan_to_num(7).equal(states[1][name].nan_to_num(7)), name


def state_of(clean, before):
    """The state to continue from: empty, or sums of earlier tests."""
    generator, n = torch.Generator().manual_seed(before), clean.shape[1]
    shift, sums, squares = torch.rand(3, n, generator=generator, dtype=torch.float64) * bool(before)
    moved, varied = torch.rand(2, n, generator=generator) < 0.3 * bool(before)
    state = {"shift": shift, "sums": sums * 30, "squares": squares * 30 + sums**2, "moved": moved, "varied": varied}
    return {name: each.clone() for name, each in state.items()} | {"clean": clean[0].clone()}


@needs_c
def test_many_threads_give_the_same_result_as_one():
    values, clean = stream(5, n=64, neurons=3000)
    found = []
    for n_threads in (1, 4):
        torch.set_num_threads(n_threads)
        criterion = SCC(TOLERANCE)
        found.append((criterion.update(values, clean=clean), criterion.state))
    assert found[0][0].equal(found[1][0])
    assert all(each.equal(found[1][1][name]) for name, each in found[0][1].items())


@pytest.mark.parametrize("cells", [20, 2**20])
def test_the_results_are_the_same_without_c(cells, monkeypatch):
    values, clean = stream(5)
    values[9, 4] = torch.nan
    plain, blocks = SCC(TOLERANCE), SCC(TOLERANCE)
    raised = plain.update(values, clean=clean)
    monkeypatch.setattr("themis.compute.native.library_for", lambda _: None)
    monkeypatch.setattr(scc, "SENSITIVITIES_AT_ONCE", cells)
    assert blocks.update(values, clean=clean).equal(raised)
    assert all(each.equal(blocks.state[name]) for name, each in plain.state.items())


def test_double_precision_and_strided_tests_are_accepted():
    values, clean = stream(5)
    plain, wide, strided = (SCC(TOLERANCE) for _ in range(3))
    raised = plain.update(values, clean=clean)
    assert wide.update(values.double(), clean=clean.double()).equal(raised)
    assert strided.update(values.T.contiguous().T, clean=clean.T.contiguous().T).equal(raised)
    assert plain.score() == wide.score() == strided.score()


@needs_triton
@pytest.mark.parametrize("n", [1, 31, 32, 33, *((5000, 40_000) if HAS_GPU else ())])
@pytest.mark.parametrize("before", [0, 1, 2990])
def test_the_kernel_agrees_with_torch_to_the_bit(n, before):
    values, clean = stream(6, n=37, neurons=max(n, 4))
    values, clean = values[:, :n].contiguous(), clean[:, :n].contiguous()
    values[3, n // 2] = torch.inf
    here = state_of(clean, before)
    there = {name: each.to(DEVICE, copy=True) for name, each in here.items()}
    limits = torch.logspace(-6, 4, 37, dtype=torch.float64).flip(0).contiguous()
    counts = torch.arange(before + 1, before + 38)
    expected = scc.converge_in_torch(values, clean, None, counts, limits, here)
    rows, clean = torch.arange(37, device=DEVICE).flip(0), clean.flip(0).to(DEVICE)
    found = kernels_cuda.converge(values.to(DEVICE), clean, rows, counts.to(DEVICE), limits.to(DEVICE), there)
    assert found.cpu().equal(expected)
    for name, each in here.items():
        assert torch.equal(there[name].cpu().nan_to_num(7), each.nan_to_num(7)), name


@pytest.mark.parametrize("is_broken", [False, True])
def test_clean_values_may_be_given_by_row(is_broken):
    values, clean = stream(5)
    if is_broken:
        values[9, 4] = torch.nan
    rows = torch.arange(len(values)).roll(7)
    plain, by_row = SCC(TOLERANCE), SCC(TOLERANCE)
    layout = Layout(("layer",), (values.shape[1],))
    raised = by_row.update(Readings(values, layout, clean, clean_rows=rows))
    assert plain.update(Readings(values, layout, clean[rows])).equal(raised)
    assert all(each.equal(by_row.state[name]) for name, each in plain.state.items())


@pytest.mark.parametrize("order", ["equal", "descending", "last"])
def test_hard_streams(order):
    values, clean = stream(2, n=30)
    if order == "equal":
        values, clean = values[:1].expand(30, -1), clean[:1].expand(30, -1)
    elif order == "descending":
        at = (values - clean).abs().sum(1).argsort(descending=True)
        values, clean = values[at], clean[at]
    else:
        values = clean.clone()
        values[-1] += 0.001
    scores = reference(values, clean)
    criterion = SCC(TOLERANCE)
    assert criterion.update(values, clean=clean).tolist() == [b > a for a, b in pairwise(scores)]
    assert criterion.score() == scores[-1]


def test_agrees_with_the_judge_of_campaigns():
    values, clean = stream(3, n=200, neurons=60)
    criterion = SCC(0.002)
    for at in parts(200, [64]):
        criterion.update(values[at], clean=clean[at])
    moments, spread = moments_of((values - clean).abs().double()), moments_of(clean.double())
    is_dead = (spread.m2 == 0) & (moments.m2 == 0) & (moments.mean == 0)
    layers = [Layer("layer", (60,), 0, 60, None)]
    coverage, _ = cover(moments, layers, is_dead=is_dead, rule=Rule(0.002), goal=0.9, sample=Sample(100))
    assert 0 < coverage.all < 1
    assert coverage.n_dead == 2
    assert criterion.score() == coverage.all


def test_unmoved_neurons_converge_after_three_thousand_tests():
    values = torch.rand(3000, 2)
    values[:, 1] = 0
    criterion = SCC()
    criterion.update(values[:2999], clean=values[:2999])
    assert criterion.score() == 0
    assert criterion.update(values[2999:], clean=values[2999:]).tolist() == [True]
    assert criterion.score() == 1  # the second neuron is dead


def test_the_score_can_fall_and_stays_in_bounds():
    clean = torch.zeros(60, 3)
    values = torch.rand(60, 3) * 0.01
    criterion = SCC()
    criterion.update(values, clean=clean)
    assert criterion.score() == 1
    assert not criterion.update(torch.full((1, 3), 100.0), clean=clean[:1]).any()
    assert criterion.score() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_test_is_left_out(value):
    values, clean = stream(4)
    spoilt = values.clone()
    spoilt[::5, 6] = value
    clean_spoilt = clean.clone()
    clean_spoilt[1, 1] = value
    keep = [k for k in range(40) if k % 5 and k != 1]
    criterion, expected = SCC(TOLERANCE), SCC(TOLERANCE)
    raised = criterion.update(spoilt, clean=clean_spoilt)
    assert raised[keep].equal(expected.update(values[keep], clean=clean[keep]))
    assert not raised[::5].any()
    assert not raised[1]
    assert all(each.equal(expected.state[name]) for name, each in criterion.state.items())
    nothing = SCC()
    nothing.update(torch.full((2, 3), value), clean=torch.zeros(2, 3))
    assert nothing.score() == 0


@pytest.mark.parametrize("cut", [0, 1, 13, 39, 40])
def test_halves_merge_to_the_whole(cut):
    values, clean = stream(6)
    first, second, whole = SCC(TOLERANCE), SCC(TOLERANCE), SCC(TOLERANCE)
    first.update(values[:cut], clean=clean[:cut])
    second.update(values[cut:], clean=clean[cut:])
    whole.update(values, clean=clean)
    merged = first.merge(second)
    assert merged.score() == whole.score() == second.merge(first).score()
    assert merged.tests == 40
    more, base = stream(7)
    assert merged.update(more, clean=base).equal(whole.update(more, clean=base))  # it continues
    assert merged.score() == whole.score()


def test_a_half_without_finite_tests_can_be_merged():
    values, clean = stream(6)
    first, second = SCC(TOLERANCE), SCC(TOLERANCE)
    first.update(values, clean=clean)
    second.update(values * torch.nan, clean=clean)
    assert first.merge(second).score() == second.merge(first).score() == first.score() > 0


def test_the_order_matters_only_for_rounding():
    values, clean = stream(8)
    at = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    first, second = SCC(TOLERANCE), SCC(TOLERANCE)
    first.update(values, clean=clean)
    second.update(values[at], clean=clean[at])
    assert first.score() == second.score()


def test_the_state_does_not_share_memory_with_the_inputs():
    values, clean = stream(9)
    kept, expected = SCC(TOLERANCE), SCC(TOLERANCE)
    expected.update(values, clean=clean)
    a, b = values[:20].clone(), clean[:20].clone()
    kept.update(a, clean=b)
    a.fill_(9)
    b.fill_(9)
    kept.update(values[20:], clean=clean[20:])
    assert kept.score() == expected.score()


# The variant of MindArmour


def rates_by_hand(batch, seed):
    """Acceptance rates, a neuron and a step at a time, with the same random numbers."""
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for _ in range(scc.CHAIN_STEPS):
        draws.append((torch.rand(batch.shape, generator=generator), torch.rand(batch.shape[1], generator=generator)))
    rates = []
    for neuron in range(batch.shape[1]):
        at, width, accepted = batch[:, neuron].numpy(), batch[:, neuron].mean().item(), 0
        for steps, chances in draws:
            proposed = at + width * (steps[:, neuron].numpy() - np.float32(0.5))
            if chances[neuron].item() < min(1, np.exp(-0.5 * (proposed**2).sum() + 0.5 * (at**2).sum())):
                at, accepted = proposed, accepted + 1
        rates.append(accepted / scc.CHAIN_STEPS)
    return rates


def test_mindarmour_against_a_slow_chain(monkeypatch):
    monkeypatch.setattr(scc, "CHAIN_STEPS", 100)
    torch.manual_seed(0)
    moved = torch.rand(scc.CHAIN_BATCH, 6) * torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 4.0])
    rates = scc._acceptance(moved, 5)
    assert rates.tolist() == pytest.approx(
        rates_by_hand(moved, 5), abs=0.011
    )  # a draw close to the acceptance threshold may flip
    assert rates[0] == 1  # a neuron that does not move accepts every step
    assert rates[1] > rates[4]


def test_mindarmour_takes_the_most_moved_neurons_of_each_layer(monkeypatch):
    monkeypatch.setattr(scc, "TOP_NEURONS", 2)
    moved = torch.tensor([[1.0, 5.0, 3.0, 9.0, 7.0, 8.0, 9.5]])
    assert scc._most_moved(moved, Layout(("a", "b"), (3, 4))).tolist() == [2, 1, 3, 6]


def test_mindarmour_counts_full_batches(monkeypatch):
    monkeypatch.setattr(scc, "CHAIN_STEPS", 50)
    torch.manual_seed(0)
    clean = torch.zeros(100, 8)
    values = torch.rand(100, 8) * torch.tensor([0.1, 0.2, 0.3, 0.4, 1.0, 2.0, 3.0, 4.0])
    values[3, 0] = torch.nan
    one, whole, other = (SCC(variant="mindarmour", random_seed=k) for k in (0, 0, 1))
    raised = whole.update(values, clean=clean)
    singly = torch.cat([one.update(values[k : k + 1], clean=clean[:1]) for k in range(100)])
    assert singly.equal(raised)
    assert all(each.equal(one.state[name]) for name, each in whole.state.items())
    assert int(whole.state["count"]) == 3
    assert int(whole.state["judged"]) == 24
    assert raised.nonzero().squeeze(1).tolist()[:1] == [32]  # 32 finite tests
    assert 0 < whole.score() < 1
    kept = torch.cat([values[:3], values[4:]])
    expected = sum(
        int((scc._acceptance(kept[k * 32 :][:32][:, one.state["neurons"]], k) > 0.5).sum()) for k in range(3)
    )
    assert whole.score() == expected / 24
    other.update(values, clean=clean)
    assert 0 <= other.score() <= 1
    with pytest.raises(UsageError, match="cannot be merged"):
        whole.merge(one)
    assert not SCC(variant="mindarmour").laws.mergeable


def test_invalid_use_is_rejected():
    for wrong in ({"tolerance": 0}, {"draws": 1}, {"alpha": 1.0}, {"variant": "paper"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            SCC(**wrong)
    with pytest.raises(UsageError, match="pass clean="):
        SCC().update(torch.rand(2, 3))
    assert SCC().neurons == "element"
    assert SCC(neurons="channel").neurons == "channel"
    assert SCC().score() == 0
