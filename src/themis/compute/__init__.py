"""Counter-based randomness, and the compiled functions for the CPU and the GPU."""
