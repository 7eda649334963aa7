"""The statement about a folder of evidence, which can be signed, its checksums, and checks for changes."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from themis.errors import UsageError
from themis.reading import open_regular, parse_json, read_regular
from themis.runs.store.files import as_json
from themis.runs.store.schema import MAX_JSON

CARD, BOM, PAGE = "model-card.md", "bom.cdx.json", "report.html"
SUMMARY, SETTINGS, ENVIRONMENT, GATES = "summary.json", "settings.json", "environment.json", "gates.json"
STATEMENT, SUMS = "statement.json", "SHA256SUMS"
SUBJECTS, CONFIGURATION = (SUMMARY, CARD, BOM, PAGE, GATES), (SETTINGS, ENVIRONMENT)
"""The files that the statement is about, and those that say how they came about."""
FILES = (*SUBJECTS, *CONFIGURATION, STATEMENT, SUMS)
"""All files of evidence; only the record of gates may be absent."""
CAMPAIGN, NO_LIMITS = "campaign", "no limits were set"
"""The gate that every run has, and what stands for a test if it is the only one."""
TENSORS = {
    "model": "all named parameters and buffers, in order, as Themis hashes them",
    "data": "inputs, labels and seed ids, as Themis hashes them",
    "weights": "the file of the weights",
}
"""What else the statement has hashes of, besides the files of the folder."""


def make_statement(
    environment: Mapping[str, Any], gates: Mapping[str, Any] | None, digests: Mapping[str, str]
) -> bytes:
    """The in-toto statement: the files of evidence, the model and data, and whether the gates pass.

    environment: with the hashes of model, data and weights. digests: the SHA-256 of each file, by name.
    """
    rows = [] if gates is None else gates["rows"]
    has_limits = any(row["gate"] != CAMPAIGN for row in rows)
    passed, failed = ([row["gate"] for row in rows if row["has_passed"] is has_passed] for has_passed in (True, False))
    result = "FAILED" if failed else "PASSED" if has_limits else "WARNED"
    tested = [
        {"name": name, "digest": {"sha256": environment[f"{name}_sha256"]}, "annotations": {"content": content}}
        for name, content in TENSORS.items()
        if environment.get(f"{name}_sha256")
    ]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [*tested, *_described(SUBJECTS, digests)],
        "predicateType": "https://in-toto.io/attestation/test-result/v0.1",
        "predicate": {
            "result": result,
            "configuration": _described(CONFIGURATION, digests),
            "passedTests": passed,
            "warnedTests": [] if has_limits else [NO_LIMITS],
            "failedTests": failed,
        },
    }
    return as_json(statement, indent=2)


def _described(names: tuple[str, ...], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": digests[name]}} for name in names if name in digests]


def make_sums(digests: Mapping[str, str]) -> bytes:
    """Checksums as `sha256sum --check` reads them."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())).encode()


def hash_bytes(content: bytes) -> str:
    """The SHA-256 of the content of a file."""
    return hashlib.sha256(content).hexdigest()


def verify_evidence(folder: str | Path) -> dict[str, str]:
    """The files of a folder of evidence that have been changed, removed or added since it was written.

    Files must have the hashes of the statement. The statement must have that of the checksums, or be what the files
    give again; if it is neither, the checksums count. Whoever changes a file, the statement and the checksums together
    is found out only by the signature of the statement.
    """
    path = Path(folder)
    found = _hashes(path)
    if not found.keys() & {STATEMENT, SUMS}:
        raise UsageError(
            f"evidence must be a folder that themis report --evidence wrote, but {path} has neither {SUMS} nor "
            f"{STATEMENT}: check the path"
        )
    sums, is_canonical = _read_sums(path)
    is_sound = STATEMENT in found and (
        SUMS not in found or found[STATEMENT] in (sums.get(STATEMENT), _again(path, found))
    )
    right = _read_statement(path) if is_sound else sums
    changes = dict.fromkeys(found.keys() - {*FILES}, "added")
    for name in (*SUBJECTS, *CONFIGURATION):
        if name not in found and (name in right or name != GATES):
            changes[name] = "missing"
        elif found.get(name) != right.get(name):
            changes[name] = "changed" if name in right else "added"
    is_right = {
        STATEMENT: is_sound,
        SUMS: is_canonical and (not is_sound or sums == right | {STATEMENT: found[STATEMENT]}),
    }
    changes |= {name: "changed" if name in found else "missing" for name, is_kept in is_right.items() if not is_kept}
    return dict(sorted(changes.items()))


def _hashes(folder: Path) -> dict[str, str]:
    """The hash of each file; empty for anything but regular files, such as links and folders."""
    hashes = {}
    try:
        for path in folder.iterdir():
            hashes[path.name] = ""
            if path.is_file() and not path.is_symlink():
                with open_regular(path) as file:
                    hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"evidence must be a folder that can be read, got {folder}: {error.strerror}") from error
    return hashes


def _read_sums(folder: Path) -> tuple[dict[str, str], bool]:
    """The checksums by name, and whether they are written as `make_sums` writes them."""
    try:
        content = read_regular(folder / SUMS, MAX_JSON)
    except OSError:
        return {}, False
    lines = re.findall(r"^([0-9a-f]{64})  (.+)$", content.decode("utf-8", "replace"), re.MULTILINE)
    sums = {name: digest for digest, name in lines}
    return sums, content == make_sums(sums) and sums.keys() <= {*FILES[:-1]}


def _read_statement(folder: Path) -> dict[str, str]:
    """The hashes of files by name, as far as the statement can be read."""
    try:
        statement = parse_json(read_regular(folder / STATEMENT, MAX_JSON))
        listed = [*statement["subject"], *statement["predicate"]["configuration"]]
        return {each["name"]: each["digest"]["sha256"] for each in listed if each["name"] in FILES}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _again(folder: Path, found: Mapping[str, str]) -> str | None:
    """The hash that the statement of these files has; None if they are damaged."""
    try:
        environment = parse_json(read_regular(folder / ENVIRONMENT, MAX_JSON))
        gates = parse_json(read_regular(folder / GATES, MAX_JSON)) if GATES in found else None
        return hash_bytes(make_statement(environment, gates, found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
