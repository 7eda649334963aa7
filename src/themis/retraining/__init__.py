"""Retraining a model on the faults of a run."""
