"""Seeds from whatever a user has, each with a lasting index."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

from themis import DataError
from themis.data import read_seeds
from themis.data.readers import read_data

INPUTS, LABELS = torch.rand(20, 3), torch.arange(20) % 4
WHOLE = TensorDataset(INPUTS, LABELS)


class Items(Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        return self.items[k]


def test_a_subset_is_just_its_part():
    part = Subset(WHOLE, range(5, 9))
    for data in (part, DataLoader(part, 2, shuffle=True)):
        assert torch.equal(read_seeds(data).inputs, INPUTS[5:9])


def test_a_loader_with_a_sampler_of_its_own_is_refused():
    with pytest.raises(DataError, match=r"got the sampler SubsetRandomSampler: pass Subset\(dataset, indices\)"):
        read_seeds(DataLoader(WHOLE, sampler=SubsetRandomSampler(range(5))))


def test_labels_may_be_missing_or_a_list():
    assert read_seeds((INPUTS, None)).labels is None
    assert read_seeds(TensorDataset(INPUTS)).labels is None
    assert read_seeds((INPUTS, LABELS.tolist())).labels.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    "item", [{"pixels": INPUTS[0]}, (INPUTS[0], torch.eye(3)[0]), (INPUTS[0], "cat")], ids=["dict", "one-hot", "text"]
)
def test_items_that_are_no_input_and_class_number_are_explained(item):
    with pytest.raises(DataError, match=r"a Dataset must give \(input tensor, class number\), got"):
        read_seeds(Items(item, item))


def test_a_sample_is_fixed_nested_and_keeps_the_index():
    small, large = read_seeds((INPUTS, LABELS), 5), read_seeds(WHOLE, 10)
    assert set(small.seed_id.tolist()) < set(large.seed_id.tolist())
    assert torch.equal(small.inputs, INPUTS[small.seed_id])
    assert large.labels.tolist() == LABELS[large.seed_id].tolist()


def test_an_archive_is_read(tmp_path):
    import numpy as np

    np.savez(tmp_path / "data.npz", inputs=INPUTS.numpy(), labels=LABELS.numpy())
    assert torch.equal(read_data(f"npz:{tmp_path / 'data.npz'}").inputs, INPUTS)
    np.savez(tmp_path / "other.npz", x=INPUTS.numpy())
    with pytest.raises(DataError, match="must hold an array named 'inputs'"):
        read_data(f"npz:{tmp_path / 'other.npz'}")
    (tmp_path / "broken.npz").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match="must be a NumPy archive"):
        read_data(f"npz:{tmp_path / 'broken.npz'}")
