"""Every Python block in the documents runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{k}")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for k, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, capsys):
    space = {}
    exec(compile(block, "document", "exec"), space)
    if "run" in space:
        assert space["run"].rounds[-1].tests > 0
        assert "True" in capsys.readouterr().out
    elif "STRIPES" in space:
        import torch

        import themis

        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3))
        result = themis.run(net, torch.rand(9, 3, 6, 6), space["STRIPES"], max_tests=50)
        assert result.start.perturbation == "stripes"
    elif "rainy" in space:
        assert "True" in capsys.readouterr().out
    else:
        pytest.fail("a block that nothing is checked of")


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert link.startswith("http") or (path.parent / link).exists(), link


def test_there_are_blocks():
    assert len(BLOCKS) >= 2
