"""Files for a new project: a configuration, and a test for pytest."""
