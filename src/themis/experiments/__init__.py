"""Many campaigns: comparisons of techniques, and retraining."""
