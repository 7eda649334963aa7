"""Every criterion gives the same results on a GPU as on a CPU."""

import pytest
import torch
from cases import cases, cut, draw

from themis.criteria import Batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def on_gpu(batch):
    tests, clean = ({name: each.cuda() for name, each in some.items()} for some in (batch.activations, batch.clean))
    return Batch(tests, clean, batch.predicted.cuda())


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_results_are_the_same(case):
    if str(case) == "scc-mindarmour":
        pytest.skip("its chains are random, by the device's own generator")
    here, there = case.make(), case.make()
    for batch in cut(draw(7, 61, is_broken=True), [1, 20, 20]):
        assert there.update(on_gpu(batch)).cpu().tolist() == here.update(batch).tolist()
    assert there.score() == pytest.approx(here.score(), rel=1e-9)
    assert all(each.is_cuda for each in there.state.values())
    if there.laws.mergeable:
        assert there.merge(there.fresh()).score() == there.score()
