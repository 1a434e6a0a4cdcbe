"""Checkpoints that are complete or do not count, and what a run needs to go on exactly where it was."""
