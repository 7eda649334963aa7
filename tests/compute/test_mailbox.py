"""Large answers of a worker, through memory that it shares with its driver."""

import os
import pickle
import subprocess
import sys
from uuid import uuid4

import numpy as np
import pytest

from themis.compute.mailbox import LEAST_BYTES, SLOT_BYTES, Mailbox

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
POST = """
import pickle, sys
import numpy as np
from themis.compute.mailbox import Mailbox

box = Mailbox.find(sys.argv[1], 2)
letters = [box.post((k, np.full(20_000, k), {"few": np.arange(3.0)})) for k in range(2)]
sys.stdout.buffer.write(pickle.dumps(letters))
"""


@pytest.fixture
def name():
    return f"test-{uuid4().hex}"


def test_the_driver_gets_the_answers_of_another_process(name):
    box = Mailbox.create(name, 2)
    posted = subprocess.run([sys.executable, "-c", POST, name], check=True, capture_output=True).stdout
    letters = pickle.loads(posted)
    assert len(posted) < LEAST_BYTES  # the arrays are not in it
    for k, letter in enumerate(letters):
        number, large, small = box.take(letter)
        assert number == k
        np.testing.assert_array_equal(large, np.full(20_000, k))
        np.testing.assert_array_equal(small["few"], np.arange(3.0))


def test_an_answer_stays_as_it_was_when_its_slot_is_used_again(name):
    box = Mailbox.create(name, 2)
    worker, rng = Mailbox.find(name, 2), np.random.default_rng()
    sent = [rng.random(int(rng.integers(LEAST_BYTES // 8, LEAST_BYTES))) for _ in range(7)]
    taken = [box.take(worker.post(array)) for array in sent]
    for before, after in zip(sent, taken, strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("n_bytes", [8, LEAST_BYTES - 1, SLOT_BYTES + 1])
def test_small_and_very_large_answers_are_sent_as_they_are(name, n_bytes):
    answer = np.zeros(n_bytes, dtype=np.uint8)
    assert Mailbox.create(name, 2).post(answer) is answer


def test_arrays_may_be_stored_by_columns_or_with_gaps(name):
    box, numbers = Mailbox.create(name, 2), np.random.default_rng().random((100, 1000))
    arrays = [np.asfortranarray(numbers), numbers[:, ::3], numbers]
    for before, after in zip(arrays, box.take(box.post(arrays)), strict=True):
        np.testing.assert_array_equal(before, after)


def test_what_pickle_refuses_is_left_to_ray(name):
    answer = (np.zeros(LEAST_BYTES), lambda: None)
    assert Mailbox.create(name, 2).post(answer) is answer


def test_a_worker_on_another_machine_finds_none(name):
    assert Mailbox.find(name, 2) is None
