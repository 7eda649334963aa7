"""Pages for a browser on this machine: a run while it is written, and faults to mark."""
