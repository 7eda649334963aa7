"""Campaigns that are killed, at random moments and at each file operation, end as if nothing had happened."""

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from crashes import crash_states, read_log

from themis.runs.store.reader import Reader

HERE = Path(__file__).parents[1] / "helpers"
BEFORE, HALFWAY, AFTER = range(3)
COMPILER = shutil.which("cc")
pytestmark = pytest.mark.xdist_group("kills")


class Campaigns:
    """A process that forks campaigns; each request is one life of one campaign."""

    def __init__(self, folder, shim=None):
        self.folder = folder
        environment = os.environ if shim is None else {**os.environ, "LD_PRELOAD": str(shim)}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "campaigns.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def live(self, job, name, *, seconds=None, **request):
        """Run one life, killed after some seconds unless it ends; returns whether it was killed, and its operations."""
        path, acknowledged = str(self.folder / name), str(self.folder / f"{name}.acknowledged")
        words = {"job": job, "path": path, "acknowledged": acknowledged, "seconds": seconds, **request}
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        status, count = json.loads(self.process.stdout.readline())
        assert status in (0, signal.SIGKILL), f"{name} failed"
        return status != 0, count

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def acknowledged(self, name):
        path = self.folder / f"{name}.acknowledged"
        return {int(line) for line in path.read_text().split()} if path.exists() else set()


@pytest.fixture
def campaigns(tmp_path):
    made = Campaigns(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """The same, with every file operation counted."""
    if COMPILER is None or sys.platform != "linux":
        pytest.skip("needs a C compiler and Linux")
    folder = tmp_path_factory.mktemp("watched")
    shim = folder / "shim.so"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", shim, HERE / "shim.c", "-ldl"], check=True)
    made = Campaigns(folder, shim)
    yield made
    made.close()


def stored(path):
    """The ids of the faults that are on disk."""
    if not (path / "run.sqlite").exists():
        return set()
    with closing(Reader(path)) as run:
        return {id for (id,) in run.select("id")}


def contents(path):
    """The content of a run folder, except for times and file names."""
    with closing(sqlite3.connect(path / "run.sqlite")) as database:
        database.row_factory = sqlite3.Row
        faults = [{**row} for row in database.execute("SELECT * FROM faults ORDER BY id")]
        rounds = [{**row, "seconds": 0} for row in database.execute("SELECT * FROM rounds ORDER BY number")]
        assert tuple(database.execute("PRAGMA integrity_check").fetchone()) == ("ok",)
    kept = [fault["id"] for fault in faults if fault.pop("tensors")]
    with closing(Reader(path)) as run:
        tensors = run.tensors(kept)
    assert sorted(tensors) == kept, "every row that names a file finds its tensors there"
    bits = {
        id: [column.numpy().tobytes() for column in vars(each).values() if column is not None]
        for id, each in tensors.items()
    }
    summary = json.loads((path / "summary.json").read_text())
    assert not list(path.rglob("*.part*")), "nothing half written is left"
    return faults, rounds, bits, {**summary, "seconds": 0}


@pytest.mark.parametrize("scale", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_campaign_killed_many_times_ends_as_if_it_had_never_been_killed(campaigns, tmp_path, scale):
    rng = random.Random(scale)
    kills, compared, told = {"noise": 0, "attack": 0, "long": 0}, 0, 0
    for job, wanted, most in (("noise", 4 * scale, 0.1), ("attack", 4 * scale, 0.1), ("long", 12 * scale, 0.4)):
        campaigns.live(job, f"{job}-whole")
        expected = contents(tmp_path / f"{job}-whole")
        assert len(expected[0]) > 20
        number = 0
        while kills[job] < wanted:
            number += 1
            name = f"{job}-{number}"
            while True:
                # The last life of a campaign is not killed, so that its result can be compared.
                seconds = rng.uniform(0, most) if kills[job] < wanted else None
                was_killed, _ = campaigns.live(job, name, seconds=seconds)
                acknowledged = campaigns.acknowledged(name)
                assert acknowledged <= stored(tmp_path / name), "a fault acknowledged is on disk"
                if not was_killed:
                    break
                kills[job] += 1
                told += len(acknowledged)
            assert contents(tmp_path / name) == expected
            compared += 1
    n = sum(kills.values())
    print(
        f"{n} kills, {told} faults acknowledged before one, all on disk after it; {compared} campaigns, no difference"
    )
    assert n >= 20 * scale


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_campaign_can_be_killed_at_any_file_operation(watched, stride):
    _, n_operations = watched.live("small", f"whole-{stride}", always=True)
    expected = contents(watched.folder / f"whole-{stride}")
    assert len(expected[0]) > 5
    assert n_operations > 100
    for k in range(0, n_operations, stride):
        name = f"at-{k}-by-{stride}"
        was_killed, _ = watched.live("small", name, always=True, kill=[k, (BEFORE, HALFWAY, AFTER)[k % 3]])
        assert was_killed
        assert watched.acknowledged(name) <= stored(watched.folder / name)
        # The next life is killed at another operation, and the one after that ends.
        watched.live("small", name, always=True, kill=[7 * k % n_operations, (HALFWAY, AFTER, BEFORE)[k % 3]])
        was_killed, _ = watched.live("small", name, always=True)
        assert not was_killed
        assert contents(watched.folder / name) == expected, f"died at operation {k}"
        shutil.rmtree(watched.folder / name)


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_power_cut_loses_nothing_that_was_acknowledged(watched, stride):
    log, uncut = watched.folder / f"log-{stride}", f"uncut-{stride}"
    watched.live("small", uncut, always=True, log=str(log))
    expected = contents(watched.folder / uncut)
    states = crash_states(read_log(log), watched.folder / uncut)
    assert len(states) > 20
    assert states[-1].acknowledged == watched.acknowledged(uncut) != set()
    for k, state in list(enumerate(states))[::-stride]:
        name = f"cut-{k}"
        state.write(watched.folder / name)
        assert state.acknowledged <= stored(watched.folder / name), f"power cut {k}"
        watched.live("small", name, always=True)
        assert contents(watched.folder / name) == expected, f"power cut {k}"
        shutil.rmtree(watched.folder / name)
