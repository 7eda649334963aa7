"""Files at the top of the repository agree with the package."""

import json
import re
import tomllib

import pytest
import yaml
from documents import DOCUMENTS, ROOT

import themis


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == themis.__version__
    assert citation["preferred-citation"]["authors"][0]["family-names"] == "Huang"


def test_the_map_of_the_code_lists_the_layers_from_the_lowest_to_the_highest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][1]["layers"]
    lowest = [f"{name.strip()}.py" for name in layers[-1].split(":")]
    modules_and_folders = [name for name in reversed(layers[:-1]) if name != "__main__"]
    source = ROOT / "src" / "themis"
    folders = [f"{name}.py" if (source / f"{name}.py").exists() else f"{name}/" for name in modules_and_folders]
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## A map of the code")[2]
    rows = [re.findall(r"`([\w.]+/?)`", line.split("|")[1]) for line in text.splitlines() if line.startswith("| `")]
    modules = [name for row in rows for name in row if name in lowest]
    assert sorted(modules) == sorted(lowest)
    assert [row[0] for row in rows if row[0] not in modules][: len(folders)] == folders


def test_every_extra_of_development_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        re.split("==", line)[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().split()
    }
    for extra in ("test", "check", "docs", "dev", "integrations"):
        for requirement in project["optional-dependencies"][extra]:
            name = re.match(r"[\w.-]+", requirement)[0].lower()
            assert name == "themis-dl" or name in pinned, name


def test_the_workflow_runs_every_supported_python_with_the_oldest_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    supported = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    oldest = next(line.partition(">=")[2] for line in project["dependencies"] if line.startswith("torch"))
    assert f"torch=={oldest}." in (ROOT / ".github" / "workflows" / "ci.yml").read_text()


def test_wheels_images_and_containers_are_for_supported_versions():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    supported = [
        line.rpartition(" ")[2] for line in settings["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)
    ]
    built = re.findall(r"cp3(\d+)-", settings["tool"]["cibuildwheel"]["build"])
    assert [f"3.{minor}" for minor in built] == supported
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=(.+)$", dockerfile, re.M)[1] in supported
    torch = re.search(r"^ARG TORCH=(.+)$", dockerfile, re.M)[1]
    assert f"torch=={torch}" in (ROOT / "constraints.txt").read_text().split()
    extras = re.search(r"^ARG EXTRAS=(.+)$", dockerfile, re.M)[1].split(",")
    assert set(extras) <= set(settings["project"]["optional-dependencies"])
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["image"].rpartition(":")[2] in supported
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    assert action["inputs"]["python-version"]["default"] in supported


def test_the_image_is_built_from_files_that_it_can_see():
    dockerfile, ignored = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().split()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.M) for word in line.split()]
    assert set(copied) == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize("path", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_files_that_a_document_names_exist(path):
    named = re.findall(r"\b(?:tests|benchmarks|examples|src/\w+)/[\w/]+\.\w+", path.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
