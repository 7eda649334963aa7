"""A user's project with a trained model, created once."""

import sys

import pytest
import torch
from projects import WORLD
from torch import nn


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """A file with a net trained on real digits, and some of the digits."""
    from themis_integrations.data.digits import read_digits

    path = tmp_path_factory.mktemp("world") / "world.pt"
    digits = read_digits()[torch.arange(0, 5000, 10)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(digits.inputs), digits.labels).backward()
        optimiser.step()
    held = {"inputs": digits.inputs[::3].clone(), "labels": digits.labels[::3].clone(), "weights": net.state_dict()}
    torch.save(held, path)
    warm(net, digits, path.parent / "run")
    return path


def warm(net, digits, folder):
    """Import what campaigns need, so that sessions inside this process do not have to."""

    import themis
    from themis.report.gates.gates import Gates, check_gates
    from themis.report.page import write_report

    run = themis.run(net, digits, "gaussian", out=folder, max_tests=100)
    check_gates(run, Gates.of(max_fault_rate=1.0), folder=folder)
    write_report(folder)


@pytest.fixture
def project(pytester, kept, monkeypatch):
    """A user's project with a model, and a way to run its tests in this process."""
    for name in ("PYTEST_XDIST_WORKER", "CI", "BUILD_NUMBER"):  # where either is set, pytest says all of it twice
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    pytester.makepyfile(world=WORLD.format(path=str(kept)))
    pytester.makeini("[pytest]\nfilterwarnings =\n    error\n    ignore:.* hardly changes the inputs\n")
    return pytester
