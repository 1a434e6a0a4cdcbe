"""Grading answers and turning verdicts into rewards. Standard library only, so that importing it costs nothing; sympy
is imported in worker processes alone.
"""

from adora_vl.rewards.canonical import canonical_gold
from adora_vl.rewards.chosen import ChosenRewards, choose_rewards, try_rewards
from adora_vl.rewards.grade import Grade, grade, grade_batch, verify_gold
from adora_vl.rewards.presets import PRESETS, reward_function, reward_functions

__all__ = [
    "PRESETS",
    "ChosenRewards",
    "Grade",
    "canonical_gold",
    "choose_rewards",
    "grade",
    "grade_batch",
    "reward_function",
    "reward_functions",
    "try_rewards",
    "verify_gold",
]
