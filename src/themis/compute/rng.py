"""Counter-based randomness: every number is a function of a key and a counter, never of earlier draws by others.

The noise of a test is therefore the same in every batch, on every worker, and when the test is replayed.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from themis.compute import gpu, native

BELOW_ONE = 1 - 2.0**-24
"""The largest float32 below 1."""
FRAME_STEP = 0x1E3779B97F4A7C15
"""Difference of the noise seeds of consecutive frames, in both of their halves."""
LOGARITHM = (
    *(1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1),
    3.3333331174e-1,
)
"""Coefficients of the polynomial for the logarithm, after the first two."""
_UINT64 = (1 << 64) - 1


def host_randomness() -> bytes:
    """The states of the random number generators of torch, Python and NumPy that programs share; a GPU has its own."""
    return pickle.dumps((torch.get_rng_state().numpy(), random.getstate(), np.random.get_state()))


def mix(*words: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """A 63-bit hash of integers and integer arrays, elementwise, with SplitMix64 as the mixer."""
    return _mixed(words, is_uniform=False)


def uniform(*words: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), a function of the words only."""
    return _mixed(words, is_uniform=True)


def _mixed(words: tuple[int | NDArray[np.int64], ...], *, is_uniform: bool) -> NDArray[Any]:
    prefix, rest = _mix_prefix(words)
    if rest and (library := native.library()) is not None:
        return native.mix(library, prefix, list(map(_as_array, rest)), is_uniform=is_uniform)
    mixed = mix_in_numpy(prefix, rest)
    return (mixed >> 10).astype(np.float64) * 2.0**-53 if is_uniform else mixed


