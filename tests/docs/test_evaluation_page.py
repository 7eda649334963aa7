"""The measured part of the page on the evaluation is what its script writes from the stored results."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import evaluation

    yield evaluation
    del sys.modules["evaluation"]


def test_the_page_shows_the_stored_results(script):
    from themis.experiments.evaluation.summary import Evaluation

    written = (ROOT / "docs/evaluation.md").read_text().partition(script.MARK)[2]
    assert written.strip() == script.measured(Evaluation(json.loads(script.RESULTS.read_text())))
