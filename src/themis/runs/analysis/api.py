"""Comparing two runs, or their folders."""

from __future__ import annotations

from themis.runs.analysis.compare import NEW_TESTS, DiffOptions, Side, diff_runs
from themis.runs.analysis.diff import Diff
from themis.runs.replay import AnyRun, as_run
from themis.runs.trust import Trusted


def diff(
    before: AnyRun,
    after: AnyRun,
    *,
    kind: str = "auto",
    tests: int = NEW_TESTS,
    random_seed: int = 0,
    trust: Trusted = False,
) -> Diff:
    """Compare two runs.

    Args:
        before: The first run, as `themis.run` or `themis.open_run` returned it, or its folder.
        after: The second run.
        kind: `versions` replays the faults of both runs, and new tests, on both models; `techniques` compares what two
            runs found on one model; `auto` is `techniques` if both tested the same model.
        tests: Number of new tests.
        random_seed: The same seed gives the same new tests.
        trust: Folders whose code may run although they were not made on this machine by this user; True for both.
    """
    first, second = Side(as_run(before, trust), "the first run"), Side(as_run(after, trust), "the second run")
    return diff_runs(first, second, DiffOptions(kind, tests, random_seed))
