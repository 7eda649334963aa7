"""Seeds from all kinds of data, each with a fixed id; in memory, or read when they are needed."""

import os
import pickle
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
import torch
from nets import Conv
from torch.utils.data import DataLoader, Dataset, Subset, SubsetRandomSampler, TensorDataset

import themis
from themis import DataError, Target
from themis.data import read_seeds, rows
from themis.data.rows import Rows
from themis.data.seeds import from_arrays
from themis.measure.clean import place
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader
from themis.target.fingerprint import hash_seeds

INPUTS, LABELS = torch.rand(20, 3), torch.arange(20) % 4
WHOLE = TensorDataset(INPUTS, LABELS)


class Items(Dataset):
    """Counts how often each item is read."""

    def __init__(self, *items):
        self.items, self.reads = items, [0] * len(items)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, k):
        self.reads[k] += 1
        return self.items[k]


@pytest.fixture
def lazy(monkeypatch):
    """Nothing is held in memory, and the cache is small."""
    monkeypatch.setattr(rows, "MAX_HELD_BYTES", 0)
    monkeypatch.setattr(rows, "CACHE_BYTES", 4096)


def test_a_subset_gives_only_its_items():
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


ROWS, NUMBERS = [*torch.rand(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))], [k % 3 for k in range(20)]
LISTS = {
    "tensors": ((ROWS, NUMBERS), r"write \(torch\.stack\(inputs\), labels\)"),
    "tensors with an array": ((ROWS, np.array(NUMBERS)), r"write \(torch\.stack\(inputs\), labels\)"),
    "arrays": (([row.numpy() for row in ROWS], NUMBERS), r"write \(torch\.stack\(inputs\), labels\)"),
    "lists": (
        ([row.tolist() for row in ROWS], [*map(torch.tensor, NUMBERS)]),
        r"write \(torch\.stack\(inputs\), labels\)",
    ),
    "both in a list": ([ROWS, NUMBERS], r"write \(torch\.stack\(inputs\), labels\)"),
    "arrays in a list": ([torch.stack(ROWS), torch.tensor(NUMBERS)], "all inputs must have the same shape"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_inputs_and_labels_are_refused_with_what_to_write(name):
    data, remedy = LISTS[name]
    with pytest.raises(DataError, match=remedy):
        read_seeds(data)


def test_lists_of_examples_and_of_several_inputs_are_read():
    assert len(read_seeds(ROWS)) == len(read_seeds([*zip(ROWS, NUMBERS, strict=True)])) == 20
    assert len(read_seeds([(ROWS[0], 0), (ROWS[1], 1)])) == len(read_seeds([torch.rand(8), torch.rand(8)])) == 2
    several = read_seeds(([torch.rand(2, 3), torch.rand(2, 4)], [0, 1]))  # as many inputs as examples
    assert (len(several), several.others.keys) == (2, (0, 1))


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_labels_that_are_names_become_class_numbers(kind):
    seeds = read_seeds((INPUTS[:3], kind(["owl", "cat", "owl"])))
    assert (seeds.labels.tolist(), seeds.classes) == ([1, 0, 1], ("cat", "owl"))


@pytest.mark.parametrize("shape", [(20,), (20, 3), (20, 4, 4)], ids=str)
def test_labels_may_be_numbers_of_any_shape(shape):
    labels = torch.rand(shape) if len(shape) < 3 else torch.randint(9, shape)
    for data in ((INPUTS, labels), Items(*zip(INPUTS, labels, strict=True))):
        assert torch.equal(read_seeds(data).labels, labels)


@pytest.mark.parametrize("labels", [LABELS[:, None], LABELS[:, None].numpy()], ids=["tensor", "array"])
def test_a_column_of_labels_is_one_label_per_seed(labels):
    for data in ((INPUTS, labels), Items(*zip(INPUTS, labels, strict=True))):
        assert torch.equal(read_seeds(data).labels, LABELS)


def test_inputs_with_a_gradient_or_sparse_ones_are_read_as_plain_numbers():
    for inputs in (INPUTS.clone().requires_grad_(), INPUTS.to_sparse()):
        read = read_seeds((inputs, LABELS)).inputs
        assert torch.equal(read, INPUTS)
        assert not read.requires_grad


def test_items_that_are_refused_have_a_remedy():
    with pytest.raises(DataError, match=r"got dict .*: convert what it gives"):
        read_seeds(Items({"pixels": INPUTS[0], "kind": 3}))
    with pytest.raises(DataError, match=r"got \(Tensor, str\) .*: convert what it gives"):
        read_seeds(Items((INPUTS[0], "cat")))


@pytest.mark.parametrize(
    "item", [{"pixels": INPUTS[0], "kind": 3}, (INPUTS[0], "cat"), ()], ids=["dict", "text", "empty"]
)
def test_items_that_are_not_an_input_and_a_label_are_refused(item):
    with pytest.raises(DataError, match=r"an item of a Dataset must be \(input, label\), or .*, got"):
        read_seeds(Items(item, item))


@pytest.mark.parametrize("wrap", [lambda k: {"pixel_values": INPUTS[k]}, lambda k: ({"image": INPUTS[k]},)])
def test_a_dict_of_one_entry_is_the_input(wrap):
    seeds = read_seeds(Items(*map(wrap, range(20))))
    assert (seeds.others, seeds.has_labels) == (None, False)
    assert torch.equal(seeds.inputs, INPUTS)


@pytest.mark.parametrize("name", ["label", "labels", "y"])
def test_the_entries_of_a_dict_are_known_by_their_names(name):
    pairs = Items(*({name: int(LABELS[k]), "pixel_values": INPUTS[k]} for k in range(20)))
    for data in (pairs, ({"pixel_values": INPUTS}, LABELS)):
        seeds = read_seeds(data)
        assert torch.equal(seeds.inputs, INPUTS)
        assert torch.equal(seeds.labels, LABELS)
    whole = {"image": INPUTS, "meta": INPUTS, name: LABELS}
    for data in (whole, Items(*({entry: values[k] for entry, values in whole.items()} for k in range(20)))):
        several = read_seeds(data)
        assert several.others.keys == ("image", "meta")
        assert torch.equal(several.labels, LABELS)
    assert torch.equal(read_seeds({"pixel_values": INPUTS}).inputs, INPUTS)


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, range(20)), lambda data: DataLoader(data)]
)
def test_an_item_of_three_entries_is_refused_since_it_may_have_two_inputs(wrap):
    message = r"\(\(input, other\), label\) for a model with several inputs, .* \(it has 3 entries"
    with pytest.raises(DataError, match=message):
        read_seeds(wrap(TensorDataset(INPUTS, torch.rand(20, 2), LABELS)))


