"""What is computed once instead of G times. Each key gives stock TRL's way back when it is false."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from adora_vl.errors import UserError

# Losses whose sum over a generation does not depend on which rows share a micro-batch. bnpo divides each micro-batch by
# its own tokens.
REGROUPABLE = frozenset({"grpo", "dr_grpo", "dapo", "sapo", "cispo", "luspo", "vespo"})


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
    adora_batch_windows: bool = field(
        default=True,
        metadata={"help": "Attend to all windows of one size at once in the vision tower, with sdpa attention."},
    )
    adora_share_prompt: bool = field(
        default=True,
        metadata={"help": "Compute a group's prompt once and let its rollouts attend to it."},
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


def regroups(options: SpeedOptions) -> bool:
    """Whether any switch wants micro-batches of whole groups instead of TRL's shuffled rows."""
    wanted = options.adora_share_vision or options.adora_share_prompt or options.adora_skip_zero_signal
    return wanted or options.adora_less_padding or options.adora_dynamic_sampling > 0


def regroup_obstacle(config: Any) -> str:
    """The setting whose loss depends on which rows share a micro-batch; empty where none does."""
    if config.loss_type not in REGROUPABLE:
        return f"loss_type: {config.loss_type}"
    if config.top_entropy_quantile < 1:  # of each micro-batch's tokens
        return f"top_entropy_quantile: {config.top_entropy_quantile}"
    return ""


def check_speed(config: Any) -> None:
    """Raises `UserError`."""
    tries, rows = config.adora_dynamic_sampling, config.per_device_train_batch_size * config.steps_per_generation
    if tries and rows % config.num_generations:
        raise UserError(
            f"adora_dynamic_sampling: {tries} needs whole groups on every process, but one samples {rows} rollouts at "
            f"a time and num_generations is {config.num_generations}; make per_device_train_batch_size a multiple of "
            "it, or set adora_dynamic_sampling: 0"
        )
    obstacle = regroup_obstacle(config)
    if tries and obstacle:
        raise UserError(
            f"adora_dynamic_sampling: {tries} does not go with {obstacle}, which depends on the rows of a micro-batch; "
            f"set adora_dynamic_sampling: 0, or top_entropy_quantile: 1.0 and a loss_type of "
            f"{', '.join(sorted(REGROUPABLE))}"
        )


SWITCHES = tuple(key.name for key in fields(SpeedOptions) if key.type == "bool")


def stock_work() -> dict[str, bool]:
    """Settings under which a step does what stock TRL does, as often as it does."""
    return dict.fromkeys(SWITCHES, False)
