"""Code of the user's own, named as `module:name`: where its module is looked up, and what cannot be named.

Modules are looked up in the environment first and in the folder that the names refer to last. A file that happens to
lie beside a model can therefore not take the place of an installed package, and the folder is not searched at all
unless code of the user's own is named.
"""

import importlib
import logging
import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

from themis.errors import ThemisError, UsageError, first_line, nearest

WHERE = "modules are looked up in the environment and then in the working directory"
"""What a message says of a module that is not found."""
LOG = logging.getLogger("themis")
"""Says from where a module of the user's own was imported; the command line prints it."""

_folders: ContextVar[tuple[str, ...]] = ContextVar("folders", default=())
_added: list[str] = []
_announced: set[str] = set()


@contextmanager
def looked_up_in(*folders: str) -> Iterator[None]:
    """Look up modules in these folders too, after all others, if code of the user's own is named in this block."""
    token = _folders.set(folders)
    try:
        yield
    finally:
        _folders.reset(token)


def make_importable() -> None:
    """Append the folders of `looked_up_in` to the module search path, where they stay: modules may import late."""
    new = [folder for folder in _folders.get() if folder not in sys.path or folder in _added]
    _added[:] = [*new, *(folder for folder in _added if folder not in new)]
    kept = [folder for folder in _added if folder in new or folder in sys.path]
    sys.path[:] = [*(entry for entry in sys.path if entry not in _added), *kept]


def import_named(
    module: str, names: Sequence[str], label: str, remedy: str = WHERE, failure: type[ThemisError] = UsageError
) -> Any:
    """Return an attribute of a module of the user's own; `label` says in an error how it was given.

    remedy: what to do if there is no such module. failure: the error if the module raises one.
    """
    _refuse_standard(module, label)
    make_importable()
    try:
        found: Any = importlib.import_module(module)
        _announce(module)
        for name in names:
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{label}: {error}; {remedy}") from error
    except AttributeError as error:
        known = [key for key in getattr(sys.modules.get(module), "__dict__", {}) if not key.startswith("_")]
        raise UsageError(f"{label}: {error}: {nearest('.'.join(names), known)}{describe_location(module)}") from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything when it is imported
        raise failure(f"{label}: importing it raised {type(error).__name__}: {first_line(error)}") from error
    if isinstance(found, FunctionType | BuiltinFunctionType | type):
        _refuse_standard(str(found.__module__), label)
    return found


def describe_location(module: str) -> str:
    """Where an imported module comes from, if it hides one of the same name in the folder of the user."""
    file = getattr(sys.modules.get(module), "__file__", None)
    top = module.partition(".")[0]
    for folder in _folders.get():
        is_here = any((Path(folder) / name).exists() for name in (f"{top}.py", top))
        if is_here and file is not None and not Path(file).is_relative_to(folder):
            return f"; {file} comes before the {top} in {folder}: rename yours"
    return ""


@contextmanager
def imported_anew(folder: str) -> Iterator[None]:
    """Import the modules of a folder from there, even if modules of the same names were imported from elsewhere.

    Installed packages still come first, and what was imported before is in place again after the block.
    """
    home, path, modules = Path(folder).resolve(), list(sys.path), dict(sys.modules)
    installed = [*_installed_folders()]
    for name, module in modules.items():
        top, file = name.partition(".")[0], getattr(module, "__file__", None)
        is_here = (home / f"{top}.py").is_file() or (home / top / "__init__.py").is_file()
        if is_here and file is not None and top != "themis" and not _is_in(file, (home, *installed)):
            del sys.modules[name]
    first = [entry for entry in path if entry and Path(entry).resolve() in installed]
    sys.path[:] = [*first, str(home), *(entry for entry in path if entry not in (*first, str(home)))]
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.update(modules)


def _is_in(file: str, folders: Sequence[Path]) -> bool:
    return any(Path(file).resolve().is_relative_to(folder) for folder in folders)


def _installed_folders() -> Iterator[Path]:
    """Where the packages of the environment and the standard library are."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    places = [sysconfig.get_paths()[name] for name in names]
    for place in (*places, *site.getsitepackages(), site.getusersitepackages()):
        yield Path(place).resolve()
    yield Path(sysconfig.get_paths()["stdlib"], "lib-dynload").resolve()


@contextmanager
def working_in(folder: str) -> Iterator[None]:
    """Change to a folder for the time being; relative entries of the module search path stay what they were."""
    before = os.getcwd()
    entries = [] if folder == before else [entry for entry in sys.path if not os.path.isabs(entry)]
    relative = {os.path.join(before, entry or "."): entry for entry in entries}
    for absolute, entry in relative.items():
        sys.path[sys.path.index(entry)] = absolute
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        for absolute, entry in relative.items():
            if absolute in sys.path:
                sys.path[sys.path.index(absolute)] = entry


def _refuse_standard(module: str, label: str) -> None:
    """Refuse functions of Python itself: `os:system('...')` would be a command, not a model."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        raise UsageError(
            f"{label} must name code of your own, {top} is a module of Python's standard library, whose functions are "
            "not called: write a function in a module with another name"
        )


def _announce(module: str) -> None:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or file in _announced:
        return
    if any(Path(file).is_relative_to(folder) for folder in _added):
        _announced.add(file)
        LOG.info("imported %s from %s", module, file)
