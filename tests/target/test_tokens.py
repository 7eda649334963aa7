"""Text is refused at once, whatever form it arrives in."""

import numpy as np
import pytest
import torch

from themis import DataError
from themis.data import read_seeds


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
