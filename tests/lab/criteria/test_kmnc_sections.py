"""The section of a value and the bits it sets are identical in C, in a kernel, in torch and in NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import DEVICE, HAS_GPU, needs_triton

from themis.compute.native import library
from themis_lab.criteria import covering, kernels_cuda
from themis_lab.criteria.kmnc import Sections, cover_sections, cover_sections_in_torch, n_words, no_bits

RULES = {"int": (False, True), "ceil": (True, True), "lost": (False, False)}
needs_c = pytest.mark.skipif(library() is None, reason="not compiled on this machine")


def made(low, high, k, rule):
    """Sections of the range low..high, with their width computed by NumPy in float32."""
    is_ceil, is_clamped = RULES[rule]
    low, high = low.numpy(), high.numpy()
    width = (high - low) if is_ceil else (high - low) / np.float32(k)
    limit = high if is_clamped else np.full_like(high, np.inf)
    limit = np.where(width > 0, limit, low)
    return Sections(*(torch.from_numpy(each) for each in (low, limit, width)), k, is_ceil, is_clamped)


def section_by_hand(sections, a, neuron):
    """One section, in NumPy's float32 scalars."""
    low, high, width = (np.float32(each[neuron]) for each in (sections.low, sections.high, sections.width))
    a, k = np.float32(a), sections.k
    if not (low <= a <= high) or width == 0:
        return -1
    with np.errstate(over="ignore"):
        place = (a - low) / width
    number = int(np.ceil(place * np.float32(k))) - 1 if sections.is_ceil else int(min(place, np.float32(1e9)))
    if number < 0 or (number >= k and not sections.is_clamped):
        return -1
    return min(number, k - 1)


def walk_by_hand(sections, values):
    """All sets of sections, and which tests raised them."""
    hit, raised = set(), []
    for row in values.numpy():
        before = len(hit)
        for neuron, a in enumerate(row):
            if (section := section_by_hand(sections, a, neuron)) >= 0:
                hit.add((neuron, section))
        raised.append(len(hit) > before)
    return hit, raised


def hit_in(bits, k):
    return {(n, s) for n, row in enumerate(bits.tolist()) for s in range(k) if row[s // 32] >> s % 32 & 1}


def example(n_tests, n, seed=0):
    """Ranges of all sizes, and values inside and outside of them, on their ends and on the borders of sections."""
    rng = torch.Generator().manual_seed(seed)
    low = torch.randn(n, generator=rng) * 10.0 ** torch.randint(-6, 6, (n,), generator=rng)
    high = low + torch.rand(n, generator=rng) * 10.0 ** torch.randint(-6, 6, (n,), generator=rng)
    share = torch.rand(n_tests, n, generator=rng) * 1.2 - 0.1
    border = torch.randint(0, 41, (n_tests, n), generator=rng) / 40
    share = torch.where(torch.rand(n_tests, n, generator=rng) < 0.5, share, border)
    values = torch.where(share == 1, high, low + share * (high - low))
    odd = torch.rand(n_tests, n, generator=rng)
    values[odd < 0.02], values[odd > 0.98], values[(odd > 0.4) & (odd < 0.42)] = torch.nan, torch.inf, -torch.inf
    return low, high, values


@needs_c
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 40, 1000])
def test_c_torch_and_numpy_agree_to_the_bit(rule, k):
    low, high, values = example(7, 150, k)
    sections = made(low, high, k, rule)
    by_c, by_torch = no_bits(150, k, values.device), no_bits(150, k, values.device)
    in_c, in_torch = cover_sections(sections, values, by_c), cover_sections_in_torch(sections, values, by_torch)
    hit, raised = walk_by_hand(sections, values)
    assert torch.equal(by_c, by_torch)
    assert hit_in(by_c, k) == hit
    assert in_c[0].tolist() == in_torch[0].tolist() == raised
    assert int(in_c[1]) == in_torch[1] == len(hit)


@needs_c
@pytest.mark.parametrize("rule", RULES)
@given(
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.floats(-(2.0**100), 2.0**100, width=32),
    st.lists(st.floats(width=32), min_size=1, max_size=8),
    st.sampled_from([1, 2, 10, 1000, 1 << 20]),
)
def test_any_range_and_value(rule, one, other, values, k):
    low, high = torch.tensor([min(one, other)]), torch.tensor([max(one, other)])
    values = torch.tensor([*values, one, other, (one + other) / 2])[:, None]
    sections = made(low, high, k, rule)
    bits = no_bits(1, k, values.device)
    raised, n_set = cover_sections(sections, values, bits)
    assert [section_by_hand(sections, a, 0) for a in values[:, 0].numpy()] == sections.numbers(values)[:, 0].tolist()
    assert (raised.tolist(), n_set) == (walk_by_hand(sections, values)[1], len(walk_by_hand(sections, values)[0]))


