"""A finished run and a server for it, each created once."""

import shutil

import pytest
from asking import served

import themis


@pytest.fixture(scope="session")
def made(trained, tmp_path_factory):
    """A finished run: LeNet-5 on real digits."""
    net, held_out = trained
    path = tmp_path_factory.mktemp("watched") / "run"
    themis.run(net, held_out, "gaussian", magnitude=0.6, max_tests=1500, random_seed=0, out=path)
    return path


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run that a test may change."""
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(scope="session")
def server(made):
    with served(made) as server:
        yield server
