"""Seeds that belong together: groups are read from a number or a file, and copies of an input join them."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from themis import DataError
from themis.data.groups import join_copies, read_groups
from themis.data.seeds import from_arrays, read_seeds

SEEDS = from_arrays(torch.arange(12.0).reshape(6, 2))


def file_of(tmp_path, *names):
    path = tmp_path / "groups.txt"
    path.write_text("\n".join(names), encoding="utf-8")
    return str(path)


def test_a_number_groups_consecutive_seeds_of_the_data():
    assert read_groups("2", SEEDS).tolist() == [0, 0, 1, 1, 2, 2]
    assert read_groups("4", SEEDS[torch.tensor([5, 0, 3])]).tolist() == [1, 0, 0]


def test_a_file_names_the_group_of_each_seed_of_the_data(tmp_path):
    path = file_of(tmp_path, "Ann", "Bob", "Ann", "Zoë", "Bob", "Ann")
    whole = read_groups(path, SEEDS)
    assert [[k for k in range(6) if whole[k] == group] for group in np.unique(whole)] == [[0, 2, 5], [1, 4], [3]]
    some = read_seeds(SEEDS, 3)
    assert read_groups(path, some).tolist() == whole[some.seed_id].tolist()


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["a"] * 5, "one per line in the order of the data, .* 5 lines, 0 of them empty, for 6 seeds"),
        (["patient"] + ["a"] * 6, "without a heading, but it has 7 lines, 0 of them empty, for 6 seeds"),
        (["a", "a", "", "b", "b", "b"], "must name the group of every seed, .* 6 lines, 1 of them empty, for 6 seeds"),
    ],
)
def test_a_file_that_does_not_fit_the_data_is_refused(tmp_path, names, problem):
    with pytest.raises(DataError, match=problem):
        read_groups(file_of(tmp_path, *names), SEEDS)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"split_by must be a number .* but .*missing\.txt cannot be read"):
        read_groups(str(tmp_path / "missing.txt"), SEEDS)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(DataError, match=r"picture\.png cannot be read"):
        read_groups(str(tmp_path / "picture.png"), SEEDS)


def test_a_file_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("themis.data.groups.MAX_GROUPS_BYTES", 10)
    with pytest.raises(DataError, match="it has more than 10 bytes"):
        read_groups(file_of(tmp_path, *["a" * 9] * 6), SEEDS)


def test_a_long_line_takes_no_memory_for_the_others(tmp_path):
    names = ["b"] * 5 + ["a" * (8 << 20)]
    tracemalloc.start()
    try:
        assert read_groups(file_of(tmp_path, *names), SEEDS).tolist() == [1, 1, 1, 1, 1, 0]
        assert tracemalloc.get_traced_memory()[1] < 128 << 20  # an array of texts has six times 32 MiB
    finally:
        tracemalloc.stop()


def test_groups_that_share_an_input_become_one():
    hashes = np.array([1, 2, 3, 3, 4, 4, 5], np.uint64)
    joined = join_copies(np.array([7, 7, 7, 8, 8, 9, 2]), hashes)  # 7 and 8 share 3, 8 and 9 share 4
    assert len(np.unique(joined[:6])) == 1
    assert joined[6] != joined[0]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=40))
def test_joined_groups_are_the_least_ones_that_divide_neither_a_group_nor_copies(rows):
    group, content = np.array(rows, np.int64).reshape(-1, 2).T
    joined = join_copies(group, content.astype(np.uint64))
    for k in range(len(rows)):
        reached = {k}
        while (
            more := {
                j for j in range(len(rows)) for i in reached if rows[i][0] == rows[j][0] or rows[i][1] == rows[j][1]
            }
            - reached
        ):
            reached |= more
        assert set(np.flatnonzero(joined == joined[k])) == reached
