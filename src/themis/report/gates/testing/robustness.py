"""The fixture: a campaign with gates, as a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from themis.errors import ThemisError, UsageError, nearest
from themis.report.gates.limits import Gates
from themis.report.gates.testing.folders import NOTE, claim, node_id
from themis.report.gates.testing.gating import GATES, check
from themis.report.gates.testing.replaying import noted, replay
from themis.report.gates.testing.words import describe_error, describe_failure, properties_of
from themis.settings import Settings

if TYPE_CHECKING:
    from themis.runs.run import Run

N_TESTS = 2_000
"""Tests of a campaign where nobody says how many: seconds on a small model."""
ARGUMENTS = ("out", "callbacks", "origin", "features", "train", "rivals")
"""What `themis.run` takes beside the settings."""


class Robustness:
    """Runs campaigns for one test. What the command line says wins, then the call, the markers, the ini file."""

    def __init__(
        self,
        item: pytest.Item,
        said: dict[str, Any],
        usual: dict[str, Any],
        folder: Path | None,
        temporary: Callable[[str], Path],
        replays: str | None = None,
    ) -> None:
        self._item, self._said, self._usual, self._folder = item, said, usual, folder
        self._temporary, self._replays, self._calls = temporary, replays, 0

    def __call__(self, target: Any, data: Any, perturbation: Any = None, **options: Any) -> Run:
        """Test `target` on `data` under `perturbation`, as `themis.run` does; fail the test if a gate fails.

        max_fault_rate: the upper end of the fault rate's interval must not exceed it. fail_under: least values, as
        {"coverage": 0.9}. max_new_faults, baseline: faults that the model of the run folder `baseline` does not have.
        Without any gate, one fault fails the test. Other options are those of `themis.run`.
        """
        __tracebackhide__ = True
        try:
            return self._test(target, data, perturbation, options)
        except ThemisError as error:
            message = describe_error(error)
        pytest.fail(message, pytrace=False)

    def of_returned(self, returned: Any) -> None:
        """Test what a marked test has returned."""
        __tracebackhide__ = True
        if not isinstance(returned, tuple) or len(returned) != 2:
            kind = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
            text = f"themis: a test marked robustness must return (target, data), got {kind}: return both, or take the"
            pytest.fail(f"{text} fixture robustness and call it", pytrace=False)
        self(*returned)

    def _test(self, target: Any, data: Any, perturbation: Any, options: dict[str, Any]) -> Run:
        __tracebackhide__ = True
        self._calls += 1
        perturbation, options = self._merged(perturbation, options)
        gates = Gates.of(**{name: options.pop(name) for name in GATES if name in options})
        settings = Settings.of(**{name: value for name, value in options.items() if name not in ARGUMENTS})
        gates.check_ahead(settings.uniform_share)
        is_earlier = self._replays is not None and self._is_earlier(self._replays)
        if self._replays is not None and not is_earlier:
            replay(self._replays, target, data, perturbation)
        run, folder = self._run(target, data, perturbation, options)
        if run.stop_reason == "user":
            raise KeyboardInterrupt  # the campaign has kept what it found; the session stops too
        if is_earlier:
            return run  # the test may need it on its way to the fault
        verdicts = check(run, gates, folder)
        report, why = _write_report(folder) if verdicts.has_failed or self._folder is not None else (None, "")
        self._item.user_properties.extend(properties_of(run, folder, report, self._calls))
        if verdicts.has_failed:
            test = None if options.get("origin") is not None else _typed(self._item)
            pytest.fail(describe_failure(run, verdicts, folder, str(report or why), test), pytrace=False)
        return run

    def _is_earlier(self, replays: str) -> bool:
        """Whether this call comes before the one whose fault is to be run again; skips other tests."""
        note = noted(replays)
        if note is None:
            return False
        if note.get("test") != node_id(self._item):
            pytest.skip("not the test whose fault --themis-replay names")
        return self._calls < int(note.get("call", 1))

    def _merged(self, perturbation: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The perturbation and all options, each from the one nearest to the call who says it."""
        merged: dict[str, Any] = {"max_tests": N_TESTS, **self._usual}
        for marker in reversed(list(self._item.iter_markers("robustness"))):  # the nearest last
            if len(marker.args) > 1:
                raise UsageError(
                    f"the marker robustness must have one argument without a name, the perturbation, got {marker.args}"
                )
            merged |= {**marker.kwargs, **({"perturbation": marker.args[0]} if marker.args else {})}
        merged |= {**options, **({} if perturbation is None else {"perturbation": perturbation}), **self._said}
        chosen = merged.pop("perturbation", None)
        if chosen is None:
            raise UsageError(
                "a robustness test must name its perturbation, got none: robustness(target, data, 'gaussian'), or in "
                "the marker"
            )
        known = {*(each.name for each in fields(Settings)), *ARGUMENTS, *GATES}
        for name in merged:
            if name not in known:
                raise UsageError(f"unknown option {name!r}: {nearest(name, known)}")
        return chosen, merged

    def _run(self, target: Any, data: Any, perturbation: Any, options: dict[str, Any]) -> tuple[Run, Path]:
        from themis.campaign.api import run

        out = options.pop("out", None)
        folder = claim(self._item, self._folder, self._temporary, self._calls) if out is None else Path(out)
        try:
            return run(target, data, perturbation, out=folder, **options), folder
        except ThemisError as error:
            if (folder / "summary.json").exists():
                report, _ = _write_report(folder)
                error.add_note(f"what was found until then: {report or folder}")
            elif out is None and not (folder / "run.sqlite").exists():
                with suppress(OSError):
                    (folder / NOTE).unlink()
                    folder.rmdir()
            raise


def _typed(item: pytest.Item) -> str:
    """A test's name as one types it where the session was started."""
    path = os.path.relpath(item.path, item.config.invocation_params.dir)
    return "::".join([path, *node_id(item).split("::")[1:]])


def _write_report(folder: Path) -> tuple[Path | None, str]:
    """The report's path; None, and why, where it cannot be written: a failing test has more to say than that."""
    try:
        from themis.report.page import write_report

        return write_report(folder), ""
    except Exception as error:
        return None, f"could not be written: {type(error).__name__}: {error}"