def test_a_third_entry_that_is_text_is_left_out():
    seeds = read_seeds(Items(*((INPUTS[k], int(LABELS[k]), f"{k}.png") for k in range(20))))
    assert torch.equal(seeds.labels, LABELS)


def test_items_must_have_the_same_shape():
    with pytest.raises(DataError, match="all labels must have the same shape"):
        read_seeds(Items((INPUTS[0], 1), (INPUTS[1], torch.ones(2)))).labels  # noqa: B018
    with pytest.raises(DataError, match="seed 1 has none"):
        read_seeds(Items((INPUTS[0], 1), INPUTS[1])).labels  # noqa: B018
    with pytest.raises(DataError, match=r"the same shape, but seed 1 has \[2\] and the first has \[3\]"):
        read_seeds(Items(INPUTS[0], INPUTS[1, :2]))


def test_samples_are_fixed_and_nested_and_keep_their_ids():
    small, large = read_seeds((INPUTS, LABELS), 5), read_seeds(WHOLE, 10)
    assert set(small.seed_id.tolist()) < set(large.seed_id.tolist())
    assert torch.equal(small.inputs, INPUTS[small.seed_id])
    assert large.labels.tolist() == LABELS[large.seed_id].tolist()


def test_a_sample_reads_no_other_item():
    items = Items(*zip(INPUTS, LABELS, strict=True))
    sample = read_seeds(items, 5)
    assert {k for k, n in enumerate(items.reads) if n} == set(sample.seed_id.tolist())


def test_a_tensor_in_memory_is_not_copied():
    assert read_seeds(INPUTS).inputs.data_ptr() == INPUTS.data_ptr()
    assert read_seeds(WHOLE).inputs.data_ptr() == INPUTS.data_ptr()


