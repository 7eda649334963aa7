"""The folder of a suite: `suite.json`, one run folder per member, and the report.

The rules of run folders apply: there is one writer, only files of Themis are replaced, and no link is followed.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from themis.errors import StoreError, UsageError
from themis.reading import (
    anything,
    check_form,
    items,
    number,
    one_of,
    optional,
    parse_json,
    read_regular,
    record,
    text,
    values_of,
    whole,
)
from themis.runs.fault import MAX_TESTS
from themis.runs.store import files
from themis.runs.store.reader import folders_with, name_folders
from themis.runs.store.schema import HASH_FORM, MAX_JSON, damage_explained
from themis.runs.trust import TAG, KeyProblem, sign
from themis.settings import VERDICTS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from themis.campaign.setup import TestedModel
    from themis.measure.calculator import Calculator

SUITE_FILE, LOCK_FILE, REPORT_FILE = "suite.json", "suite.lock", "report.html"
SCHEMA_VERSION = 1
GATES_FILE = "gates.json"
RESERVED = (SUITE_FILE, LOCK_FILE, REPORT_FILE, GATES_FILE)
"""Names that are not allowed for members."""

_NAME = text(200, r"[\w.-]+", "a name of letters, digits, _, - and .")
_COUNT = whole(0, MAX_TESTS * 100)
_BITS = text(MAX_JSON, "[A-Za-z0-9+/=]*", "bits in base64")
_GRADE = record(
    {
        "level": text(1000),
        "seeds": whole(1, MAX_TESTS),
        "errors": _COUNT,
        "passes": _COUNT,
        "score": optional(number()),
        "score_name": text(100),
        "wrong": _BITS,
    }
)
_MEMBER = record(
    {
        "name": _NAME,
        "perturb": text(10_000),
        "magnitude": optional(number(0)),
        "weight": number(0),
        "max_tests": optional(whole(1, MAX_TESTS)),
        "levels": items(anything),
        "note": text(10_000),
        "range": text(10_000),
    }
)
_STEP = record({"member": _NAME, "max_tests": whole(1, MAX_TESTS), "reason": text(100)})
_DECISION = record(
    {
        "claim": text(1000),
        "looks": whole(1, 100),
        "verdict": one_of(*VERDICTS),
        "seeds": whole(0, MAX_TESTS),
        "passes": _COUNT,
        "figure": optional(record({"value": number(0), "low": number(), "high": number()})),
    }
)
SUITE_FORM = record(
    {
        "schema": whole(1, 1),
        "name": text(1000),
        "members": items(_MEMBER),
        "options": record({"max_tests": whole(1, MAX_TESTS), "share": number(0, 1)}),
        "settings": record({}),
        "origin": optional(record({})),
        "environment": record({"model_sha256": HASH_FORM, "data_sha256": HASH_FORM, "threads": whole(1, 1 << 16)}),
        "schedule": items(_STEP),
        "state": one_of("running", "ended", "interrupted", "out of time", "failed"),
        "passes": _COUNT,
        "seconds": number(0),
        "grades": values_of(items(_GRADE)),
        "clean": optional(_GRADE),
        "notes": items(text(10_000)),
        "perturbation": text(1_000_000),
        "fault": text(1000),
    },
    {"graded": HASH_FORM, "decision": optional(_DECISION)},
)


class SuiteFolder:
    """The folder of a running suite, locked for one writer."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        names = files.list_folder(self.path)
        is_begun = is_suite(self.path) or (names == [LOCK_FILE] and files.was_signed(self.path / LOCK_FILE))
        if names and not is_begun:
            raise files.refuse_folder(self.path, names, ", or the folder of a suite")
        files.refuse_links(self.path, *RESERVED)
        self._claim = files.Claim(self.path, (), LOCK_FILE)
        self._claim.is_begun = (self.path / SUITE_FILE).exists()
        files.remove_leftovers(self.path)

    def member(self, name: str) -> Path:
        """The run folder of a member, which must not be a link."""
        files.refuse_links(self.path, name)
        return self.path / name

    def read(self) -> dict[str, Any] | None:
        """The stored suite; None if there is none yet."""
        return read_record(self.path) if (self.path / SUITE_FILE).exists() else None

    def write(self, content: dict[str, Any]) -> None:
        """Replace `suite.json`."""
        if not self._claim.is_held:
            raise StoreError(f"{self.path} was deleted or moved while its suite was running: start it again")
        files.refuse_links(self.path, SUITE_FILE)
        plain = {**files.made_by("suite"), "schema": SCHEMA_VERSION, **content}
        with files.explained(self.path / SUITE_FILE, is_run=True):
            files.write_file(self.path / SUITE_FILE, files.as_json(plain, indent=1))
        self._claim.is_begun = True

    def close(self) -> None:
        """Release the folder; if nothing was stored, remove what this object created."""
        self._claim.release()


