"""What the last bits of results depend on: it is fixed as far as possible, and recorded."""

import os
import subprocess
import sys

import pytest
import torch
from offsets import every_offset
from torch import nn
from torch.nn import functional as F

import themis
from themis.runs import environment
from themis.runs.environment import mkl_cbwr

needs_mkl = pytest.mark.skipif(mkl_cbwr() is None, reason="this torch has no MKL")
DOCTOR = "; import themis; from themis.cli import main; main(['doctor', '--quick'])"


def mode(code, **variables):
    """What the doctor says of MKL in a new process."""
    inherited = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    command = [sys.executable, "-c", code + DOCTOR]
    done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("  MKL ")]
    return line.split(maxsplit=1)[1]


@needs_mkl
def test_importing_themis_makes_mkl_independent_of_where_arrays_lie():
    said = mode("import torch")
    assert said == "AUTO,STRICT"


@needs_mkl
def test_a_mode_that_the_user_has_chosen_stays():
    said = mode("import torch", MKL_CBWR="AUTO")
    assert said.startswith("AUTO: the last bits of results may vary; ")
    assert said.endswith("leave MKL_CBWR unset")


@needs_mkl
def test_the_doctor_says_if_mkl_was_used_too_early():
    said = mode("import torch; torch.rand(9, 9) @ torch.rand(9, 9)")
    assert said.startswith("OFF: the last bits of results may vary; import themis before torch is used")


def test_a_run_records_the_mode_and_names_a_change(tmp_path, monkeypatch):
    net, data = nn.Linear(4, 3), torch.rand(30, 4)
    run = themis.run(net, data, "gaussian", max_tests=100, out=tmp_path / "run")
    assert run.environment["mkl_cbwr"] == mkl_cbwr()
    monkeypatch.setattr(environment, "mkl_cbwr", lambda: "other")
    with pytest.warns(RuntimeWarning, match=f"another environment.*: mkl_cbwr {mkl_cbwr()} then, other now"):
        themis.resume(tmp_path / "run", net, data)


def attention(inputs, keys):
    return F.scaled_dot_product_attention(inputs, keys, keys)


@pytest.mark.parametrize("n", [1, 8, 32])
@pytest.mark.parametrize(
    ("compute", "shape", "weights"),
    [
        pytest.param(F.linear, (84,), (10, 84), id="linear"),
        pytest.param(F.linear, (32,), (3, 32), id="three outputs"),
        pytest.param(F.linear, (784,), (120, 784), id="wide linear"),
        pytest.param(torch.matmul, (64,), (64, 32), id="matmul"),
        pytest.param(F.conv2d, (3, 16, 16), (8, 3, 3, 3), id="conv2d"),
        pytest.param(F.conv2d, (1, 28, 28), (6, 1, 5, 5), id="one channel"),
        pytest.param(F.conv2d, (16, 7, 7), (32, 16, 1, 1), id="pointwise"),
        pytest.param(F.conv_transpose2d, (4, 7, 7), (4, 8, 3, 3), id="transposed"),
        pytest.param(attention, (4, 17, 16), (4, 17, 16), id="attention"),
    ],
)
def test_no_bit_depends_on_where_arrays_lie(compute, shape, weights, n):
    """Neither outputs nor gradients do; without the mode of MKL, those of linear layers do on many CPUs."""
    if mkl_cbwr() is not None and not mkl_cbwr().endswith(("COMPATIBLE", ",STRICT")):
        pytest.skip(f"MKL_CBWR={mkl_cbwr()}")
    rng = torch.Generator().manual_seed(0)
    tensors = torch.randn(n, *shape, generator=rng), torch.randn(weights, generator=rng)
    if compute is attention:
        tensors = tensors[0], tensors[1].expand(n, *weights)
    results = []
    for placed in every_offset(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in placed]
        outputs = compute(*leaves)
        results.append([outputs.detach(), *torch.autograd.grad(outputs.square().sum(), leaves)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
