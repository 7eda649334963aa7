"""Comparisons of techniques at equal cost: same seeds, passes and random seeds, judged on seeds that none has used."""
