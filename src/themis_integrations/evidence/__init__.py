"""Evidence about a run for an auditor, in formats that other programs read."""
