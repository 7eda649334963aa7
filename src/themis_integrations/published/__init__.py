"""Published files of corrupted pictures: as data, and as suites on which a model is graded."""
