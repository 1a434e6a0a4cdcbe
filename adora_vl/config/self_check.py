"""Checks before the first step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CheckOptions:
    """A part of `AdoraGRPOConfig`."""

    adora_self_check: bool = field(
        default=True,
        metadata={
            "help": "Before the first step, compare engine and trainer on two prompts and refuse to train if they "
            "disagree; false skips this check. `python -m adora_vl.doctor` checks more."
        },
    )
