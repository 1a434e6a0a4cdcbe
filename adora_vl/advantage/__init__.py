"""Advantages and their weights, as pure functions on tensors. This package depends on torch alone.

Shape suffixes used throughout the project:

====  =============================================
`P`   prompts in a generation batch
`G`   rollouts per prompt, which form a group
`M`   bins by pass rate, `M = G - 1`
`B`   sequences in a batch, `B = P * G` on one rank
`T`   tokens in a sequence
`C`   tokens in a completion
====  =============================================

`methods.METHODS` lists the methods by name. Each method has a file of its own with its formula and its source.
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
