"""The paper's evaluation of models, perturbations and techniques, as one resumable experiment with one page."""
