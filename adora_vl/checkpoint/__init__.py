"""Checkpoints that are either whole or ignored, and what a run needs to resume exactly where it
stopped.
"""
