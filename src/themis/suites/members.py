"""The run folders of a suite's members, opened together: they share one model and one copy of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property

from themis.data.seeds import Seeds
from themis.errors import UsageError
from themis.runs.replay import Replayer
from themis.runs.store.reader import Reader
from themis.runs.store.schema import DATABASE
from themis.runs.trust import Trusted
from themis.suites.result import SuiteRun
from themis.target.target import AnyTarget

Rebuild = Callable[[Reader], Replayer]
"""Makes the handle of a run folder, such as one with a model that the user named."""


class MemberReplayer(Replayer):
    """The handle of a member's run folder, with the model and the data of another member."""

    def __init__(self, run: Reader, first: Replayer, trust: Trusted = False) -> None:
        super().__init__(run, origin=first.origin, trust=trust)
        self._first = first

    @cached_property
    def target(self) -> AnyTarget:
        self._check_permission()
        return self._first.target

    @cached_property
    def all_seeds(self) -> Seeds:
        self._check_permission()
        return self._first.all_seeds


@contextmanager
def open_members(
    suite: SuiteRun, rebuild: Rebuild | None = None, trust: Trusted = False
) -> Iterator[dict[str, Replayer]]:
    """The run folders of the members that have run, by name. rebuild: makes the first of them."""
    with ExitStack() as stack:
        members: dict[str, Replayer] = {}
        first: Replayer | None = None
        for name in suite.members:
            folder = suite.path / name
            if folder.is_symlink() or not (folder / DATABASE).is_file():
                continue
            run = stack.enter_context(closing(Reader(folder)))
            if first is None:
                first = members[name] = Replayer(run, trust=trust) if rebuild is None else rebuild(run)
            else:
                members[name] = MemberReplayer(run, first, trust)
        if not members:
            raise UsageError(f"a suite must have run a member, but {suite.path} has run none: resume it")
        yield members
