"""What a run does about steps and reward functions that go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FaultOptions:
    """When a step is skipped, and when the run is stopped."""

    adora_max_bad_steps: int = field(
        default=3,
        metadata={
            "help": "Stop after this many steps in a row that were skipped: gradients not finite, or a ratio above "
            "adora_max_ratio."
        },
    )
    adora_max_ratio: float | None = field(
        default=1000.0,
        metadata={
            "help": "Skip a step with a larger importance ratio of new to old policy (per token, or per sequence with "
            "importance_sampling_level: sequence); null: never."
        },
    )
    adora_reward_timeout: float | None = field(
        default=300.0,
        metadata={
            "help": "Seconds that a reward function of your own may take for the completions of one generation on one "
            "process, before the run is stopped; null: no limit."
        },
    )
