"""Where the tests of GPU kernels run: on a GPU, or else on the CPU, in Triton's interpreter.

The interpreter is much slower than a GPU, so that cases are smaller there.
"""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")

with pytest.MonkeyPatch.context() as patch:
    if not HAS_GPU:
        patch.setenv("TRITON_INTERPRET", "1")  # only here: processes that tests start need no Triton
    from themis.compute.gpu import triton
if triton is not None and not HAS_GPU:
    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True

needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
needs_triton = pytest.mark.skipif(triton is None, reason="needs Triton")