@pytest.mark.parametrize("dtype", ["u1", ">i4", "<f8", "f2", "?"])
def test_numbers_of_any_type_become_float32(dtype, lazy):
    values = (np.random.default_rng(0).random((9, 4)) * 9).astype(dtype)
    assert isinstance(from_arrays(values).inputs, Rows)
    np.testing.assert_array_equal(from_arrays(values).inputs[:], values.astype(np.float32))


def test_arrays_that_torch_does_not_support_are_copied():
    values = INPUTS.numpy()
    frozen = values.copy()
    frozen.flags.writeable = False
    for each in (frozen, values[:, ::-1], np.asfortranarray(values), values.astype(">f4")):
        np.testing.assert_array_equal(read_seeds(each).inputs, each)


def test_rows_are_indexed_like_a_tensor(lazy):
    items = Items(*zip(INPUTS, LABELS, strict=True))
    read = read_seeds(items)
    assert isinstance(read.inputs, Rows)
    mask = torch.arange(20) % 3 == 0
    for at in (3, slice(2, 9), torch.tensor([5, 5, 1]), mask, torch.tensor(7)):
        assert torch.equal(read.inputs[at], INPUTS[at])
    assert torch.equal(read[mask].inputs[:], INPUTS[mask])
    assert torch.equal(read[mask].labels, LABELS[mask])
    assert torch.equal(read[mask][torch.tensor([2])].inputs[:], INPUTS[[6]])
    assert read.shape == (20, 3)


def test_a_row_that_occurs_twice_in_a_chunk_is_read_once(lazy, monkeypatch):
    monkeypatch.setattr(rows, "CACHE_BYTES", 0)
    items = Items(*INPUTS)
    read_seeds(items).take(torch.tensor([9] * 50))
    assert items.reads[9] == 1


def test_the_cache_keeps_the_rows_read_last_that_fit():
    items = Items(*torch.rand(5, 10))
    inputs = Rows(items.__getitem__, torch.arange(5), (10,), cache_bytes=100)
    for k in range(5):
        inputs[torch.tensor([k, 0])]
    assert [items.reads[k] for k in range(5)] == [1, 1, 1, 1, 1]
    inputs.part(torch.tensor([0, 4]))[:]
    assert [items.reads[k] for k in (0, 4)] == [1, 1], "parts share it"
    inputs[torch.tensor([1])]
    assert items.reads[1] == 2


def test_lazy_rows_can_be_sent_to_a_worker():
    inputs = Rows(Items(*INPUTS).__getitem__, torch.arange(20), (3,))
    sent = pickle.loads(pickle.dumps(inputs.part(torch.tensor([3, 5]))))
    assert torch.equal(sent[:], INPUTS[[3, 5]])


