"""Warnings point at the line of the user that called Themis."""

import linecache
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from user_module import go_to

import themis
from themis.cli import main
from themis.target.diagnose import warn_of_unequal_ranges

TABLE = torch.tensor([[0.0, 0.0], [1.0, 100.0]])
MODULE = """
import torch
import themis

INPUTS = torch.rand(20, 8, generator=torch.Generator().manual_seed(0))

def compiled():
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        net[-1].bias -= net(INPUTS).mean(0)  # no class is the usual one
    return themis.Target(torch.compile(net, backend="eager"))
"""


class Fails(themis.Callback):
    def on_start(self, start):
        raise ValueError("no")


def net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    with torch.no_grad():
        net[-1].bias -= net(torch.rand(60, 1, 8, 8)).mean(0)  # no class is the usual one
    return net


def data(*, is_wrong=False):
    inputs = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (net()(inputs).argmax(1) + is_wrong * (torch.arange(60) % 4 > 0)) % 4


CALLS = {
    "run": lambda: themis.run(net(), data(is_wrong=True), "gaussian", max_tests=32),
    "run, a callback": lambda: themis.run(net(), data(), "gaussian", max_tests=32, callbacks=[Fails()]),
    "Target": lambda: themis.Target(torch.compile(net(), backend="eager")),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_warning_points_at_the_line_that_called_themis(name):
    with pytest.warns(RuntimeWarning) as caught:
        CALLS[name]()
    assert [each.filename for each in caught] == [__file__]
    assert f"themis.{name.partition(',')[0]}(" in linecache.getline(__file__, caught[0].lineno)


def test_the_command_line_prints_a_warning_even_if_code_of_the_user_causes_it(tmp_path, monkeypatch, capsys):
    go_to(tmp_path, monkeypatch, MODULE)
    monkeypatch.setattr(sys, "warnoptions", [])
    words = "run --model mine:compiled --data mine:INPUTS --perturb gaussian --max-tests 32 --quiet --out none"
    assert main(words.split()) == 0
    assert re.fullmatch("themis run: the model was compiled with torch.compile, .*\n", capsys.readouterr().err)


def test_a_warning_in_a_thread_of_themis_points_at_its_function():
    with ThreadPoolExecutor(1) as pool, pytest.warns(RuntimeWarning, match="use table_noise") as caught:
        pool.submit(warn_of_unequal_ranges, "gaussian", TABLE, (0, 100)).result()
    assert caught[0].filename == warn_of_unequal_ranges.__code__.co_filename


def test_a_warning_is_shown_once_per_line(recwarn):
    for _ in range(3):
        warn_of_unequal_ranges("gaussian", TABLE, (0, 100))
    warn_of_unequal_ranges("gaussian", TABLE, (0, 100))
    assert len(recwarn) == 2
