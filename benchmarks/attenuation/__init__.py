"""A text task whose answers are guesses or chains, in four regimes, and one arm trained on it.

Question, design and results stand in docs/experiments.md.
"""
