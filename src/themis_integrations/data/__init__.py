"""Readers of third-party data formats."""
