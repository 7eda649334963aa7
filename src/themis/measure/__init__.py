"""Phase 1, measure: run clean and disturbed inputs, fold the sensitivities into moments, find the faults."""
