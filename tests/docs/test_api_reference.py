"""The reference pages under docs/api describe every public name, and nothing else."""

import importlib
import re

import pytest
from documents import ROOT

PAGES = {
    "themis": "themis.md",
    "themis.perturb": "perturb.md",
    "themis_integrations": "integrations.md",
    "themis_lab": "lab.md",
    "themis_lab.criteria": "criteria.md",
    "themis_lab.zoo": "zoo.md",
}
ALSO_DESCRIBED = {
    "themis.settings.Settings",  # the options of themis.run
    "themis_integrations.models.mindspore.black_box",  # its name needs its module
}


@pytest.mark.parametrize("module", PAGES)
def test_every_public_name_is_described_once(module):
    text = (ROOT / "docs" / "api" / PAGES[module]).read_text()
    described = [name for name in re.findall(r"^::: (\S+)$", text, re.M) if name not in ALSO_DESCRIBED]
    public = [f"{module}.{name}" for name in importlib.import_module(module).__all__]
    assert sorted(described) == sorted(public)


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert {path.name for path in (ROOT / "docs" / "api").iterdir()} == set(PAGES.values())
    for page in PAGES.values():
        assert f"api/{page}" in navigation
