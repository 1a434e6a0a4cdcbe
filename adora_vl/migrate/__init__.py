"""A config of another trainer as one of ours: `python -m adora_vl.migrate TRAINER CONFIG`.

Every value names where it came from, also defaults of theirs that stand in no file, and what has no
counterpart is listed with what that means. The result is a beginning to look through, not a promise
of equal runs. There is a file for each trainer.
"""

from adora_vl.migrate.command import convert_config, main
from adora_vl.migrate.config_text import yaml_text
from adora_vl.migrate.migration import Migration

__all__ = ["Migration", "convert_config", "main", "yaml_text"]
