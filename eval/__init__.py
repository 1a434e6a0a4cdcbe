"""Evaluation: one runner (engine, resume), one module a benchmark, and scores that say how they were made."""
