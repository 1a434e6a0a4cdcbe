"""Advantages and ADORA weights as pure functions on tensors. Imports torch and nothing else.

Shape suffixes used throughout the project:

====  =============================================
`P`   prompts of a generation batch
`G`   rollouts of a prompt (a group)
`B`   sequences of a batch, `B = P * G` on one rank
`T`   tokens of a sequence
`C`   tokens of a completion
====  =============================================
"""

from adora_vl.advantage.adora import AdoraWeighting, adora_weights, weigh_groups
from adora_vl.advantage.grpo import group_advantages, is_constant

__all__ = ["AdoraWeighting", "adora_weights", "group_advantages", "is_constant", "weigh_groups"]
