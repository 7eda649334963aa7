"""Published files of corrupted pictures, as data and as suites that grade a model."""
