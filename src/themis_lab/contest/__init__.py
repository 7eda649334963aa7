"""Contests of techniques by what a model learns from the inputs that each of them chooses."""
