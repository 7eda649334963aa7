"""Every Python block in the documents runs; a block that starts with `# NAME.py` is a file for the commands."""

import re

import pytest
import torch
from documents import DOCUMENTS, FILE, ROOT, blocks

BLOCKS = [
    pytest.param(block, id=f"{path.name}-{k}")
    for path in DOCUMENTS
    for k, block in enumerate(blocks(path, "python"))
    if not FILE.match(block)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs(block, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)  # the nets of the documents have random weights
    space = {}
    exec(compile(block, "document", "exec"), space)
    if "run" in space:
        assert space["run"].rounds[-1].tests > 0
        assert "True" in capsys.readouterr().out
    elif "BAND" in space:
        import themis

        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(108, 3))
        result = themis.run(net, torch.rand(9, 3, 6, 6), space["BAND"], max_tests=50)
        assert result.start.perturbation == "band"
    elif "suite" in space:
        assert space["suite"].tests > 0
        assert "True" in capsys.readouterr().out
    elif {"rainy", "dimmed", "noisy", "turning", "killed"} & space.keys():
        assert "True" in capsys.readouterr().out
    else:
        pytest.fail("a block that nothing is checked of")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_have_a_target(path):
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert link.startswith("http") or (path.parent / link).exists(), link


LONG = ("results.md", "performance.md", "evaluation.md", "evaluation-cells.md")
"""Pages of measurements, which are looked up and not read."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_is_short(path):
    n_lines = len(path.read_text().splitlines())
    assert n_lines <= (150 if path.name == "README.md" else 200) or path.name in LONG


def test_the_table_of_perturbations_is_complete():
    from themis.perturb import PERTURBATIONS

    text = (ROOT / "docs" / "perturbations.md").read_text()
    for name, each in PERTURBATIONS.items():
        theta = "; ".join(f"`{t.name}` {t.low:g} to {t.high:g} ({t.unit})" for t in each.theta)
        assert f"| `{name}` | {each.about.rstrip('.')}" in text
        assert f"| {theta} |" in text
    listed = set(re.findall(r"^\| `(\w+)` \|", text.partition("## Attacks")[0], re.M))
    assert listed == set(PERTURBATIONS)
    guides = text.partition("it is a guide only:")[2]
    assert set(re.findall(r"`(\w+)`", guides)) == {name for name, each in PERTURBATIONS.items() if not each.is_smooth}
    exempt = text.partition("## Theta at its identity")[2].partition("##")[0]
    exempt = set(re.findall(r"^- `(\w+)`", exempt, re.M))
    assert exempt == {name for name, each in PERTURBATIONS.items() if not each.has_identity}


def test_the_table_of_criteria_is_complete():
    from themis_lab.criteria import CRITERIA

    text = (ROOT / "docs/lab/criteria.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if re.match(r"\| `\w+` \|", line)]
    rows = [(cells[1].strip("`"), *cells[3:6]) for cells in lines if len(cells) == 7]
    assert [name for name, *_ in rows] == list(CRITERIA)
    for name, learns, broken, variants in rows:
        kind = CRITERIA[name]
        assert bool(learns.strip()) == kind.learns
        assert re.findall(r"`([\w-]+)`", variants) == list(kind.variants)
        laws = [law for law, holds in vars(kind().laws).items() if not holds]
        assert laws == [law for law in re.split(r"[,;] ", broken.strip()) if law and "`" not in law]


def test_there_are_blocks():
    assert len(BLOCKS) >= 2
