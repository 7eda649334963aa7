"""Readers of data in other people's formats."""
