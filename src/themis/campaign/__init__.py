"""The loop that joins measuring, judging and searching."""
