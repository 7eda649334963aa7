"""One fault again, with the model and the data that its test makes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from themis.errors import UsageError
from themis.report.gates.testing.folders import read_note
from themis.report.gates.testing.words import describe_answer, describe_fault


def noted(named: str) -> dict[str, Any] | None:
    """Which call of which test found a fault, given as RUN:FAULT; None where its folder does not say."""
    return read_note(_split(named)[0])


def replay(named: str, target: Any, data: Any, perturbation: Any) -> None:
    """Run a fault again; the test fails if it is still one, and is skipped if it is not."""
    __tracebackhide__ = True
    from themis.perturb import Perturbation
    from themis.runs.replay import Replayer
    from themis.runs.store.reader import Reader
    from themis.target.target import as_target

    folder, id = _split(named)
    given = perturbation if isinstance(perturbation, Perturbation) else None
    with closing(Reader(folder)) as run:
        found = run.faults("id = ?", (id,))
        if not len(found):
            raise UsageError(f"--themis-replay must name a fault of the run, got {id}: see themis faults {folder}")
        fault = found[0]
        replayed = Replayer(run, as_target(target), data, given).replay(fault)
    now = describe_answer(replayed.answer, replayed.value, replayed.confidence)
    state = "still a fault" if replayed.is_fault else "no longer a fault"
    exact = ", as it was recorded" if replayed.is_same else ""
    changes = "" if not replayed.changes else f"\nnot as when the run began: {'; '.join(replayed.changes)}"
    text = f"{state}: now answered as {now}{exact}\n{describe_fault(fault)}{changes}"
    if replayed.is_fault:
        pytest.fail(text, pytrace=False)
    pytest.skip(text)


def _split(named: str) -> tuple[Path, int]:
    folder, _, id = named.rpartition(":")
    if not folder or not id.isdecimal():
        raise UsageError(f"--themis-replay must be RUN:FAULT, as runs/first:1204, got {named!r}")
    return Path(folder), int(id)
