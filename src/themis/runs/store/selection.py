"""Selecting and sorting the faults of a run in SQL."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from themis.errors import StoreError, UsageError, nearest

if TYPE_CHECKING:
    from themis.runs.faults import Faults
    from themis.runs.store.reader import Reader

TELLING = "telling"
SCORE = "distance / max(coalesce(confidence, 1), 1e-6)"
PLACE = f"row_number() OVER (PARTITION BY seed_id, answer ORDER BY {SCORE}, id)"
"""Ordered by place and score, the first `max_stored` faults are those whose tensors are stored."""


@dataclass(frozen=True)
class Selection:
    """Faults that meet all conditions, sorted by a column or by how telling they are, the most telling first.

    values: for the question marks in the conditions. is_distinct: of the faults that match, only the one with the
    smallest change per seed and wrong answer. limit: None for all.
    """

    conditions: Sequence[str] = ()
    values: Sequence[Any] = ()
    is_distinct: bool = False
    sort: str = TELLING
    is_reversed: bool = False
    limit: int | None = None

    def check(self, run: Reader) -> None:
        """Refuse a column that the run does not have."""
        if self.sort != TELLING and self.sort not in run.columns:
            remedy = nearest(self.sort, [TELLING, *run.columns])
            raise UsageError(f"faults must be sorted by a column or by {TELLING!r}, got {self.sort!r}: {remedy}")

    def count(self, run: Reader) -> int:
        """The number of faults that match, regardless of the limit."""
        [(n,)] = run.select("count(*)", "1", self.values, "1", table=self._table())
        return int(n)

    def rows(self, run: Reader) -> Iterator[list[tuple[Any, ...]]]:
        """The faults in batches, each with the columns of the run in order."""
        columns = ", ".join(map(_quoted, run.columns))
        return run.batches(columns, "1", self.values, self._order(), self._limit(), self._table())

    def faults(self, run: Reader) -> Faults:
        """The faults as a campaign returns them."""
        return run.faults("1", self.values, order=self._order(), limit=self._limit(), table=self._table())

    def _table(self) -> str:
        where = " AND ".join(f"(\n{condition}\n)" for condition in self.conditions) or "1"  # one may end with a comment
        if not self.is_distinct:
            return f"(SELECT * FROM faults WHERE {where})"
        place = "row_number() OVER (PARTITION BY seed_id, answer ORDER BY distance, id) AS place"
        return f"(SELECT * FROM (SELECT *, {place} FROM faults WHERE {where}) WHERE place = 1)"

    def _order(self) -> str:
        direction = "DESC" if self.is_reversed else "ASC"
        if self.sort == TELLING:
            return f"{PLACE} {direction}, {SCORE} {direction}, id {direction}"
        return f"{_quoted(self.sort)} IS NULL, {_quoted(self.sort)} {direction}, id {direction}"

    def _limit(self) -> int:
        return -1 if self.limit is None else self.limit


def check_condition(run: Reader, condition: str) -> None:
    """Refuse a condition that SQLite does not understand, or cannot evaluate for some fault."""
    try:
        Selection([condition]).count(run)
    except (StoreError, sqlite3.Warning) as error:
        cause = error.__cause__ or error
        if isinstance(cause, sqlite3.DatabaseError) and not isinstance(
            cause, sqlite3.OperationalError | sqlite3.ProgrammingError
        ):
            raise  # the run cannot be read
        unknown = re.match("no such column: (.+)", str(cause))
        remedy = (
            nearest(unknown[1], run.columns)
            if unknown
            else "write a condition such as theta_sigma < 0.1 and answer = 3"
        )
        raise UsageError(
            f"faults must be selected by an SQL condition on their columns, got {condition!r}, {cause}: {remedy}"
        ) from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
