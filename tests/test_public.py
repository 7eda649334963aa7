"""The public names, and the package on a machine with little installed."""

import subprocess
import sys

import pytest

import themis
import themis_integrations
import themis_lab

pytestmark = pytest.mark.quick


def test_every_public_name_is_there():
    for name in themis.__all__:
        assert getattr(themis, name) is not None
    assert set(themis.__all__) == set(dir(themis))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        themis.nothing  # noqa: B018


def test_every_public_name_of_the_integrations_is_there():
    for name in themis_integrations.__all__:
        assert getattr(themis_integrations, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        themis_integrations.nothing  # noqa: B018


def test_folders_are_public_too():
    assert "gaussian" in themis.perturb.PERTURBATIONS
    assert themis_lab.zoo.lenet5() is not None
    assert "kmnc" in themis_lab.criteria.CRITERIA


def test_importing_it_imports_no_torch():
    code = "import sys, themis; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_campaign_runs_with_torch_numpy_and_scipy_alone():
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "rich matplotlib mlxtend sklearn pandas PIL pymc yaml".split():
            raise ImportError(name)
sys.meta_path.insert(0, Missing())
import torch, themis
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
print(themis.run(net, torch.rand(20, 4), "gaussian", max_tests=200).rounds[-1].tests)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "200", done.stderr
