"""Knights and knaves: the puzzles of `python -m data_prep knights`, for text-only policies."""
