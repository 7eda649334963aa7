"""Cells that square numbers, for tests of the experiment runner; worker processes import them from here."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class NumberCell:
    number: int

    @property
    def file(self):
        return f"{self.number}.json"

    @property
    def group(self):
        return "even" if self.number % 2 == 0 else "odd"

    def __str__(self):
        return f"number {self.number}"


@dataclass(frozen=True)
class Squares:
    """Squares numbers; fails at some of them, ends its process at others, and notes each call in a file."""

    folder: str
    fails_at: tuple[int, ...] = ()
    dies_at: tuple[int, ...] = ()

    def __call__(self):
        return self.run

    def run(self, cell):
        with open(f"{self.folder}/calls.txt", "a") as file:
            file.write(f"{cell.number}\n")
        if cell.number in self.dies_at:
            os._exit(7)
        if cell.number in self.fails_at:
            raise ZeroDivisionError(f"cannot square\n{cell.number}")
        return {"square": cell.number**2}


def unprepared():
    raise OSError("no such model")
