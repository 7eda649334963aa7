"""The pages of the evaluation show what its script writes from the stored results."""

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
    from themis_lab.evaluation.summary import Evaluation

    evaluation = Evaluation(json.loads(script.RESULTS.read_text()))
    page, cells = ((ROOT / f"docs/lab/{name}.md").read_text() for name in ("evaluation", "evaluation-cells"))
    assert page == script.write_page(page, evaluation)
    assert cells == f"{script.cells_page(evaluation)}\n"
