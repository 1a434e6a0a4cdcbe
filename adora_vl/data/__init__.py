"""A row, its prompt and its pictures; a prepared data set on disk; the rows of a run."""
