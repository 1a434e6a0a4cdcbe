"""Evaluation: a runner with engines and resuming, one package per benchmark, and scores that say how they were made."""
