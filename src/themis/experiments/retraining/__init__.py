"""Retraining: a model learns from its faults, and is judged by seeds that it never saw."""
