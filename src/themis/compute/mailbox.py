"""Large answers of a worker to its driver, through memory that the two share if they are on one machine.

Through the object store of Ray, an answer waits for a process of Ray to make room for it: several milliseconds while
all cores are busy.
"""

from __future__ import annotations

import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from themis.compute.shared_memory import find_memory

SLOT_BYTES = 1 << 28
"""The largest answer; pages that nobody writes to take no memory."""
LEAST_BYTES = 1 << 16
"""The smallest answer that is worth it: Ray sends smaller ones along with its messages."""


@dataclass(frozen=True)
class Letter:
    """An answer whose arrays are in the memory of a mailbox."""

    pickled: bytes
    slot: int
    sizes: tuple[int, ...]
    """Bytes of each array."""


class Mailbox:
    """Memory for the last answers of one worker: each takes the next slot, so one is overwritten `n_slots` later."""

    def __init__(self, file: int, n_slots: int) -> None:
        finalize(self, os.close, file)  # it stays open, so that the worker finds it
        self._memory = memoryview(mmap.mmap(file, n_slots * SLOT_BYTES))
        self._n_slots, self._n_posted = n_slots, 0

    @staticmethod
    def create(name: str, n_slots: int) -> Mailbox | None:
        """A mailbox that a worker can find by its name; None if this system has no such memory."""
        if not hasattr(os, "memfd_create"):
            return None
        file = os.memfd_create(name)
        os.truncate(file, n_slots * SLOT_BYTES)
        return Mailbox(file, n_slots)

    @staticmethod
    def find(name: str, n_slots: int) -> Mailbox | None:
        """The mailbox of this name; None if its driver is on another machine."""
        file = find_memory(name)
        return None if file is None else Mailbox(file, n_slots)

    def post(self, answer: Any) -> Any:
        """The answer as it is sent: a letter, or itself if it is small or too large."""
        arrays: list[pickle.PickleBuffer] = []
        try:
            pickled = pickle.dumps(answer, protocol=5, buffer_callback=arrays.append)
        except (pickle.PicklingError, AttributeError, TypeError):  # Ray can pickle more
            return answer
        views = [array.raw() for array in arrays]
        if not LEAST_BYTES <= sum(view.nbytes for view in views) <= SLOT_BYTES:
            return answer
        slot, self._n_posted = self._n_posted % self._n_slots, self._n_posted + 1
        first = slot * SLOT_BYTES
        for view in views:
            self._memory[first : first + view.nbytes] = view
            first += view.nbytes
        return Letter(pickled, slot, tuple(view.nbytes for view in views))

    def take(self, letter: Letter) -> Any:
        """The answer in a letter, copied, so that its slot can be used again."""
        first, total = letter.slot * SLOT_BYTES, sum(letter.sizes)
        copied = memoryview(bytearray(self._memory[first : first + total]))
        arrays, first = [], 0
        for size in letter.sizes:
            arrays.append(copied[first : first + size])
            first += size
        return pickle.loads(letter.pickled, buffers=arrays)
