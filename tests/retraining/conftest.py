"""Shared by the tests of experiments."""

import pytest

from themis.retraining import batches


@pytest.fixture(scope="module")
def few_held_out_tests():
    """Let trainings measure a tenth of the usual tests at every epoch and share: enough for all but their results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "MAX_TESTS", 200)
        yield
