"""Experiments of many campaigns: comparisons of techniques, and retraining. Both are run by `runner`."""
