"""Memory is O(neurons): a campaign runs in memory that could not hold all of its sensitivities."""

import subprocess
import sys

N_WIDE, N_TESTS, ALLOWED_MB = 100_000, 4_000, 500
FULL_MB = N_WIDE * N_TESTS * 4 // 2**20

PROGRAM = f"""
import resource, torch, themis
from torch import nn
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, {N_WIDE}), nn.ReLU(), nn.Linear({N_WIDE}, 3))
data = torch.rand(50, 8)
options = dict(max_tests=200, coverage=1.0, plateau=None, tolerance=1e-9, clean_memory_gib=0.05)
themis.run(net, data, "gaussian", **options)  # loads everything
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + {ALLOWED_MB} * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    torch.empty({N_WIDE} * {N_TESTS})
    print("the full matrix fits: this test shows nothing")
except RuntimeError:
    result = themis.run(net, data, "gaussian", **{{**options, "max_tests": {N_TESTS}}})
    print(result.rounds[-1].tests, result.start.n_neurons)
"""


def test_a_campaign_runs_in_less_memory_than_its_sensitivities_would_take():
    assert FULL_MB > 3 * ALLOWED_MB
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(N_TESTS), str(N_WIDE + 3)]
