"""Advantages and their weights as pure functions on tensors. Imports torch and nothing else.

Shape suffixes used throughout the project:

====  =============================================
`P`   prompts of a generation batch
`G`   rollouts of a prompt (a group)
`M`   bins of pass rate, G - 1 of them
`B`   sequences of a batch, `B = P * G` on one rank
`T`   tokens of a sequence
`C`   tokens of a completion
====  =============================================

`methods.METHODS` is the register of the family; each method is a file with its formula and its source.
"""

from adora_vl.advantage.adora import AdoraWeighting, adora_weights, weigh_groups
from adora_vl.advantage.groups import Groups
from adora_vl.advantage.grpo import group_advantages, is_constant
from adora_vl.advantage.methods import METHODS, Method
from adora_vl.advantage.run import MethodRun
from adora_vl.advantage.schedule import Schedule, constant

__all__ = [
    "METHODS",
    "AdoraWeighting",
    "Groups",
    "Method",
    "MethodRun",
    "Schedule",
    "adora_weights",
    "constant",
    "group_advantages",
    "is_constant",
    "weigh_groups",
]
