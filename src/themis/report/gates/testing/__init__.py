"""What the pytest plugin imports when a robustness test runs: the test, its run folder and its messages."""
