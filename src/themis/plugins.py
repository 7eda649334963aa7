"""Extensions: what other packages add to Themis by entry points, each of which is loaded when it is named.

| group | an entry is |
|---|---|
| `themis.perturbations` | a `Perturbation` |
| `themis.transforms` | a function that returns a `Perturbation`, given a name and the text in the brackets after it |
| `themis.policies` | a subclass of `themis.search.Policy` |
| `themis.criteria` | a subclass of `themis.criteria.Criterion`, such as `themis_lab.criteria.Criterion` |
| `themis.judges` | a function like `themis.judge.coverage.exact` |
| `themis.oracles` | a function that returns an `Oracle`, given the text after the colon |
| `themis.readers` | a function `(path, *, options) -> Seeds` |
| `themis.loaders` | a function that returns a model, given the text after the colon |
| `themis.model_files` | a function `(path, trust) -> model`; its name is the ending of the files, such as `.onnx` |
| `themis.export_files` | a function `(run, batches, path)`; its name is the ending of the files |
| `themis.export_folders` | a function `(run, selection, folder) -> number of faults` |
| `themis.groupings` | a function `(run, most) -> list[Group]`, like `themis.runs.analysis.groups.group` |
| `themis.suites` | a function `(tested, name, options, settings, out, on_grades) -> SuiteRun` that grades a model |
| `themis.executors` | a function that returns a `themis.campaign.setup.Executor`, given options such as `workers` |
| `themis.trackers` | a function `(place, *, run, stays_open) -> themis.report.tracking.Tracker` |
| `themis.reports` | a module whose docstring is the help of `themis report --NAME FOLDER`, with a function `write` |
| `themis.commands` | a module like those of `themis.cli` |
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from themis.errors import UsageError, first_line, warn

T = TypeVar("T")


class Extensible(Mapping[str, T], Generic[T]):
    """A table by name: the entries of Themis itself, and those that packages add to a group of entry points.

    An added entry cannot replace one of Themis itself. Only looking one up loads it.
    """

    def __init__(self, group: str, own: Mapping[str, T]) -> None:
        self.group, self.own = group, own

    def __getitem__(self, name: str) -> T:
        return self.own[name] if name in self.own else self._load(added(self.group)[name])

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in added(self.group)

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in added(self.group) if name not in self.own)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def is_own(self, name: str) -> bool:
        """Whether an entry comes with Themis."""
        return name in self.own or (name in added(self.group) and comes_with_themis(added(self.group)[name]))

    def usable(self) -> dict[str, T]:
        """All entries; one that cannot be loaded is left out with a warning."""
        entries = dict(self.own)
        for name in self:
            if name not in entries:
                try:
                    entries[name] = self[name]
                except UsageError as error:
                    warn(str(error))
        return entries

    def _load(self, entry: EntryPoint) -> T:
        try:
            loaded: T = entry.load()
        except Exception as error:  # its module may raise anything
            raise UsageError(
                f"{entry.name!r} of the package {package_of(entry)} cannot be loaded: {type(error).__name__}: "
                f"{first_line(error)}: update or uninstall the package"
            ) from error
        return loaded


@cache
def added(group: str) -> dict[str, EntryPoint]:
    """The entry points of a group by name, without loading them; those that come with Themis cannot be replaced."""
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        if entry.name not in entries or comes_with_themis(entry):
            entries[entry.name] = entry
    return entries


def comes_with_themis(entry: EntryPoint) -> bool:
    """Whether an entry point is in the distribution of Themis."""
    return package_of(entry) == "themis-dl"


def docstring_of(entry: EntryPoint) -> str:
    """The docstring of an entry's module, whose source is read and not run; empty if it cannot be read."""
    parts, path, loader = entry.module.split("."), None, None
    for k in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: k + 1]), path)
        if spec is None:
            return ""
        path, loader = spec.submodule_search_locations, spec.loader
    try:
        source = loader.get_source(entry.module) if isinstance(loader, SourceFileLoader) else None
        return ast.get_docstring(ast.parse(source or "")) or ""
    except (ImportError, SyntaxError, ValueError):
        return ""


def package_of(entry: EntryPoint) -> str:
    """The name of the package that an entry point comes from."""
    return "unknown" if entry.dist is None else entry.dist.name