@needs_c
@pytest.mark.parametrize("rule", RULES)
def test_subnormal_ranges(rule):
    tiny = np.float32(1e-45)  # the smallest number
    steps = np.array([0, 1, 2, 3, 700, 1499, 1500, 99999], np.float32)
    low, high = torch.zeros(8), torch.from_numpy(tiny * steps)
    values = torch.from_numpy(np.stack([tiny * np.full(8, step, np.float32) for step in range(0, 1600, 7)]))
    for k in (1, 10, 1000):
        sections = made(low, high, k, rule)
        by_c, by_torch = no_bits(8, k, low.device), no_bits(8, k, low.device)
        raised, n_set = cover_sections(sections, values, by_c)
        assert torch.equal(raised, cover_sections_in_torch(sections, values, by_torch)[0])
        assert torch.equal(by_c, by_torch)
        assert hit_in(by_c, k) == walk_by_hand(sections, values)[0]
        assert n_set <= 8 * k


@needs_c
@pytest.mark.parametrize("n", [1, 127, 128, 129, 5000])
def test_every_strip_and_every_chunk(n, monkeypatch):
    monkeypatch.setattr(covering, "NEURON_VALUES", 1000)
    low, high, values = example(9, n)
    sections = made(low, high, 50, "int")
    by_c, by_torch = no_bits(n, 50, low.device), no_bits(n, 50, low.device)
    in_c, in_torch = cover_sections(sections, values, by_c), cover_sections_in_torch(sections, values, by_torch)
    assert torch.equal(by_c, by_torch)
    assert torch.equal(in_c[0], in_torch[0])
    assert in_c[1] == in_torch[1]


@needs_c
def test_many_threads_give_the_same_result_as_one():
    low, high, values = example(40, 3000)
    sections = made(low, high, 1000, "int")
    found = []
    for n_threads in (1, 4):
        torch.set_num_threads(n_threads)
        bits = no_bits(3000, 1000, low.device)
        raised, n_set = cover_sections(sections, values, bits)
        found.append((bits, raised.tolist(), n_set))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def test_other_layouts_and_precisions_give_the_same_result():
    low, high, values = example(6, 40)
    sections = made(low, high, 64, "int")
    bits, other = no_bits(40, 64, low.device), no_bits(40, 64, low.device)
    raised, _ = cover_sections(sections, values, bits)
    again, _ = cover_sections(sections, values.T.contiguous().T, other)
    assert torch.equal(raised, again)
    assert torch.equal(bits, other)
    wide = no_bits(40, 64, low.device)
    cover_sections(sections, values.double(), wide)
    assert hit_in(wide, 64) == {
        (n, s) for row in sections.numbers(values.double()).tolist() for n, s in enumerate(row) if s >= 0
    }


def test_a_row_is_as_long_as_necessary():
    assert [n_words(k) for k in (1, 32, 33, 1000)] == [1, 1, 2, 32]
    assert no_bits(3, 1000, torch.device("cpu")).nbytes == 3 * 128


@needs_triton
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (127, 32), (129, 33), (5000 if HAS_GPU else 600, 1000)])
def test_the_kernel_agrees_with_torch(rule, n, k):
    low, high, values = example(37, n, k)
    sections, (is_ceil, is_clamped) = made(low, high, k, rule), RULES[rule]
    ranges = [each.to(DEVICE) for each in (sections.low, sections.high, sections.width)]
    bits, in_kernel, plain = (no_bits(n, k, device) for device in (low.device, DEVICE, DEVICE))
    for _ in range(2):  # also if all bits are set
        raised, n_set = cover_sections_in_torch(sections, values, bits)
        for rows, found in (
            (
                in_kernel,
                kernels_cuda.cover_sections(
                    values.to(DEVICE), *ranges, k, in_kernel, is_ceil=is_ceil, is_clamped=is_clamped
                ),
            ),
            (plain, cover_sections_in_torch(Sections(*ranges, k, is_ceil, is_clamped), values.to(DEVICE), plain)),
        ):
            assert torch.equal(rows.cpu(), bits)
            assert torch.equal(found[0].cpu(), raised)
            assert int(found[1]) == n_set
