"""What tests of the plugin share: parts of a user's project, and what a session printed."""

import re
from pathlib import Path

WORLD = """
    import torch
    from torch import nn

    kept = torch.load({path!r})
    DIGITS = kept["inputs"], kept["labels"]
    NET = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.ReLU(), nn.Linear(24, 10))
    NET.load_state_dict(kept["weights"])
"""
MINE = "from world import DIGITS, NET\ndef make_net():\n    return NET\ndef make_data():\n    return DIGITS\n"
FIXTURE = """
    import pytest
    from world import DIGITS, NET
"""
WEAK = (
    FIXTURE
    + """
    def test_noise(robustness):
        robustness(NET, DIGITS, "gaussian", magnitude=0.8, max_fault_rate=0.05, max_tests=400)
"""
)


SEVERAL = FIXTURE + (
    """
    @pytest.mark.parametrize("perturbation", ["gaussian", "shot", "a/../b"])
    def test_it(robustness, perturbation):
        name = perturbation if "/" not in perturbation else "speckle"
        robustness(NET, DIGITS, name, max_fault_rate=1.0, max_tests=100)

    @pytest.mark.xdist_group("alone")
    def test_twice(robustness):
        robustness(NET, DIGITS, "gaussian", max_fault_rate=1.0, max_tests=100)
        robustness(NET, DIGITS, "gaussian", magnitude=0.8, max_fault_rate=0.01, max_tests=100)
    """
)


def found_in(result):
    """What a session printed."""
    return result.stdout.str()


def run_folder(text):
    return Path(re.search(r"^run: (.+)$", text, re.M)[1])
