"""May the code that a run folder names be run?

A run folder says how its model and data are made: modules to import, functions to call, files to unpickle. Whoever
wrote the folder chose these names. Reading a folder never follows them. Commands that rebuild the model do, and only if
the folder was made on this machine by this user, or if the user trusts it explicitly.

To tell the difference, the writer of a run signs everything in its record that names code. The secret key is in the
user's state folder, outside all run folders. A folder from elsewhere, or one in which a name was changed, has no valid
signature.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from shlex import quote
from typing import Any

from themis.errors import UsageError
from themis.reading import open_regular

Trusted = bool | str | Path | Sequence[str | Path]
"""What the user trusts: everything (True), nothing (False), or these run folders and files."""

KEY_BYTES = 32
TAG = "tag"
"""The key of the signature in the record of a run."""
SIGNING_CONTEXT = b"themis run folder 1\n"
"""Signed with every record, so that the signature of a run is not valid for anything else."""
SIGNED_SETTINGS = ("policy", "criterion", "judge")
"""Settings that name code."""
SIGNED_START = ("oracle", "oracle_asked")
"""Fields of a campaign's start that may name code."""


class KeyProblem(Exception):  # noqa: N818 - always caught; its text becomes part of a message
    """There is no usable key to sign with; the message says why."""


def state_folder() -> Path:
    """The folder of the user's key: THEMIS_STATE, or `themis` in XDG_STATE_HOME, by default `~/.local/state`."""
    if own := os.environ.get("THEMIS_STATE"):
        return Path(own).absolute()
    shared = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        return (shared if shared.is_absolute() else Path.home() / ".local" / "state") / "themis"
    except RuntimeError as error:  # there is no home folder
        raise KeyProblem("the home folder is unknown, so there is no key: set THEMIS_STATE to a folder") from error


def read_key(*, creates: bool = False) -> bytes:
    """The user's secret key; with `creates`, a missing key is created."""
    folder = state_folder()
    path = folder / "key"
    try:
        if creates and not path.exists():
            _create_key(folder, path)
        with open_regular(path) as file:
            status, key = os.fstat(file.fileno()), file.read(KEY_BYTES + 1)
    except FileNotFoundError as error:
        raise KeyProblem(f"there is no key in {folder}") from error
    except OSError as error:
        raise KeyProblem(f"the key in {folder} cannot be used: {error.strerror or error}") from error
    if len(key) != KEY_BYTES:
        raise KeyProblem(f"the key in {folder} is damaged: remove it, and a new one is made")
    if os.name == "posix" and (status.st_uid != os.geteuid() or status.st_mode & 0o077):
        raise KeyProblem(f"the key in {folder} is open to other users: chmod 600 {path}, or remove it")
    return key


def _create_key(folder: Path, path: Path) -> None:
    """Create a key that only this user can read; if two processes do so at once, the first key is kept."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = folder / f"key.{os.getpid()}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
        file.write(secrets.token_bytes(KEY_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(part, path)  # unlike a rename, never replaces a key; unlike a copy, appears with its content
    except FileExistsError:
        pass
    except OSError:  # a disk without hard links
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def sign(record: dict[str, Any]) -> str:
    """The signature of everything in a record that names code; creates a missing key."""
    return _tag(record, read_key(creates=True))


def _tag(record: dict[str, Any], key: bytes) -> str:
    content = json.dumps(signed_part(record), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hmac.new(key, SIGNING_CONTEXT + content.encode(), sha256).hexdigest()


def signed_part(record: dict[str, Any]) -> dict[str, Any]:
    """The signed part of a record: how the model and the data are made, and every setting that may name a module."""
    settings, start = record.get("settings") or {}, record.get("start") or {}
    return {
        "origin": record.get("origin"),
        "perturbation": [record.get("perturbation"), record.get("perturbation_code")],
        "settings": {name: settings.get(name) for name in SIGNED_SETTINGS},
        "start": {name: start.get(name) for name in SIGNED_START},
    }


def why_not_ours(record: dict[str, Any]) -> str:
    """Why a record cannot be attributed to this user and machine; empty if it can."""
    tag = record.get(TAG)
    if not isinstance(tag, str) or not tag:
        return "it is not signed, as runs of earlier versions and from other places are not"
    try:
        key = read_key()
    except KeyProblem as problem:
        return str(problem)
    if hmac.compare_digest(tag.encode(), _tag(record, key).encode()):
        return ""
    return "it was made by another user or on another machine, or was changed since"


@dataclass(frozen=True)
class Permission:
    """Whether the code that a run folder names may run, and what the user named instead."""

    folder: str
    """The run folder."""
    problem: str
    """Why its code may not run; empty if it may."""
    code: tuple[str, ...] = ()
    """All the code that the folder names, in words."""
    own: frozenset[str] = frozenset()
    """Options that the user gave; the code that they name is the user's own."""
    own_trust: tuple[str, ...] = ()
    """Files that the user trusts."""
    home: str = field(default_factory=os.getcwd)
    """The working directory when the user gave these options."""

    @property
    def is_granted(self) -> bool:
        return not self.problem

    def require(self, code: Iterable[str]) -> None:
        """Refuse to run code that the folder names, unless it may run."""
        named = list(dict.fromkeys(code))
        if not named or self.is_granted:
            return
        listed = ", ".join(dict.fromkeys((*named, *self.code)))
        raise UsageError(
            f"{self.folder} must be trusted before code that it names runs, but {self.problem}: it would run {listed}. "
            f"If you know this code, pass --trust {quote(self.folder)} (trust=True in Python), or name your own with "
            "--model and --data (target and data in Python)"
        )

    def with_own(self, names: Iterable[str], trust: Iterable[str] = ()) -> Permission:
        """This permission with further options that the user gave."""
        return replace(self, own=self.own | frozenset(names), own_trust=(*self.own_trust, *trust))


