"""Checkpoints that are whole or ignored, and what a run needs to go on exactly where it stopped."""
