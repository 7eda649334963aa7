"""Which faults of a run, in which order: as SQL."""

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
"""By place and score, faults come in the order in which they are kept: the first `max_stored` have their tensors."""


@dataclass(frozen=True)
class Selection:
    """Faults for which all conditions hold, sorted by a column or, best to look at first, by how telling they are.

    values: of the question marks in the conditions. is_distinct: of each seed and wrong answer the smallest change
    alone, among those that match. limit: None for all.
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
            known = nearest(self.sort, [TELLING, *run.columns])
            raise UsageError(f"faults must be sorted by a column or as {TELLING}, got {self.sort!r}: {known}")

    def count(self, run: Reader) -> int:
        """How many faults match, whatever the limit."""
        [(n,)] = run.select("count(*)", "1", self.values, "1", table=self._table())
        return int(n)

    def rows(self, run: Reader) -> Iterator[list[tuple[Any, ...]]]:
        """The faults in batches, each with the run's columns in their order."""
        what = ", ".join(map(_quoted, run.columns))
        return run.batches(what, "1", self.values, self._order(), self._limit(), self._table())

    def faults(self, run: Reader) -> Faults:
        """The faults as a campaign has them."""
        return run.faults("1", self.values, order=self._order(), limit=self._limit(), table=self._table())

    def _table(self) -> str:
        where = " AND ".join(f"(\n{each}\n)" for each in self.conditions) or "1"  # one may end with a comment
        if not self.is_distinct:
            return f"(SELECT * FROM faults WHERE {where})"
        place = "row_number() OVER (PARTITION BY seed_id, answer ORDER BY distance, id) AS place"
        return f"(SELECT * FROM (SELECT *, {place} FROM faults WHERE {where}) WHERE place = 1)"

    def _order(self) -> str:
        way = "DESC" if self.is_reversed else "ASC"
        if self.sort == TELLING:
            return f"{PLACE} {way}, {SCORE} {way}, id {way}"
        return f"{_quoted(self.sort)} IS NULL, {_quoted(self.sort)} {way}, id {way}"

    def _limit(self) -> int:
        return -1 if self.limit is None else self.limit


def check_condition(run: Reader, condition: str) -> None:
    """Refuse a condition that SQLite does not understand, or cannot work out for some fault."""
    try:
        Selection([condition]).count(run)
    except (StoreError, sqlite3.Warning) as error:
        cause = error.__cause__ or error
        if isinstance(cause, sqlite3.DatabaseError) and not isinstance(
            cause, sqlite3.OperationalError | sqlite3.ProgrammingError
        ):
            raise  # the run cannot be read
        unknown = re.match("no such column: (.+)", str(cause))
        remedy = nearest(unknown[1], run.columns) if unknown else "write it as theta_sigma < 0.1 and answer = 3"
        raise UsageError(
            f"faults must be chosen by an SQL condition over their columns, got {condition!r}, {cause}: {remedy}"
        ) from error


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