def mix_in_numpy(prefix: int, words: Sequence[int | NDArray[np.int64]]) -> NDArray[np.int64]:
    """The same, given the hash of the words before; without the C library."""
    state = np.array(prefix, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for word in words:
            value = np.uint64(word & _UINT64) if isinstance(word, int) else np.asarray(word).astype(np.uint64)
            state = np.asarray(state ^ value)
            state += np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = np.asarray(state ^ (state >> np.uint64(31)))
    return (state >> np.uint64(1)).astype(np.int64)


def _mix_prefix(words: tuple[int | NDArray[np.int64], ...]) -> tuple[int, tuple[int | NDArray[np.int64], ...]]:
    """The hash of the leading integers, which is the same for all elements, and the words after them."""
    prefix = 0
    for k, word in enumerate(words):
        if not isinstance(word, int):
            return prefix, words[k:]
        prefix = _mix_scalar(prefix ^ (word & _UINT64))
    return prefix, ()


def prefix(*words: int) -> int:
    """The hash of integers that others follow."""
    return _mix_prefix(words)[0]


def _as_array(word: int | NDArray[np.int64]) -> NDArray[np.int64]:
    """A word as an array of 64-bit integers."""
    return np.asarray(word & _UINT64 if isinstance(word, int) else word).astype(np.uint64).view(np.int64)


@lru_cache(maxsize=256)
def _mix_scalar(state: int) -> int:
    """One step of SplitMix64 for a single number."""
    state = (state + 0x9E3779B97F4A7C15) & _UINT64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _UINT64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _UINT64
    return state ^ (state >> 31)


class Rng:
    """Noise for a batch of tests: row `k` depends on `noise_seed[k]` and on how much was drawn before it."""

    def __init__(self, noise_seed: Tensor, drawn: int = 0) -> None:
        self.noise_seed = noise_seed
        self.drawn = drawn
        """How many numbers have been drawn for each test; set it to continue from another number."""
        self._native = native.library() if noise_seed.device.type == "cpu" else None

    def by_frame(self, frames: int, *, is_new: bool) -> Rng:
        """Noise for each frame of the tests' clips, `[tests * frames, ...]`: new in each frame, or the same in all."""
        seed = self.noise_seed[:, None].expand(-1, frames)
        if is_new:
            seed = seed + torch.arange(frames, device=seed.device) * FRAME_STEP
        return Rng(seed.flatten(), self.drawn)

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        # Two 32-bit halves, because int32 arithmetic wraps, vectorises on CPUs and is the same on every device.
        seed = self.noise_seed
        return seed.to(torch.int32).contiguous(), (seed >> 32).to(torch.int32).contiguous()

    def uniform(self, *shape: int) -> Tensor:
        """Uniform noise in (0, 1), float32 `[tests, *shape]`."""
        n = math.prod(shape)
        if self._native is not None:
            out = torch.empty(len(self.noise_seed), n, dtype=torch.float32)
            self._native.themis_uniform(self.noise_seed.contiguous(), len(out), self.drawn, n, out)
            self.drawn += n
            return out.view(-1, *shape)
        low, high = self._halves
        counter = torch.arange(self.drawn, self.drawn + n, dtype=torch.int32, device=low.device)
        self.drawn += n
        if (fused := gpu.uniform_kernel(low.device)) is not None:
            bits: Tensor = fused(counter, low[:, None], high[:, None])
            return bits.view(torch.float32).view(-1, *shape)
        # Well-mixed 32-bit words: a Weyl sequence from the low half, hashed with the high half.
        x = counter.mul_(-1640531527) + low[:, None]  # 2**32 / golden ratio, as a signed word
        x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
        x.add_(high[:, None])
        x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(-749065833)  # 0xD35A2997
        x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
        return (x >> 8).bitwise_and_(0xFFFFFF).float().add_(0.5).mul_(2.0**-24).clamp_(max=BELOW_ONE).view(-1, *shape)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal noise, float32 `[tests, *shape]`, by the Box-Muller transform."""
        n = math.prod(shape)
        half = (n + 1) // 2
        if self._native is not None:
            out = torch.empty(len(self.noise_seed), n, dtype=torch.float32)
            self._native.themis_normal(self.noise_seed.contiguous(), len(out), self.drawn, n, None, None, out)
            self.drawn += 2 * half
            return out.view(-1, *shape)
        u = self.uniform(2 * half)
        make_pairs = gpu.pairs_kernel(u.device) or normal_pairs
        return torch.cat(make_pairs(u[:, :half], u[:, half:]), 1)[:, :n].reshape(len(u), *shape)

    def add_normal(self, inputs: Tensor, sigma: Tensor) -> Tensor:
        """`inputs [tests, ...]` plus standard normal noise times `sigma [tests]`."""
        is_plain = inputs.dtype == sigma.dtype == torch.float32 and inputs.is_contiguous() and len(inputs)
        if self._native is not None and is_plain and not (inputs.requires_grad or sigma.requires_grad):
            sigma, out, n = sigma.contiguous(), torch.empty_like(inputs), inputs[0].numel()
            native.expect((len(inputs),), self.noise_seed, sigma)
            at = native.SINGLE.address(sigma), native.SINGLE.address(inputs)
            self._native.themis_normal(self.noise_seed.contiguous(), len(inputs), self.drawn, n, *at, out)
            self.drawn += n + n % 2
            return out
        noise, sigma = self.normal(*inputs.shape[1:]), sigma.view(-1, *(1,) * (inputs.ndim - 1))
        if sigma.requires_grad or noise.dtype != inputs.dtype:
            return inputs + noise * sigma
        return noise.mul_(sigma).add_(inputs)  # the same numbers without two copies of the inputs


def normal_pairs(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of standard normal numbers from pairs of uniform ones in (0, 1), float32.

    Logarithm, sine and cosine are polynomials (those of Cephes), because every library rounds its own in another way:
    sums and products, one after the other, are the same on every CPU.
    """
    bits = first.contiguous().view(torch.int32)
    exponent = (bits - 0x3F3504F3) >> 23  # of the mantissa between the roots of 1/2 and 2
    f = (bits - (exponent << 23)).view(torch.float32) - 1
    power, square = exponent.float(), f * f
    y = f * 7.0376836292e-2 - 1.1514610310e-1
    for term in LOGARITHM:
        y = y * f + term
    y = y * f * square - power * 2.12194440e-4 - square * 0.5
    radius = ((f + y + power * 0.693359375) * -2).double().sqrt().float()  # the nearest number, as in C
    turn = second * 4
    quarter = (turn + 0.5).int()
    angle = (turn - quarter.float()) * 1.57079632679
    z = angle * angle
    cosine = ((z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z - z * 0.5 + 1
    sine = ((z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1) * z * angle + angle
    is_odd = (quarter & 1).bool()
    even = radius * torch.where(is_odd, sine, cosine) * (1 - ((quarter + 1) & 2))
    return even, radius * torch.where(is_odd, cosine, sine) * (1 - (quarter & 2))
