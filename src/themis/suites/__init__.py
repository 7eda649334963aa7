"""Suites: one model under many perturbations, with one folder, one budget and one report."""
