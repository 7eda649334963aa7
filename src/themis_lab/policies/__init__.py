"""Search policies for comparisons."""
