"""Advantages and their weights, as pure functions on tensors.

This package depends on torch alone.

Shape suffixes used throughout the project:

====  =============================================
`P`   prompts in a generation batch
`G`   rollouts per prompt, which form a group
`M`   bins by pass rate, `M = G - 1`
`B`   sequences in a batch, `B = P * G` on one rank
`T`   tokens in a sequence
`C`   tokens in a completion
====  =============================================

`methods.METHODS` lists the methods by name. Each has its formula and its source; docs/examples/ has
further ones as files of a user's own.
"""

from adora_vl.advantage.adora import Adora, AdoraWeighting, weigh_groups
from adora_vl.advantage.groups import Groups, Schedule
from adora_vl.advantage.grpo import group_advantages, is_constant
from adora_vl.advantage.method import Method, option
from adora_vl.advantage.methods import METHODS, AdvantagePipeline

__all__ = [
    "METHODS",
    "Adora",
    "AdoraWeighting",
    "AdvantagePipeline",
    "Groups",
    "Method",
    "Schedule",
    "group_advantages",
    "is_constant",
    "option",
    "weigh_groups",
]
