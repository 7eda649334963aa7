"""Models of other frameworks."""
