"""Robustness tests in the pytest suite of a project."""
