"""Presenting runs: the HTML report, progress in the terminal, tables, trackers and gates."""
