"""Evaluation: a runner with engines and resuming, one file per benchmark, and scores that say how
they were made.
"""
