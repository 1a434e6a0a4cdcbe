"""Checkpoints that are complete or do not count, and what a run needs to go on exactly where it was."""

from adora_vl.checkpoint.store import Found, newest_valid, problem_of, publish, rotate

__all__ = ["Found", "newest_valid", "problem_of", "publish", "rotate"]
