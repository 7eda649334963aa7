"""The C of the kernels that draw noise, compiled for the CPU, gives the numbers that torch gives."""

import ctypes
import shutil
import subprocess

import pytest
import torch

from themis.compute import gpu
from themis.compute.rng import Rng, normal_pairs

COMPILER = shutil.which("c++")
CODE = """
#include <cmath>
#include <cstring>
static int __float_as_int(float number) { int bits; memcpy(&bits, &number, 4); return bits; }
%s %s
extern "C" void uniform(const int* counter, int low, int high, int n, int* out) {
    for (int i = 0; i < n; i++) out[i] = themis_uniform<int>(counter[i], low, high);
}
extern "C" void pairs(const float* first, const float* second, int n, float* even, float* odd) {
    for (int i = 0; i < n; i++) themis_pairs<float>(first[i], second[i], even[i], odd[i]);
}
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    source = tmp_path_factory.mktemp("kernels") / "kernels.cpp"
    source.write_text(CODE % (gpu.UNIFORM_CODE, gpu.PAIRS_CODE))
    library = source.with_suffix(".so")
    subprocess.run([COMPILER, "-O1", "-fwrapv", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(library)


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
def test_uniform_numbers_are_those_of_torch(compiled, seed):
    seeds, n = torch.tensor([seed]), 100_000
    counter, bits = torch.arange(n, dtype=torch.int32), torch.empty(n, dtype=torch.int32)
    low, high = (int(half) for half in (seeds.to(torch.int32), (seeds >> 32).to(torch.int32)))
    compiled.uniform(pointer(counter), low, high, n, pointer(bits))
    assert torch.equal(bits.view(torch.float32), Rng(seeds).uniform(n)[0])


def test_normal_numbers_are_those_of_torch(compiled):
    first, second = torch.rand(2, 100_000).clamp_(min=2**-25)
    even, odd = torch.empty_like(first), torch.empty_like(first)
    compiled.pairs(pointer(first), pointer(second), len(first), pointer(even), pointer(odd))
    for found, expected in zip((even, odd), normal_pairs(first, second), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
