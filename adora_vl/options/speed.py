"""What is computed once instead of G times. Each key gives stock TRL's way back when it is false."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass
class SpeedOptions:
    """Switches of the step's work; none changes what is learned, docs/speed.md states how exact each one is."""

    adora_cache_images: bool = field(
        default=True,
        metadata={"help": "Decode and process each distinct image once, for the trainer and vLLM alike."},
    )
    adora_image_cache_mb: int = field(
        default=1024, metadata={"help": "Processed images kept over steps and epochs, in MB a process."}
    )
    adora_group_requests: bool = field(
        default=True, metadata={"help": "Ask vLLM once a prompt for n rollouts, not once a rollout."}
    )
    adora_share_vision: bool = field(
        default=True,
        metadata={"help": "One vision pass a distinct image; once a generation batch where vision is frozen."},
    )
    adora_share_prompt: bool = field(
        default=True,
        metadata={"help": "Compute a group's prompt once and let its rollouts attend to it, where that is less work."},
    )
    adora_skip_old_pass: bool = field(
        default=True,
        metadata={"help": "No separate pass for the old log-probabilities where the policy's own are the same."},
    )
    adora_skip_zero_signal: bool = field(
        default=True, metadata={"help": "Leave groups out of the policy step whose advantages are all zero."}
    )
    adora_spread_signal: bool = field(
        default=True,
        metadata={"help": "Move groups with signal between processes, so that each takes as many through the step."},
    )
    adora_dynamic_sampling: int = field(
        default=0,
        metadata={
            "help": "DAPO's dynamic sampling: sample up to this many further batches a generation, to replace groups "
            "whose advantages are all zero."
        },
    )
    adora_less_padding: bool = field(
        default=True, metadata={"help": "Micro-batches of like length, without columns of padding."}
    )


SWITCHES = tuple(key.name for key in fields(SpeedOptions) if key.type == "bool")


def stock_work() -> dict[str, bool]:
    """Settings under which a step does what stock TRL does, as often as it does."""
    return dict.fromkeys(SWITCHES, False)