def test_lazy_data_has_the_hash_of_the_same_data_in_memory(lazy, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK_BYTES", 50)
    for labels in (LABELS, LABELS.float() / 3):
        read = read_seeds(Items(*zip(INPUTS, labels, strict=True)))
        assert isinstance(read.inputs, Rows)
        assert hash_seeds(read) == hash_seeds(read_seeds((INPUTS, labels)))
        assert hash_seeds(read_seeds(read, 7)) == hash_seeds(read_seeds((INPUTS, labels), 7))
    assert hash_seeds(read) != hash_seeds(read_seeds((INPUTS + 1e-6, labels)))


def outcome(data, **options):
    torch.manual_seed(0)
    run = themis.run(Target(Conv()), data, "gaussian", magnitude=0.5, max_tests=2000, **options)
    summary = {name: value for name, value in run.summary().items() if "second" not in name and name != "environment"}
    return summary, [(each.id, each.seed_id, each.theta, each.margin, each.distance) for each in run.faults], run


@pytest.mark.parametrize("kept", [2.0, 0.0])
def test_a_campaign_on_lazy_data_is_identical(kept, request, tmp_path):
    torch.manual_seed(0)
    net, inputs = Conv().eval(), torch.rand(300, 1, 8, 8)
    labels = net(inputs).argmax(1)
    held = outcome((inputs, labels), clean_memory_gib=kept, out=tmp_path / "held")
    request.getfixturevalue("lazy")
    items = Items(*zip(inputs, labels, strict=True))
    read = outcome(items, clean_memory_gib=kept, out=tmp_path / "lazy")
    assert str(held[:2]) == str(read[:2])
    assert len(read[1]) > 10
    assert read[2].faults[0].replay().is_same
    with closing(Reader(tmp_path / "lazy")) as stored:
        torch.manual_seed(0)
        replayed = Replayer(stored, Target(Conv()), items).replay(read[2].faults[0])
        assert replayed.is_same
        assert replayed.changes == []


def test_lazy_labels_need_no_reads_of_their_own(lazy):
    items = Items(*((torch.rand(1, 8, 8), k % 3) for k in range(40)))
    once = read_seeds(items)
    items.reads[:] = [0] * 40
    once.take(torch.arange(40))
    assert once.labels.tolist() == [k % 3 for k in range(40)]
    assert items.reads == [1] * 40


BAD = {
    "not finite": (torch.full((1, 8, 8), torch.nan), "inputs must be finite, but seed 33 has a NaN"),
    "another shape": (
        torch.rand(1, 9, 8),
        r"the same shape, but seed 33 has \[1, 9, 8\] and the first has \[1, 8, 8\]",
    ),
    "bytes": (
        torch.rand(1, 8, 8) * 255,
        r"must lie in bounds \(0, 1\), got .*, first in seed 33: divide by 255",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_lazy_row_is_found_in_the_clean_pass(lazy, name):
    bad, message = BAD[name]
    items = Items(*(bad if k == 33 else torch.rand(1, 8, 8) for k in range(40)))
    with pytest.raises(DataError, match=message):
        themis.run(Conv(), items, "gaussian", max_tests=100)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_data_that_fits_is_placed_on_the_gpu_and_other_data_is_copied_on_demand(monkeypatch):
    device = torch.device("cuda")
    assert place(INPUTS, device).is_cuda
    assert torch.equal(place(rows_of(INPUTS), device)[torch.tensor([3, 1], device=device)].cpu(), INPUTS[[3, 1]])
    monkeypatch.setattr("themis.measure.clean._free_bytes", lambda device: INPUTS.nbytes)
    placed = place(INPUTS, device)
    assert isinstance(placed, Rows)
    assert placed[:4].is_cuda
    assert torch.equal(placed[:].cpu(), INPUTS)


def rows_of(inputs):
    return Rows(lambda k: inputs[k], torch.arange(len(inputs)), tuple(inputs.shape[1:]))


N_SEEDS, SIDE, ALLOWED_MB = 16_000, 128, 300
PROGRAM = f"""
import resource, time, torch, themis
from themis.runs.store.writer import _Store
from torch import nn
from torch.utils.data import Dataset
torch.set_num_threads(1)
write_rows = _Store.write_rows

def write_slowly(writer, *arguments):
    time.sleep(0.1)
    write_rows(writer, *arguments)

class Made(Dataset):
    def __init__(self, n): self.n = n
    def __len__(self): return self.n
    def __getitem__(self, k): return torch.full((1, {SIDE}, {SIDE}), k % 97 / 97), k % 3

torch.manual_seed(15)  # with this one, most tests are faults, whose pictures wait to be written
net = nn.Sequential(nn.MaxPool2d(16), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
themis.run(net, Made(100), "gaussian", max_tests=300, out="small")  # everything is loaded
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {ALLOWED_MB} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    torch.empty({N_SEEDS} * {SIDE * SIDE})
    print("the data fits: this test shows nothing")
except RuntimeError:
    _Store.write_rows = write_slowly  # as on a busy disk, which is then written to less often
    result = themis.run(net, Made({N_SEEDS}), "gaussian", max_tests=2000, tolerance=1e-9, plateau=None, out="large")
    print(result.rounds[-1].tests, result.start.n_seeds, len(result.faults) > 1000)
"""


def test_a_campaign_runs_on_data_that_does_not_fit_in_memory(tmp_path):
    assert N_SEEDS * SIDE * SIDE * 4 > 3 * ALLOWED_MB * 2**20
    command = [sys.executable, "-c", PROGRAM]
    # Buffers are given back at once: how much of the heap lies fallow between them depends on the time of each write.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2000", str(N_SEEDS), "True"]