def is_suite(path: str | Path) -> bool:
    """Whether a folder has a `suite.json` with the mark of Themis."""
    file = Path(path) / SUITE_FILE
    try:
        return file.is_file() and not file.is_symlink() and files.has_mark(file)
    except OSError:
        return False


def name_suites(path: str | Path) -> str:
    """The problem with a folder that contains suites but is not one, for an error message; empty without suites."""
    suites = [folder for folder in folders_with(Path(path), SUITE_FILE) if is_suite(folder)]
    return f"is a folder of suites: name one of them ({name_folders(suites)})" if suites else ""


def is_running(path: str | Path) -> bool:
    """Whether a process is running the suite; True if locks do not work."""
    return files.is_locked(Path(path) / LOCK_FILE) is not False


def read_record(path: str | Path) -> dict[str, Any]:
    """Read and check the content of `suite.json`."""
    file = Path(path) / SUITE_FILE
    if not is_suite(path):
        problem = name_suites(path) or "is not one: check the path"
        raise UsageError(f"a suite must be a folder with {SUITE_FILE}, but {path} {problem}")
    try:
        content: dict[str, Any] = parse_json(read_regular(file, MAX_JSON))
    except OSError as error:
        raise StoreError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"{file} must be JSON, but it is damaged: {error}; restore it from a copy") from error
    with damage_explained(file):
        check_form(content, SUITE_FORM, "the suite")
        names = [member["name"] for member in content["members"]]
        if len(set(names)) < len(names) or any(name in RESERVED or name.strip(".") == "" for name in names):
            raise ValueError("its members must have different names, which are no files of the suite")
        if any(step["member"] not in names for step in content["schedule"]):
            raise ValueError("its schedule must name members of the suite")
        if any(name not in names for name in content["grades"]):
            raise ValueError("its grades must be of members of the suite")
        levels = [grade for grades in content["grades"].values() for grade in grades]
        for grade in [*levels, *([content["clean"]] if content["clean"] else [])]:
            if unpack(grade["wrong"], grade["seeds"]).sum() != grade["errors"]:
                raise ValueError("its grades must have as many wrong answers as errors")
    return content


def new_record(
    tested: TestedModel, environment: dict[str, Any], calculator: Calculator, stated: dict[str, Any]
) -> dict[str, Any]:
    """The content of `suite.json` before the first test. stated: the part that the user's request determines."""
    return {
        **stated,
        "origin": None if tested.origin is None else tested.origin.as_dict(),
        "perturbation_code": None,
        "environment": environment,
        "classes": None if tested.class_names is None else list(tested.class_names),
        "fault": calculator.clean.oracle.describe(),
        "schedule": [],
        "state": "running",
        "passes": calculator.passes,
        "seconds": 0.0,
        "clean": None,
        "grades": {},
    }


def pack(flags: NDArray[np.int64]) -> str:
    """Encode ones and zeros as text, one bit per value."""
    import numpy as np

    return base64.b64encode(np.packbits(flags.astype(bool)).tobytes()).decode()


def unpack(text: str, n: int) -> NDArray[np.int64]:
    """Decode `n` ones and zeros from text."""
    import numpy as np

    bits = np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8)
    if len(bits) != -(-n // 8):
        raise ValueError(f"the wrong answers of {n} seeds must have a bit for each")
    return np.unpackbits(bits, count=n).astype(np.int64)


def signed(content: dict[str, Any]) -> dict[str, Any]:
    """The content with a signature of everything that names code, which resuming needs; unsigned without a key."""
    try:
        return {**content, TAG: sign(content)}
    except KeyProblem:
        return content
