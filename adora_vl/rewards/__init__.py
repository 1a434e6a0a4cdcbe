"""Grading answers and turning verdicts into rewards.

The first answer that needs mpmath imports it.
"""

from adora_vl.rewards.choose import RewardSet, choose_rewards, reward_function, try_rewards
from adora_vl.rewards.grade import Grade, grade, grade_batch, verify_gold
from adora_vl.rewards.presets import PRESETS
from adora_vl.rewards.structured import canonical_gold

__all__ = [
    "PRESETS",
    "Grade",
    "RewardSet",
    "canonical_gold",
    "choose_rewards",
    "grade",
    "grade_batch",
    "reward_function",
    "try_rewards",
    "verify_gold",
]
