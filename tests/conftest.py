"""Shared by all tests: one thread count, so that results are the same to the bit everywhere."""

import os
import signal

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: two workers' threads would wait for each other
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background; tests' processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("themis", deadline=None)  # the first call of a kernel may take long
hypothesis.settings.load_profile("themis")

TOGETHER = ("retraining", "report", "diff", "trackers")
"""Folders whose files make something dear for all their tests: each file runs on one worker, and makes it once."""
ALSO = ("test_agreement.py", "test_retrain_command.py", "test_parts.py", "test_ledger.py")
AS_ONE = ("gates", "watch")
"""Folders whose files share what is dear: all of one run on one worker."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name in TOGETHER or item.path.name in ALSO:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif item.path.parent.name in AS_ONE:
            item.add_marker(pytest.mark.xdist_group(item.path.parent.name))


@pytest.fixture
def digits():
    """200 real digits, 20 a class, in 0..1, with labels."""
    from themis.data.readers import read_digits

    return read_digits()[torch.arange(0, 5000, 25)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """LeNet-5 trained for real on the digits, and the digits it has not seen."""
    import os

    from themis.cli.demo import split, trained_lenet5
    from themis.data.readers import read_digits

    # One training for all workers of a test run: the cache is shared by its root folder.
    os.environ["THEMIS_CACHE"] = str(tmp_path_factory.getbasetemp().parent / "themis-cache")
    train, held_out = split(read_digits())
    return trained_lenet5(train, held_out, lambda text: None), held_out
