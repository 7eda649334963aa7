"""The order in which a criterion runs tests, and the quality of an order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.errors import DataError, UsageError
from themis_lab.criteria.covering import Covering
from themis_lab.criteria.criterion import Criterion
from themis_lab.criteria.readings import Activations, Batch
from themis_lab.criteria.topk import TKNP


def rank(
    criterion: Criterion,
    activations: Activations | Batch,
    by: str = "cam",
    *,
    predicted: Tensor | None = None,
    clean: Activations | None = None,
) -> Tensor:
    """The order in which to run these tests, int64 `[tests]`, the index of the first test first.

    `ctm`, the coverage-total method: tests that hit more items come first; for surprise criteria, the more surprising
    ones. `cam`, the coverage-additional method: the next test is always the one that hits the most items that no
    earlier one has hit; once no test adds anything, the rest are ordered by `ctm`. Ties keep the order of the input.
    Tests that the criterion has seen before do not count, and the criterion is not changed.
    """
    if by not in ("cam", "ctm"):
        raise UsageError(f"by must be 'cam' or 'ctm', got {by!r}")
    if not isinstance(criterion, Covering | TKNP):
        raise UsageError(
            f"tests can be ranked by criteria that cover items (nc, kmnc, nbc, snac, tknc, tknp, idc, lsa, dsa, mdsa, "
            f"npc, mcdc, tway), got {criterion.name!r}: rank by one of those"
        )
    if criterion.learns and not criterion.learnt:
        raise UsageError(f"{criterion.name} must be fitted on training data before it ranks tests: call fit(batches)")
    batch = activations if isinstance(activations, Batch) else Batch(activations, clean, predicted)
    fresh = criterion.fresh()
    readings = fresh.accept(batch)
    device, n = readings.values.device, len(readings)
    if n == 0:
        return torch.zeros(0, dtype=torch.int64, device=device)
    test, item = _hits(fresh.patterns(readings) if isinstance(fresh, TKNP) else fresh.items(readings))
    surprise = getattr(fresh, "surprise", None)
    if surprise is None:
        value = np.bincount(test, minlength=n)
    else:
        value = surprise(batch.activations, predicted=batch.predicted).double().cpu().numpy()
        value = np.where(np.isnan(value), -np.inf, value)
    total = np.argsort(-value, kind="stable")
    order = total if by == "ctm" else _greedy(test, item, n, total)
    return torch.as_tensor(order, device=device)


def apfd(order: Tensor | Sequence[int], faults: Tensor | Sequence[Any]) -> float:
    """Average percentage of faults detected (APFD) if tests run in `order`, a permutation of all tests.

    `faults [tests]`: bool if each failing test is a fault of its own, or the number of the fault that a test reveals,
    -1 for none; a fault counts where it is first revealed. The APFD is
    `1 - sum(places) / (tests x faults) + 1 / (2 tests)`.
    """
    order, faults = torch.as_tensor(order), torch.as_tensor(faults)
    if (
        faults.ndim != 1
        or order.shape != faults.shape
        or not torch.equal(order.long().sort().values.cpu(), torch.arange(len(faults)))
    ):
        raise DataError(
            f"order must name each of the tests once, got {list(order.shape)} for {list(faults.shape)} tests: rank all"
        )
    if faults.is_floating_point():
        raise UsageError(f"faults must be booleans or the numbers of faults, got {faults.dtype}: convert them")
    ordered = faults.to(order.device)[order.long()]
    if faults.dtype == torch.bool:
        places = ordered.nonzero()[:, 0]
    else:
        at = (ordered >= 0).nonzero()[:, 0]
        numbers, index = torch.unique(ordered[at], return_inverse=True)
        places = torch.full_like(numbers, len(faults), dtype=torch.int64).scatter_reduce_(0, index, at, "amin")
    if len(places) == 0:
        raise DataError("there must be a fault to detect, got none: an order is judged by the faults it reveals")
    n = len(faults)
    return 1 - float((places + 1).sum()) / (n * len(places)) + 1 / (2 * n)


def _hits(items: Tensor) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct pairs of a test and an item that it hits, sorted by both; items are renumbered from 0."""
    test = torch.arange(len(items), device=items.device)[:, None].expand_as(items)[items >= 0]
    distinct, item = torch.unique(items[items >= 0], return_inverse=True)
    n_items = max(len(distinct), 1)
    pair = torch.unique(test * n_items + item)
    return (pair // n_items).cpu().numpy(), (pair % n_items).cpu().numpy()


def _greedy(test: NDArray[np.int64], item: NDArray[np.int64], n: int, rest: NDArray[np.int64]) -> NDArray[np.int64]:
    """Repeatedly the test that adds most, then those of `rest` that add nothing. Each hit is visited at most twice."""
    n_items = int(item.max()) + 1 if len(item) else 0
    start = np.searchsorted(test, np.arange(n + 1))
    by_item = np.argsort(item, kind="stable")
    tests_of = test[by_item]
    start_of = np.searchsorted(item[by_item], np.arange(n_items + 1))
    gain, is_open = np.diff(start), np.ones(n_items, dtype=bool)
    picked: list[int] = []
    while n_items and gain[best := int(gain.argmax())] > 0:
        picked.append(best)
        own = item[start[best] : start[best + 1]]
        new = own[is_open[own]]
        is_open[new] = False
        sizes = start_of[new + 1] - start_of[new]
        at = np.arange(sizes.sum()) + np.repeat(start_of[new] - (sizes.cumsum() - sizes), sizes)
        gain -= np.bincount(tests_of[at], minlength=n)
    left = np.ones(n, dtype=bool)
    left[picked] = False
    return np.concatenate([np.array(picked, dtype=np.int64), rest[left[rest]]])
