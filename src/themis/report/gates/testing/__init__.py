"""What the pytest plugin imports when a robustness test runs: the campaign, its folder, its gates and its words."""
