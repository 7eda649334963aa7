"""Items kept as bits, covered one after another and all at once."""

import pytest
import torch

from themis_lab.criteria.covering import cover_items, first_hits, has_bits, mark_tests, set_bits


@pytest.mark.parametrize(("n_items", "n_tests", "width"), [(1, 1, 1), (32, 7, 3), (70, 20, 5), (1000, 30, 0)])
def test_covering_all_items_at_once_gives_the_same_bits(n_items, n_tests, width):
    random = torch.Generator().manual_seed(n_items)
    bits = torch.zeros(-(-n_items // 32), dtype=torch.int32)
    expected_bits = bits.clone()
    for _ in range(3):
        items = torch.randint(-1, n_items, (n_tests, width), generator=random)
        is_new = (items >= 0) & ~has_bits(expected_bits, items.clamp(min=0))
        fresh, first = first_hits(items, is_new)
        set_bits(expected_bits, fresh)
        raised, n_set = cover_items(bits, items)
        assert torch.equal(bits, expected_bits)
        assert torch.equal(raised, mark_tests(first, n_tests))
        assert int(n_set) == len(fresh)