def permit(path: str | Path, record: dict[str, Any], trusted: Trusted = False) -> Permission:
    """Whether the code that a run folder names may run: the user must trust the folder, or have made it here."""
    problem = "" if is_trusted(path, trusted) else why_not_ours(record)
    files = tuple(os.path.abspath(file) for file in _paths(trusted) if not os.path.isdir(file))
    return Permission(str(path), problem, tuple(recorded_code(record)), own_trust=files)


def is_trusted(path: str | Path, trusted: Trusted) -> bool:
    """Whether the user trusts this path."""
    return trusted is True or os.path.realpath(path) in map(os.path.realpath, _paths(trusted))


def _paths(trusted: Trusted) -> list[str]:
    if isinstance(trusted, bool):
        return []
    return [os.fspath(path) for path in ([trusted] if isinstance(trusted, str | Path) else trusted)]


def _is_model_code(spec: str) -> bool:
    """Whether a model's name chooses the code that builds it: a factory, or a package that downloads what it names."""
    from themis.target.loaders import FILE_LOADERS, PACKAGES

    kind = spec.partition(":")[0]
    if kind in PACKAGES:
        return kind != "keras"
    if ":" in spec:
        return True
    from themis.target.loaders import collection

    return not FILE_LOADERS.is_own(Path(spec).suffix.lower()) and spec not in collection().names


def _is_data_code(spec: str) -> bool:
    """Whether a data name chooses the code that makes the data, or has it downloaded."""
    from themis.data.readers import READERS

    name, _, rest = spec.partition(":")
    return name == "hf" if READERS.is_own(name) else bool(rest)


def _is_oracle_code(spec: str) -> bool:
    from themis.oracle import is_own_oracle

    return is_own_oracle(spec)


_IS_CODE: dict[str, Callable[[str], bool]] = {
    "model": _is_model_code,
    "data": _is_data_code,
    "train": _is_data_code,
    "rivals": _is_model_code,
    "against": _is_model_code,
    "oracle": _is_oracle_code,
}
CODE_OPTIONS = tuple(_IS_CODE)
"""Options of `Origin` that may name code."""


def names_code(option: str, value: Any) -> list[str]:
    """The code that the value of an option of `Origin` names, in words; a list may name several."""
    values = [value] if isinstance(value, str) else value or ()
    return [f"{option} {text!r}" for text in map(str, values) if _IS_CODE[option](text)]


def code_of(values: Mapping[str, Any], names: Iterable[str] = CODE_OPTIONS) -> list[str]:
    """The code that these options of an `Origin` name, in words."""
    return [phrase for name in names for phrase in names_code(name, values.get(name))]


def pickled_files(trust: Iterable[str]) -> list[str]:
    """The files that would be unpickled, in words."""
    from themis.target.loaders.weights import HASH_MARK

    return [f"the pickled file {str(file).partition(HASH_MARK)[0]!r}" for file in trust]


def recorded_code(record: dict[str, Any]) -> list[str]:
    """All the code that the record of a run names, in words."""
    origin, start = record.get("origin") or {}, record.get("start") or {}
    is_zoo = origin.get("zoo") is not None
    code = code_of(origin, [name for name in CODE_OPTIONS if not (is_zoo and name == "model")])
    code += pickled_files(origin.get("trust") or ())
    code += perturbation_code(str(record.get("perturbation")))
    code += [phrase for name in ("oracle_asked", "oracle") for phrase in names_code("oracle", start.get(name))]
    return list(dict.fromkeys(code))


def perturbation_code(spec: str) -> list[str]:
    """The code that the specification of a perturbation names, in words."""
    from themis.perturb import own_perturbations

    return [f"perturbation {name!r}" for name in own_perturbations(spec)]
