"""Evidence about a run for auditors, in standard formats."""
