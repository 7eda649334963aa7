"""Memory that processes of one machine share."""

import subprocess
import sys
from uuid import uuid4

import pytest
import torch

from themis.compute.shared_memory import SharedMemory, can_share

pytestmark = pytest.mark.skipif(not can_share(), reason="needs Linux on x86_64")
SIZE = SharedMemory.size_of(3, 40)
DOUBLE = """
import sys
import torch
from themis.compute.shared_memory import SharedMemory

memory = SharedMemory(sys.argv[1], int(sys.argv[2]))
flags, numbers = memory.take((3,), torch.bool), memory.take((2, 5), torch.float32)
numbers *= 2
flags[1] = True
"""


def _take(name):
    memory = SharedMemory(name, SIZE)
    return memory, memory.take((3,), torch.bool), memory.take((2, 5), torch.float32)


def test_another_process_sees_and_changes_it():
    name = f"test-{uuid4().hex}"
    memory, flags, numbers = _take(name)
    assert not flags.any()
    numbers += 1.5
    subprocess.run([sys.executable, "-c", DOUBLE, name, str(SIZE)], check=True)
    assert numbers.tolist() == [[3.0] * 5] * 2
    assert flags.tolist() == [False, True, False]
    del memory


def test_it_is_freed_with_the_last_that_has_it():
    name = f"test-{uuid4().hex}"
    first, second = _take(name), _take(name)
    first[2].fill_(7)
    del first
    assert second[2].unique().tolist() == [7]
    del second
    assert not _take(name)[2].any()


def test_another_name_is_other_memory():
    first, second = _take(f"test-{uuid4().hex}"), _take(f"test-{uuid4().hex}")
    first[2].fill_(7)
    assert not second[2].any()


def test_a_name_that_cannot_be_locked_is_refused():
    with pytest.raises(OSError, match="too long"):
        SharedMemory("x" * 200, 64)
