"""Marking faults in the browser: a page with one fault at a time, served to this machine only, and its marks."""

import errno
import json
import os
import time
from pathlib import Path
from threading import Lock
from typing import Any

from themis.errors import DataError, ThemisError, UsageError
from themis.report.page import render_page
from themis.runs.analysis import review
from themis.runs.display.fault import answers, data_uri, describe_theta, is_picture, pictures
from themis.runs.fault import Fault
from themis.runs.replay import Replayer
from themis.runs.store.files import explained, refuse_special, sync
from themis_integrations.browser.server import HTML, JSON, PAGE, Response, Server, listen, policy

DEFAULT_SAMPLE = 100
"""Faults shown to a reviewer by default."""
SCRIPTS = ("elements.js", "themis_integrations.browser:review.js")
FAULT_PATH = "/fault/"


class Session:
    """The faults that one reviewer marks, in the order of the sample."""

    def __init__(self, replayer: Replayer, reviewer: str, number: int = DEFAULT_SAMPLE) -> None:
        """Refuse a run whose faults cannot be shown, before the page is served."""
        if number < 1:
            raise UsageError(f"the sample must have at least 1 fault, got {number}: leave it out for {DEFAULT_SAMPLE}")
        run, self.reviewer = replayer.run, check_reviewer(reviewer)
        faults = review.reviewable_faults(run)
        if not faults:
            raise DataError(
                f"{run.path} must have faults of the uniform stream to be reviewed, but has none: the rate of valid "
                "faults is that of random tests"
            )
        self.marks = review.read_marks(run, faults).get(self.reviewer, {})
        self.path, self.faults, self._identity = run.path, faults[:number], review.identity(run)
        self._replayer, self._lock, self._shown = replayer, Lock(), dict[int, tuple[str, ...]]()
        self._draw(self.first)

    @property
    def first(self) -> int:
        """The place of the first fault without a mark of this reviewer; the number of faults if there is none."""
        return next((k for k, fault in enumerate(self.faults) if fault.id not in self.marks), len(self.faults))

    def show(self, k: int) -> dict[str, Any]:
        """What the page shows for the fault at a place in the sample, or after the last one."""
        with self._lock:
            if k == len(self.faults):  # the rate is shown at the end only, so that nobody stops when it looks good
                result = str(review.read_review(self.path) or "No fault is marked.").split("\n")
                return {**self._progress(), "result": result}
            fault = self.faults[k]
            before, after = answers(fault, named=True)
            facts = f"fault {fault.id}, seed {fault.seed_id}, {describe_theta(fault)}"
            facts += "" if fault.ssim is None else f", SSIM {fault.ssim:.3f}"
            clean, disturbed = self._draw(k)
            shown = {"before": before, "after": after, "clean": clean, "disturbed": disturbed, "facts": facts}
            return {**self._progress(), **shown, "mark": self.marks.get(fault.id)}

    def mark(self, k: int, mark: str) -> dict[str, Any]:
        """Store a mark, and return the progress of the review."""
        with self._lock:
            fault = self.faults[k]
            add_mark(self.path, self._identity, fault, mark, self.reviewer)
            self.marks.pop(fault.id, None)
            if mark != review.UNDONE:
                self.marks[fault.id] = mark
            return self._progress()

    def end(self) -> None:
        """Wait for the current picture and make no more, because torch must not be running when the process ends."""
        self._lock.acquire()

    def _progress(self) -> dict[str, Any]:
        n_marked = sum(fault.id in self.marks for fault in self.faults)
        return {"n": len(self.faults), "marked": n_marked, "first": self.first, "reviewer": self.reviewer}

    def _draw(self, k: int) -> tuple[str, ...]:
        """The clean and the disturbed picture at a place, stored or computed again."""
        k = min(k, len(self.faults) - 1)
        if k in self._shown:
            return self._shown[k]
        fault = self.faults[k]
        shown = self._replayer.show(fault)
        if shown is None:
            shown = replay = self._replayer.replay(fault)
            if not replay.is_same:
                changed = "; ".join(replay.changes) or "the answer differs"
                raise DataError(f"fault {fault.id} must be shown as it was, but it is not reproduced: {changed}")
        shape = tuple(shown.inputs.shape)
        if not is_picture(shape):
            raise UsageError(f"only pictures can be reviewed, but the inputs of {self.path} have shape {list(shape)}")
        self._shown[k] = tuple(map(data_uri, pictures(shown)[:2]))
        return self._shown[k]


class ReviewServer(Server):
    """Shows the faults of a session, and stores the marks that its page sends."""

    folder: Session
    is_writable = True

    def respond(self, path: str, known_tags: str) -> Response:
        if path == PAGE:
            page = render_page("review", {"run": str(self.folder.path)}, SCRIPTS, live=f"?token={self.token}")
            return Response(200, HTML, page.encode("utf-8", "replace"), {"Content-Security-Policy": policy(page)})
        k = self._place(path, len(self.folder.faults))
        return _no_fault() if k is None else _as_json(lambda: self.folder.show(k))

    def store(self, path: str, body: bytes) -> Response:
        """Store the mark in a request of the page."""
        k = self._place(path, len(self.folder.faults) - 1)
        mark = body.decode("ascii", "replace")
        if k is None or mark not in review.MARKS:
            return (
                _no_fault() if k is None else Response.of_text(400, f"a mark must be one of {', '.join(review.MARKS)}")
            )
        return _as_json(lambda: self.folder.mark(k, mark))

    def _place(self, path: str, last: int) -> int | None:
        number = path.removeprefix(FAULT_PATH)
        is_place = path.startswith(FAULT_PATH) and number.isascii() and number.isdigit() and len(number) < 10
        return int(number) if is_place and int(number) <= last else None


def _no_fault() -> Response:
    return Response.of_text(404, f"only {PAGE} and {FAULT_PATH}NUMBER of a fault in the sample exist")


def _as_json(make: Any) -> Response:
    """Return the picture, or the reason why there is none, which the page shows."""
    try:
        return Response(200, JSON, json.dumps(make(), allow_nan=False).encode())
    except ThemisError as error:
        return Response(500, JSON, json.dumps({"error": str(error)}).encode())


def serve_review(session: Session, *, port: int = 0) -> ReviewServer:
    """Like `serve`, but for a session, and with marks that are written into the run folder."""
    return listen(lambda: ReviewServer(session, port), port)


def check_reviewer(name: str) -> str:
    """Return the name if it can be stored with marks."""
    try:
        review.MARK_FORM({"run": "", "fault": 0, "noise_seed": 0, "mark": review.VALID, "by": name, "at": ""}, "mark")
    except ValueError:
        raise UsageError(
            f"the reviewer's name must be 1 to 64 letters, digits, spaces and .@+-, got {name[:80]!r}: pass --reviewer"
        ) from None
    return name


def add_mark(folder: Path, run: str, fault: Fault, mark: str, by: str) -> None:
    """Store a mark on disk, in the folder of the run with this identity.

    One write adds the line as a whole. If the process is killed in the middle of it, the next mark begins a new line.
    """
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    values = {"run": run, "fault": fault.id, "noise_seed": fault.noise_seed, "mark": mark, "by": by, "at": at}
    line, path = (json.dumps(values) + "\n").encode(), folder / review.REVIEW_FILE
    refuse_special(path)
    with explained(path):
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
        file = os.open(path, flags, 0o666)
        try:
            size = os.fstat(file).st_size
            if size and (os.lseek(file, size - 1, os.SEEK_SET), os.read(file, 1))[1] != b"\n":
                line = b"\n" + line
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
        finally:
            os.close(file)
        if is_new:
            sync(folder)
