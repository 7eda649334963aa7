"""Retraining a model on the faults of a run, and contests of techniques by what a model learns from their tests."""
