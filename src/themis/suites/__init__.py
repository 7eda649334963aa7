"""Suites: many perturbations of one model in one folder, with one budget and one report."""
