"""Sea trials: an example of a package that adds to Themis."""
