"""Shared by all tests: one thread per process, so that the threads of two workers do not compete.

Random numbers are seeded before each test, so that it does not matter which tests ran before in the same process.
portable.py sets the variables THEMIS_TEST_THREADS, another number of threads, THEMIS_TEST_OFFSETS, which has models
read their inputs at odd addresses, and THEMIS_TEST_ROUNDING, which changes the last bits of initial weights.

Tests run in parallel with `--dist loadgroup`. A module whose tests share an expensive fixture says so with
`pytestmark = pytest.mark.xdist_group(...)`: all tests of a group run on one worker, which makes the fixture once.
"""

import os
import random
import shutil
import signal
import tempfile

import hypothesis
import kernels  # noqa: F401  (before any module with GPU kernels, which Triton's interpreter runs on the CPU)
import numpy as np
import pytest
import torch

os.environ["OMP_NUM_THREADS"] = os.environ.get("THEMIS_TEST_THREADS", "1")  # also in processes that tests start
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
if "PYTEST_XDIST_WORKER" not in os.environ:  # the key that signs runs is not the developer's own; workers share it
    os.environ["THEMIS_STATE"] = tempfile.mkdtemp(prefix="themis-state-")
    if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
        # Themis syncs what it stores: in memory that takes no time, on a disk more than many a test.
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # started in the background of a shell, or by nohup
        signal.signal(number, handler)
# The first call of a kernel may be slow, and a busy machine may stop a test for a while. Examples are always the same.
hypothesis.settings.register_profile(
    "themis", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("themis")
if "THEMIS_TEST_OFFSETS" in os.environ:
    from offsets import shift_inputs

    shift_inputs()
if "THEMIS_TEST_ROUNDING" in os.environ:
    from rounding import round_initial_weights_otherwise

    round_initial_weights_otherwise()


def _seed():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collectstart():
    _seed()  # modules may draw random numbers as they are imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    _seed()


def pytest_unconfigure():
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["THEMIS_STATE"], ignore_errors=True)


@pytest.fixture(autouse=True)
def same_threads():
    """Tests may change the number of threads."""
    yield
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture
def written_at_once(monkeypatch):
    """What a campaign adds is on disk before its next chunk begins, however slow the disk is."""
    from themis.runs.store import writer

    note = writer.Writer.note
    monkeypatch.setattr(writer, "WRITING_SHARE", float("inf"))
    monkeypatch.setattr(writer, "FIRST_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(writer.Writer, "note", lambda self, **values: (note(self, **values), self.wait()))


@pytest.fixture
def digits():
    """200 real digits, 20 per class, in 0..1, with labels."""
    from themis_integrations.data.digits import read_digits

    return read_digits()[torch.arange(0, 5000, 25)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """LeNet-5 trained on the real digits, and the digits held out from its training."""
    from themis_integrations.data.digits import read_digits
    from themis_lab.cli.demo import split, trained_lenet5

    # All workers of a test run share the cache, so that the model is trained only once.
    os.environ["THEMIS_CACHE"] = str(tmp_path_factory.getbasetemp().parent / "themis-cache")
    train, held_out = split(read_digits())
    return trained_lenet5(train, held_out, lambda text: None), held_out


@pytest.fixture(scope="module")
def few_held_out_tests():
    """Let trainings measure a tenth of the usual tests at every epoch and share: enough for all but their results."""
    from themis.retraining import frontier

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontier, "MAX_TESTS", 200)
        yield


@pytest.fixture(scope="session")
def browser():
    """A browser, started once: a second one in the same process is refused by Playwright."""
    from browsing import CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
