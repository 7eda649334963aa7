"""Kernels are used on a GPU only."""

import subprocess
import sys

import pytest
import torch
from kernels import needs_triton

from themis.compute.gpu import works_on


@needs_triton
def test_no_kernel_works_on_a_cpu():
    assert not works_on(torch.device("cpu"), lambda: True)


@pytest.mark.skipif(torch.version.cuda or torch.version.hip, reason="torch is built for GPUs")
def test_a_torch_without_gpus_does_not_import_triton():
    code = "import sys, themis.measure.calculator; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
