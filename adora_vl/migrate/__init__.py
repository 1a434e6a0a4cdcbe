"""A config of another trainer as one of ours: `python -m adora_vl.migrate TRAINER CONFIG`.

Every value names where it came from, also defaults of theirs that stand in no file, and what has no
counterpart is listed with what that means. The result is a beginning to look through, not a promise
of equal runs. There is a file for each trainer.
"""

from adora_vl.migrate.command import main

__all__ = ["main"]
