"""The pytest plugin: robustness tests among a project's own. Until one runs, nothing but this file is imported."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator
from functools import wraps
from math import isfinite
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from themis.report.gates.testing.robustness import Robustness

NAME = "robustness"
"""Of the fixture and of the marker."""
MARKER = (
    f"{NAME}(perturbation, *, max_fault_rate, ..., **options): the test returns (target, data), which must stand up to "
    f"the perturbation; of a test that takes the fixture {NAME}, what it does not say itself"
)
RETURNED = pytest.StashKey[list[Any]]()


def _number(kind: type[int] | type[float], least: float) -> Callable[[str], Any]:
    """A converter that refuses what is no number of this kind, or too small."""
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
    "max_tests": (_number(int, 1), "N", "tests that a campaign may run"),
    "max_seconds": (_number(float, 1), "S", "seconds that a campaign may take"),
    "random_seed": (_number(int, 0), "N", "random seed of the campaigns"),
}
"""Options that the command line and the ini file may set: converter, name of the value, help."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("themis", "robustness tests (themis)")
    for name, (convert, value, text) in BUDGETS.items():
        flag = f"--themis-{name.replace('_', '-')}"
        group.addoption(flag, type=convert, metavar=value, help=f"{text}, whatever the test says")
        parser.addini(f"themis_{name}", f"{text}, where the test does not say it", default="")
    text = "keep the run folder and the report of every robustness test here"
    group.addoption("--themis-report", metavar="DIR", help=f"{text}, those that pass too")
    parser.addini("themis_report", text, default="")
    text = "run this one fault again instead of the campaign that found it, as a failing test's message says"
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
    if config.option.themis_report:  # workers of xdist may have another working folder
        config.option.themis_report = str(config.invocation_params.dir / config.option.themis_report)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give marked tests the fixture, and tests with the fixture the mark: `-m 'not robustness'` leaves out both."""
    for item in items:
        names = getattr(item, "fixturenames", ())
        if NAME not in names:
            if item.get_closest_marker(NAME) is None or not isinstance(names, list):
                continue
            _refuse_unittest(item)
            names.append(NAME)
            item.stash[RETURNED] = []
        elif item.get_closest_marker(NAME) is None:
            item.add_marker(NAME)
        if config.option.themis_skip:
            item.add_marker(pytest.mark.skip(reason="robustness test (--themis-skip)"))


def _refuse_unittest(item: pytest.Item) -> None:
    """A method of a TestCase would pass untested: nobody sees what it returns."""
    unittest, kind = sys.modules.get("unittest"), getattr(item, "cls", None)
    if unittest is not None and kind is not None and issubclass(kind, unittest.TestCase):
        raise pytest.UsageError(
            f"the marker {NAME} must be on a plain test, {item.nodeid} is a unittest method, whose result is dropped: "
            "write a function"
        )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A marked test without the fixture returns what is to be tested."""
    if RETURNED not in pyfuncitem.stash:
        return (yield)
    returned, test = pyfuncitem.stash[RETURNED], pyfuncitem.obj

    @wraps(test)
    def caught(*values: Any, **named: Any) -> None:
        __tracebackhide__ = True
        returned[:] = [test(*values, **named)]

    pyfuncitem.obj = caught
    try:
        result = yield
    finally:
        pyfuncitem.obj = test
    given: Any = pyfuncitem.funcargs[NAME]
    given.of_returned(returned.pop() if returned else None)
    return result


@pytest.fixture
def robustness(request: pytest.FixtureRequest) -> Robustness:
    """A campaign with gates: `robustness(target, data, "gaussian", magnitude=0.1, max_fault_rate=0.05)`.

    The test fails if a gate does; without any gate, if there is a fault. Gives the run back.
    """
    from themis.report.gates.testing.robustness import Robustness

    config, option = request.config, request.config.option
    said = {name: getattr(option, f"themis_{name}") for name in BUDGETS}
    usual = {name: config.getini(f"themis_{name}") for name in BUDGETS}
    folder = option.themis_report or config.getini("themis_report")
    return Robustness(
        item=request.node,
        said={name: value for name, value in said.items() if value is not None},
        usual={name: BUDGETS[name][0](text) for name, text in usual.items() if text},
        folder=None if not folder else config.rootpath / folder,
        temporary=lambda name: request.getfixturevalue("tmp_path_factory").mktemp(name),
        replays=option.themis_replay,
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What robustness tests found, those that passed too, where one asks for more than dots or for the reports."""
    if config.option.verbose < 1 and not (config.option.themis_report or config.getini("themis_report")):
        return
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
    found = [(each.nodeid, dict(each.user_properties)) for each in reports if each.when == "call"]
    found = [(nodeid, properties) for nodeid, properties in found if "themis_tests" in properties]
    if found:
        from themis.report.gates.testing.words import describe_properties

        terminalreporter.section("themis: robustness")
        for nodeid, properties in found:
            for line in (nodeid, *describe_properties(properties)):
                terminalreporter.write_line(line)
