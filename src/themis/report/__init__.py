"""Showing results to a person."""
