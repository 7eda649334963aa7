"""Pages that are served to a browser of this machine: a run while it is written, and faults to be marked."""
