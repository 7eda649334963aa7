"""Text is refused at once, whatever form it arrives in."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import themis
from themis import DataError, Target
from themis.campaign.preflight import check
from themis.data import read_seeds
from themis.target.traits import refuse_tokens


class Reader(nn.Module):
    """Classifies sequences of tokens; `casts` as models do that accept floating-point ids."""

    def __init__(self, casts=False):
        super().__init__()
        self.casts, self.words, self.last = casts, nn.Embedding(50, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.last(self.words(ids.long() if self.casts else ids).mean(1))


class Columns(nn.Module):
    """Embeds one column of a table."""

    def __init__(self):
        super().__init__()
        self.kinds, self.last = nn.Embedding(50, 4), nn.Linear(8, 3)

    def forward(self, rows):
        return self.last(torch.cat([self.kinds(rows[:, 0].long()), rows[:, 1:]], 1))


IDS = torch.randint(0, 50, (12, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "data",
    [
        ["a good film", "a bad one"],
        (["a good film", "a bad one"], [1, 0]),
        [("a good film", 1), ("a bad one", 0)],
        np.array(["good", "bad"]),
        (np.array(["good", "bad"]), np.array([1, 0])),
        [{"input_ids": torch.tensor([1, 2]), "label": 0}],
    ],
)
def test_strings_are_refused(data):
    with pytest.raises(DataError, match=r"inputs must be numbers, got .*: text is not supported; .* embeddings"):
        read_seeds(data)


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("start", [themis.run, check])
def test_token_ids_are_refused_before_their_range_is(casts, start):
    with pytest.raises(DataError, match=r"got token ids such as \[\d+, .*\]: text is not supported"):
        start(Target(Reader(casts)), TensorDataset(IDS, torch.zeros(12, dtype=torch.int64)), "gaussian")


def test_a_table_with_an_embedded_column_and_a_model_without_words_are_not_text():
    assert refuse_tokens(Target(Columns()), IDS[0].float()) is None
    assert refuse_tokens(Target(nn.Linear(5, 2)), IDS[0].float()) is None
    assert refuse_tokens(Target(Reader(casts=True)), torch.rand(5)) is None
    assert refuse_tokens(themis.BlackBox(lambda x: x[:, :2]), IDS[0].float()) is None
