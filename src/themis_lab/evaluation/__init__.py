"""The paper's evaluation: many models, perturbations and techniques in one resumable experiment, and one page."""
