"""What people see of a run: the HTML report, the live page, progress in the terminal, and gates."""
