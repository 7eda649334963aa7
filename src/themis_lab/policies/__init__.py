"""Search policies to compare with."""
