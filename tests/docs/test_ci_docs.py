"""The commands in docs/ci.md and the script of the GitHub Actions example, run by a real shell."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from documents import assert_printed
from documents import blocks as outputs
from warm_python import warm_python

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "github-actions.yml"
MINE = """
import torch
from torch import nn

def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 2))

def make_data():
    inputs = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.mean((1, 2, 3)) > 0.5).long()
"""


@pytest.fixture
def shell(tmp_path):
    """Runs a script in an empty folder where `themis` is a command."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/themis").write_text(f'#!/bin/sh\nexec "{warm_python()}" -m themis "$@"\n')
    (tmp_path / "bin/themis").chmod(0o755)
    (tmp_path / "work").mkdir()

    def shell(script, **names):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **names}
        words = [bash, "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        return subprocess.run(words, capture_output=True, text=True, cwd=tmp_path / "work", env=environment)

    return shell


def test_the_commands_of_the_document_run_in_order(shell, tmp_path):
    text = (ROOT / "docs/ci.md").read_text()
    (tmp_path / "work/mine.py").write_text(re.search(r"```python\n(# mine\.py\n.*?)```", text, re.S)[1])
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    assert len(blocks) == 3
    printed = [shell(block) for block in blocks]
    assert [done.returncode for done in printed] == [0, 0, 0], [done.stderr for done in printed]
    shown = outputs(ROOT / "docs/ci.md", "")
    assert len(shown) == 2
    for expected, done in zip(shown, printed, strict=False):
        assert_printed(expected, done.stdout)
    assert "FAILED  max_new_faults: " in printed[2].stdout
    work = tmp_path / "work"
    assert {"gates.xml", "summary.md", "diff.md", "runs"} <= {path.name for path in work.iterdir()}
    assert (work / "runs/new/report.html").is_file()


def test_nothing_is_installed_from_an_index_that_does_not_have_it():
    yaml = pytest.importorskip("yaml")
    workflow, action = yaml.safe_load(WORKFLOW.read_text()), yaml.safe_load((ROOT / "action.yml").read_text())
    steps = {step.get("name"): step for step in workflow["jobs"]["themis"]["steps"]}
    assert workflow["env"]["THEMIS"].startswith("git+https://")
    assert steps["Install"]["run"].splitlines()[-1] == 'pip install "$THEMIS"'
    install = next(step for step in action["runs"]["steps"] if step.get("name") == "Install")
    assert install["run"].splitlines()[-1] == 'pip install "$GITHUB_ACTION_PATH"'


@pytest.mark.parametrize(("has_config", "suite"), [(True, ""), (False, ""), (False, "own.yaml")])
def test_the_action_tests_the_model_and_fails_where_a_gate_does(shell, tmp_path, has_config, suite):
    yaml = pytest.importorskip("yaml")
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = next(step for step in action["runs"]["steps"] if step.get("name") == "Test the model")
    inputs = {name: about["default"] for name, about in action["inputs"].items()}
    (tmp_path / "work/mine.py").write_text(MINE)
    given = {"model": "mine:make_net", "data": "mine:make_data", "perturb": "gaussian"}
    if has_config:
        (tmp_path / "work/themis.yaml").write_text("".join(f"{name}: {value}\n" for name, value in given.items()))
        given = {"config": "themis.yaml"}
    if suite:
        (tmp_path / "work" / suite).write_text("name: own\nmembers: [gaussian, brightness]\n")
        given = {**given, "perturb": "", "suite": suite}
    inputs |= {
        **given,
        "options": "--max-tests 200 --oracle changed",
        "gates": f"--max-fault-rate {int(has_config)} --allow-constant",
    }
    names = {
        name: inputs[re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value)[1]] for name, value in step["env"].items()
    }
    done = shell(step["run"], **names, GITHUB_STEP_SUMMARY=str(tmp_path / "page.md"))
    assert done.returncode == (0 if has_config else 1), done.stderr
    assert (tmp_path / "work/gates.xml").is_file()
    assert "Themis: " in (tmp_path / "page.md").read_text()
    assert (
        tmp_path / "work" / action["outputs"]["report"]["value"].replace("${{ inputs.out }}", inputs["out"])
    ).is_file()


def test_the_workflow_does_what_its_steps_promise(shell, tmp_path):
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(WORKFLOW.read_text())
    steps = {step["name"]: step for step in workflow["jobs"]["themis"]["steps"] if "name" in step}
    uses = [step["uses"] for step in workflow["jobs"]["themis"]["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w./-]+@v\d+", each) for each in uses)
    assert steps["Keep the report"]["if"] == steps["Show the gates as tests"]["if"] == "always()"
    work = tmp_path / "work"
    (work / "mine.py").write_text(MINE)
    space = {}
    exec(MINE, space)
    net = space["make_net"]()
    torch.save(net.state_dict(), work / "model.pt")
    names = {
        **workflow["env"],
        "GITHUB_STEP_SUMMARY": str(tmp_path / "page.md"),
        "GATES": "--max-fault-rate 1 --allow-constant",
    }
    script = steps["Test the model"]["run"].replace("--max-tests 5000", "--max-tests 300")

    first = shell(script, **names)
    assert first.returncode == 0, first.stderr
    assert "max_new_faults" not in first.stdout
    assert shell(steps["Make it the next baseline"]["run"], **names).returncode == 0

    shutil.rmtree(work / "runs")
    with torch.no_grad():
        for each in net.parameters():
            each.add_(0.05 * torch.randn(each.shape, generator=torch.Generator().manual_seed(1)))
    torch.save(net.state_dict(), work / "model.pt")
    second = shell(script, **names)
    assert second.returncode in (0, 1), second.stderr
    assert "max_new_faults: " in second.stdout
    assert "compared with baseline/run" in second.stdout
    suite = ElementTree.parse(work / "gates.xml").getroot()[0]
    assert suite.get("tests") == "3"
    assert (tmp_path / "page.md").read_text().count("Themis: ") == 2
    kept = steps["Keep the report"]["with"]["path"].split()
    assert kept == ["runs/ci", steps["Show the gates as tests"]["with"]["report_paths"]]
    assert (work / "runs/ci/report.html").is_file()
