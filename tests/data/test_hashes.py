"""The hash of an input depends on its content alone."""

import numpy as np
import pytest
import torch

from themis.data.groups import input_hashes, seed_hashes
from themis.data.seeds import from_arrays, from_reader, read_seeds


@pytest.fixture(scope="module")
def digits(trained):
    """200 of them."""
    return read_seeds(trained[1], 200)


def test_content_has_the_same_hash_in_every_shape_type_and_unit(digits):
    pixels = (digits.inputs * 255).round().to(torch.uint8).numpy()
    expected = seed_hashes(digits)
    assert len(set(expected.tolist())) == len(digits)
    for same in (
        from_arrays(pixels, divisor=255),
        from_arrays(pixels / 255),  # float64
        from_arrays(pixels),  # 0..255
        from_arrays(pixels * np.float32(1 / 255)),  # other last bits
        from_arrays(np.asfortranarray(digits.inputs.numpy())),
        from_arrays(digits.inputs.flatten(1)),
        from_arrays(digits.inputs, torch.randn(len(digits))),
        read_seeds(torch.utils.data.TensorDataset(digits.inputs)),
    ):
        np.testing.assert_array_equal(seed_hashes(same), expected)


def test_any_change_gives_a_different_hash():
    values = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    changed = values.clone()
    changed[:, 3] = torch.nextafter(changed[:, 3], torch.tensor(9.0))
    assert not np.isin(seed_hashes(from_arrays(changed)), seed_hashes(from_arrays(values))).any()
    zeros = torch.tensor([[0.5123, 0.0], [0.5123, -0.0]])
    assert len(set(seed_hashes(from_arrays(zeros)).tolist())) == 1
    bits = torch.eye(4)
    assert len(set(seed_hashes(from_arrays(bits)).tolist())) == 4


def test_data_on_disk_is_hashed_one_block_at_a_time(digits, monkeypatch):
    most = 0

    class Counting(type(from_reader(lambda k: digits.inputs[k], (1, 28, 28), 200).inputs)):
        def __getitem__(self, rows):
            nonlocal most
            most = max(most, rows.stop - rows.start)
            return super().__getitem__(rows)

    monkeypatch.setattr("themis.data.rows.BLOCK_BYTES", 28 * 28 * 4 * 16)
    rows = Counting(lambda k: digits.inputs[k], torch.arange(200), (1, 28, 28))
    np.testing.assert_array_equal(input_hashes(rows), seed_hashes(digits))
    assert most == 16
