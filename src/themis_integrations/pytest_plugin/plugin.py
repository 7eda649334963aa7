"""The pytest plugin for robustness tests in a project's test suite. Nothing else is imported until such a test runs."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any

import pytest

import themis  # noqa: F401  (it sets how MKL and CUDA compute, which they read when a test first uses them)

if TYPE_CHECKING:
    from themis_integrations.pytest_plugin.robustness import RobustnessTest

FIXTURE = "robustness"
"""Name of the fixture and of the marker."""
MARKER = (
    f"{FIXTURE}(perturbation, *, max_fault_rate, ..., **options): run a campaign on the (target, data) that the test "
    f"returns; in a test that uses the {FIXTURE} fixture, set the defaults of its calls"
)
RETURNED = pytest.StashKey[list[Any]]()
PREFIX = "themis_"
"""How the names of the properties of a test begin."""


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], Any]:
    """Return a converter of text to numbers of this kind, which refuses other text and numbers that are too small."""
    rule = f"must be a {'whole ' if kind is int else ''}number{' above 0' if least else ', 0 or more'}"

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{rule}, got {text!r}") from None
        if not (isfinite(value) and value >= 0 and (value > 0 or not least)):
            raise ArgumentTypeError(f"{rule}, got {text!r}")
        return value

    return convert


BUDGETS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "max_tests": (_number(int, 1), "N", "maximum number of tests per campaign"),
    "max_seconds": (_number(float, 1), "S", "maximum duration of a campaign in seconds"),
    "random_seed": (_number(int, 0), "N", "random seed of the campaigns"),
}
"""Options on the command line and in the ini file: converter, name of the value, help."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("themis", "robustness tests (themis)")
    for name, (convert, value, text) in BUDGETS.items():
        flag = f"--themis-{name.replace('_', '-')}"
        group.addoption(flag, type=convert, metavar=value, help=f"{text}; overrides the test")
        parser.addini(f"themis_{name}", f"{text}, unless the test sets it", default="")
    text = "keep the run folder and the report of every robustness test, including passing ones, in this folder"
    group.addoption("--themis-report", metavar="DIR", help=text)
    parser.addini("themis_report", text, default="")
    text = "replay this fault instead of running the campaign that found it; failing tests print the value"
    group.addoption("--themis-replay", metavar="RUN:FAULT", help=text)
    group.addoption("--themis-skip", action="store_true", help="skip robustness tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    for name, (convert, _, _) in BUDGETS.items():
        try:
            text = config.getini(f"themis_{name}")
            if text:
                convert(text)
        except ArgumentTypeError as error:
            raise pytest.UsageError(f"themis_{name} in {config.inipath} {error}") from None
    if config.option.themis_report:  # xdist workers may have another working directory
        config.option.themis_report = str(config.invocation_params.dir / config.option.themis_report)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the fixture to marked tests and the marker to tests with the fixture: `-m robustness` selects both."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if FIXTURE not in names:
            if item.get_closest_marker(FIXTURE) is None or not isinstance(names, list):
                continue
            _refuse_unittest(item)
            names.append(FIXTURE)
            item.stash[RETURNED] = []
        elif item.get_closest_marker(FIXTURE) is None:
            item.add_marker(FIXTURE)
        if config.option.themis_skip:
            item.add_marker(pytest.mark.skip(reason="robustness test (--themis-skip)"))


def _refuse_unittest(item: pytest.Item) -> None:
    """Refuse a method of a TestCase: unittest drops its return value, so it would always pass."""
    unittest, kind = sys.modules.get("unittest"), getattr(item, "cls", None)
    if unittest is not None and kind is not None and issubclass(kind, unittest.TestCase):
        raise pytest.UsageError(
            f"the {FIXTURE} marker needs a plain test, but {item.nodeid} is a unittest method and its return value is "
            "lost: write a function"
        )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run the campaign that a marked test without the fixture returns."""
    if RETURNED not in pyfuncitem.stash:
        return (yield)
    returned, test = pyfuncitem.stash[RETURNED], pyfuncitem.obj

    @wraps(test)
    def capture(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        returned[:] = [test(*args, **kwargs)]

    pyfuncitem.obj = capture
    try:
        result = yield
    finally:
        pyfuncitem.obj = test
    fixture: Any = pyfuncitem.funcargs[FIXTURE]
    fixture.check_returned(returned.pop() if returned else None)
    return result


@pytest.fixture
def robustness(request: pytest.FixtureRequest) -> RobustnessTest:
    """Run a campaign with gates: `robustness(target, data, "gaussian", magnitude=0.1, max_fault_rate=0.05)`.

    The test fails if a gate fails or, without gates, if a fault is found. Returns the run.
    """
    from themis_integrations.pytest_plugin.robustness import RobustnessTest

    config, option = request.config, request.config.option
    overrides = {name: getattr(option, f"themis_{name}") for name in BUDGETS}
    defaults = {name: config.getini(f"themis_{name}") for name in BUDGETS}
    folder = option.themis_report or config.getini("themis_report")
    return RobustnessTest(
        item=request.node,
        overrides={name: value for name, value in overrides.items() if value is not None},
        defaults={name: BUDGETS[name][0](text) for name, text in defaults.items() if text},
        folder=None if not folder else config.rootpath / folder,
        temporary=lambda name: request.getfixturevalue("tmp_path_factory").mktemp(name),
        replay=option.themis_replay,
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """List the campaigns of all robustness tests, with -v or --themis-report."""
    if config.option.verbose < 1 and not (config.option.themis_report or config.getini("themis_report")):
        return
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    tests = [(report.nodeid, dict(report.user_properties)) for report in reports if report.when == "call"]
    tests = [(nodeid, properties) for nodeid, properties in tests if "themis_tests" in properties]
    if tests:
        terminalreporter.section("themis: robustness")
        for nodeid, properties in tests:
            for line in (nodeid, *describe_properties(properties)):
                terminalreporter.write_line(line)


def describe_properties(properties: dict[str, Any]) -> list[str]:
    """Two lines per campaign of a test."""
    from themis.text import percent

    lines = []
    for call in range(1, 1 + sum(name.startswith(f"{PREFIX}tests") for name in properties)):
        ending = "" if call == 1 else f"_{call}"
        names = [name for name in properties if re.fullmatch(rf"{PREFIX}\D+{ending}", name)]
        values = {name.removeprefix(PREFIX).removesuffix(ending): properties[name] for name in names}
        rates = "unknown"
        if "fault_rate" in values:
            ends = (percent(values[f"fault_rate{end}"], 2) for end in ("", "_low", "_high"))
            rates = "{} (95%: {} to {})".format(*ends)
        coverage = f", coverage {percent(values['coverage'])}" if "coverage" in values else ""
        lines.append(f"  {values['perturbation']}, fault rate {rates}{coverage}, {values['tests']:,} tests")
        lines.append(f"  {values['stop']} See {values.get('report') or values['run']}")
    return lines
