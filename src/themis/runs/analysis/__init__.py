"""Analysing a finished run: shrinking, grouping and comparing faults, robustness, reviews, rates in operation."""
