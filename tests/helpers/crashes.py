"""What a disk holds after a power cut, worked out from a log of file operations."""

import os
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Operation:
    kind: str
    path: str
    other: str
    offset: int
    data: bytes


def read_log(path):
    """The operations that the shim logged."""
    content, at, operations = path.read_bytes(), 0, []
    while at < len(content):
        words = []
        for _ in range(5):
            end = content.index(b"\n", at)
            words.append(content[at:end].decode())
            at = end + 1
        size = int(words[4])
        operations.append(Operation(words[0], words[1], words[2], int(words[3]), content[at : at + size]))
        at += size
    return operations


@dataclass
class Disk:
    """Files and names as the system sees them (`now`), and as a power cut leaves them (`safe`).

    A file's content is safe when it was synced; a name when its folder was, or at once where the file system writes
    names in order (`is_eager`): both happen.
    """

    is_eager: bool
    now: dict[str, int] = field(default_factory=dict)  # name to file
    safe: dict[str, int] = field(default_factory=dict)
    content: dict[int, bytearray] = field(default_factory=dict)
    synced: dict[int, bytes] = field(default_factory=dict)

    def do(self, each):
        """One operation; whether it made anything safe."""
        if each.kind == "create":
            file = len(self.content)
            self.now[each.path], self.content[file], self.synced[file] = file, bytearray(), b""
        elif each.kind == "write":
            content = self.content[self.now[each.path]]
            content.extend(bytes(max(0, each.offset - len(content))))
            content[each.offset : each.offset + len(each.data)] = each.data
        elif each.kind == "truncate":
            content = self.content[self.now[each.path]]
            content.extend(bytes(max(0, each.offset - len(content))))
            del content[each.offset :]
        elif each.kind == "rename":
            self.now[each.other] = self.now.pop(each.path)
        elif each.kind == "unlink":
            del self.now[each.path]
        elif each.kind == "sync" and each.path in self.now:
            file = self.now[each.path]
            self.synced[file] = bytes(self.content[file])
        elif each.kind == "sync":  # of a folder
            inside = {name for name in (*self.now, *self.safe) if os.path.dirname(name) == each.path}
            for name in inside:
                self._make_safe(name)
        if self.is_eager and each.kind in ("create", "rename", "unlink"):
            for name in (each.path, each.other):
                self._make_safe(name)
        return each.kind == "sync" or self.is_eager

    def _make_safe(self, name):
        if name in self.now:
            self.safe[name] = self.now[name]
        else:
            self.safe.pop(name, None)

    def state(self):
        return {name: self.synced[file] for name, file in self.safe.items()}


@dataclass
class State:
    """The folder after a power cut, and the faults that had been acknowledged until then."""

    root: str
    files: dict[str, bytes]
    acknowledged: set[int]

    def write(self, path):
        for folder in ("tensors", "state"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (path / Path(name).relative_to(self.root)).write_bytes(content)


def crash_states(operations, root):
    """Every state in which a power cut can leave the folder, for both kinds of file system; none twice."""
    states = []
    for is_eager in (False, True):
        disk, acknowledged, found = Disk(is_eager), set(), [State(str(root), {}, set())]
        for each in operations:
            if each.kind == "acknowledge":
                acknowledged.add(each.offset)
                found[-1].acknowledged.add(each.offset)
            elif each.path.endswith("-shm") or each.kind == "mkdir":
                continue  # an index that SQLite makes again; folders are always there
            elif disk.do(each) and (files := disk.state()) != found[-1].files:
                found.append(State(str(root), files, set(acknowledged)))
        states += found
    return states
