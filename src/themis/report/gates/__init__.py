"""Gates: limits on what a campaign may find, and their results for CI systems and pytest."""
