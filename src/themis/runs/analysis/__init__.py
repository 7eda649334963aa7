"""What can be learned from a finished run: shrinking, grouping and locating faults, robustness."""
