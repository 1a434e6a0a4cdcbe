"""Grading answers and turning verdicts into rewards. Standard library only, so that importing it costs nothing."""

from adora_vl.rewards.canonical import canonical_gold
from adora_vl.rewards.grade import Grade, grade, verify_gold
from adora_vl.rewards.presets import PRESETS, reward_function

__all__ = ["PRESETS", "Grade", "canonical_gold", "grade", "reward_function", "verify_gold"]
