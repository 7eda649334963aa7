"""The summary and the results on the page of the evaluation are what its script writes from the stored results."""

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

    page = (ROOT / "docs/evaluation.md").read_text()
    assert page == script.write_page(page, Evaluation(json.loads(script.RESULTS.read_text())))
