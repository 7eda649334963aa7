"""Change the record of a run folder, with or without signing it again as its writer would."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from themis.runs.trust import TAG, sign


def read_record(folder):
    with closing(sqlite3.connect(Path(folder) / "run.sqlite")) as database:
        return {name: json.loads(value) for name, value in database.execute("SELECT name, value FROM run")}


def change_record(folder, *, signed=False, **values):
    """Replace parts of the record; `signed`: as if this user had written them."""
    record = read_record(folder) | values
    if signed:
        record[TAG] = sign(record)
    with closing(sqlite3.connect(Path(folder) / "run.sqlite")) as database, database:
        rows = [(name, json.dumps(value)) for name, value in record.items()]
        database.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", rows)
