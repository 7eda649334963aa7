"""The folder of a comparison: its plan, what was fixed in advance, and every finished cell, each a file of its own."""

from __future__ import annotations

import json
from typing import Any

from themis.experiments.comparison.plan import FREE, Cell
from themis.experiments.folder import PlannedFolder

RATES, CELLS = "rates.json", "cells"


class Folder(PlannedFolder):
    """Where a comparison is kept."""

    work = "comparison"

    def decisive(self, record: dict[str, Any]) -> dict[str, Any]:
        """What decides a campaign: most of the plan's options, and the rest."""
        return {**record, "plan": None, **{name: value for name, value in record["plan"].items() if name not in FREE}}

    def keep(self, cell: Cell, record: dict[str, Any]) -> None:
        """Keep a cell's result, or why it failed."""
        self.write_bytes(f"{CELLS}/{cell.file}", f"{json.dumps(record)}\n".encode())

    def done(self, cells: list[Cell]) -> dict[Cell, dict[str, Any]]:
        """Those of `cells` that have a result; failed ones are tried again."""
        found = {cell: self.read(f"{CELLS}/{cell.file}") for cell in cells}
        return {cell: record for cell, record in found.items() if record is not None and "error" not in record}
