"""Shared parts of benchmarks/search.py and benchmarks/retrain.py."""
