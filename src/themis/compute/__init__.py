"""Arithmetic of our own: counter-based randomness, the C library, and GPU kernels."""
