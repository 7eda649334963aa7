"""Which entry of a model's result holds its scores."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import themis
from themis import ModelError, Target, UsageError

Pair = namedtuple("Pair", ["features", "scores"])
FEATURES, SCORES = torch.rand(2, 5), torch.rand(2, 3)

RESULTS = {
    "dict": {"features": FEATURES, "scores": SCORES},
    "object": SimpleNamespace(features=FEATURES, scores=SCORES),
    "named tuple": Pair(FEATURES, SCORES),
}


def pick(result, output=None):
    target = Target(nn.Identity(), output=output)
    return target.scores(result), target.entry


@pytest.mark.parametrize("kind", RESULTS)
def test_several_tensors_are_refused_until_one_is_named(kind):
    with pytest.raises(
        ModelError, match=r"got 2: 'features' \[2, 5\], 'scores' \[2, 3\]; name the one with the scores"
    ):
        pick(RESULTS[kind])
    assert pick(RESULTS[kind], "scores") == (SCORES, "entry 'scores' of what the model returns, beside 'features'")


@pytest.mark.parametrize("output", [1, "1", -1])
def test_an_index_names_an_entry_of_a_tuple(output):
    for result in ((FEATURES, SCORES), [FEATURES, SCORES], Pair(FEATURES, SCORES)):
        assert pick(result, output)[0] is SCORES
    with pytest.raises(ModelError, match=r"got 2: 0 \[2, 5\], 1 \[2, 3\]; .* output=0 \(--output 0\)"):
        pick((FEATURES, SCORES))


@pytest.mark.parametrize(
    ("result", "entry"),
    [
        (SCORES, None),
        ({"logits": SCORES, "hidden": FEATURES}, "entry 'logits' of what the model returns, beside 'hidden'"),
        ({"aux": FEATURES, "out": SCORES}, "entry 'out' of what the model returns, beside 'aux'"),
        ((SCORES, None), "entry 0 of what the model returns"),
        (
            {"loss": torch.tensor(0.5), "classes": torch.tensor([1, 2]), "p": SCORES},
            "entry 'p' of what the model returns",
        ),
    ],
)
def test_the_only_candidate_and_known_names_are_taken(result, entry):
    assert pick(result) == (SCORES, entry)


def test_an_entry_that_is_missing_is_refused():
    with pytest.raises(
        ModelError, match=r"output='score' must name an entry of the model's result, which has 'a', 'b'"
    ):
        pick({"a": FEATURES, "b": SCORES}, "score")
    with pytest.raises(ModelError, match="must pick a tensor from the model's result, got str"):
        pick({"a": FEATURES}, lambda result: "a")
    for output in (1.5, True):
        with pytest.raises(UsageError, match="output must be a key, an attribute, an index or a function"):
            Target(nn.Identity(), output=output)


def test_the_command_line_names_the_entry_that_is_taken(tmp_path, monkeypatch, capsys):
    from themis.cli import main

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    words = ["--model", "pairs_module:make", "--data", "pairs_module:data", "--bounds", "0,1"]
    (tmp_path / "pairs_module.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Pairs(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.head = nn.Linear(4, 3)\n"
        "    def forward(self, x):\n        hidden = x.relu()\n"
        "        return {'features': hidden, 'scores': self.head(hidden)}\n"
        "def make():\n    torch.manual_seed(0)\n    return Pairs()\n"
        "def data():\n    torch.manual_seed(1)\n    return torch.rand(30, 4)\n"
    )
    assert main(["check", *words]) == 3
    assert "name the one with the scores, such as output='features' (--output features)" in capsys.readouterr().err
    assert main(["check", *words, "--output", "scores"]) == 0
    assert "3, entry 'scores' of what the model returns, beside 'features'" in capsys.readouterr().out
    run = ["run", *words, "--output", "scores", "--perturb", "gaussian", "--max-tests", "64", "--out", "run"]
    assert main([*run, "--no-report"]) == 0
    assert "the scores are entry 'scores' of what the model returns" in capsys.readouterr().out
    assert themis.open_run("run").start.entry.startswith("entry 'scores'")
