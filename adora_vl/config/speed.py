"""What is computed once instead of G times. Setting a key to false restores what stock TRL does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from adora_vl.errors import UserError

# Losses whose sum over a generation does not depend on which rows share a micro-batch. bnpo is not among them, because
# it divides each micro-batch by its own number of tokens.
REGROUPABLE = frozenset({"grpo", "dr_grpo", "dapo", "sapo", "cispo", "luspo", "vespo"})


@dataclass
class SpeedOptions:
    """Switches for the work of a step. None changes what is learned; docs/speed.md says how exact each one is."""

    adora_cache_images: bool = field(
        default=True,
        metadata={"help": "Decode and process each distinct image once, for the trainer and vLLM alike."},
    )
    adora_image_cache_mb: int = field(
        default=1024, metadata={"help": "Cache of processed images, kept over steps and epochs, in MB per process."}
    )
    adora_prefetch_images: bool | None = field(
        default=None,
        metadata={
            "help": "Read and process the next generation's images on a thread while the policy learns; null: where "
            "the policy is on a GPU."
        },
    )
    adora_group_requests: bool = field(
        default=True, metadata={"help": "Send one request per prompt to vLLM, instead of one per rollout."}
    )
    adora_share_vision: bool = field(
        default=True,
        metadata={"help": "Run the vision tower once per distinct image; once per generation batch if it is frozen."},
    )
    adora_batch_windows: bool = field(
        default=True,
        metadata={"help": "In the vision tower attend to all windows of one size in one call; sdpa attention only."},
    )
    adora_share_prompt: bool = field(
        default=True,
        metadata={"help": "Compute a group's prompt once and let its rollouts attend to it, without padding."},
    )
    adora_skip_old_pass: bool = field(
        default=True,
        metadata={"help": "Skip the pass for the old log-probabilities where they equal the policy's own."},
    )
    adora_skip_zero_signal: bool = field(
        default=True, metadata={"help": "Leave out of the policy step groups whose advantages are all zero."}
    )
    adora_spread_signal: bool = field(
        default=True,
        metadata={"help": "Move groups with signal between processes, so that each has as many in the policy step."},
    )
    adora_dynamic_sampling: int = field(
        default=0,
        metadata={
            "help": "DAPO's dynamic sampling: sample up to this many further batches per generation, to replace groups "
            "whose advantages are all zero."
        },
    )


def regroups(options: SpeedOptions) -> bool:
    """Whether any switch wants micro-batches of whole groups instead of TRL's shuffled rows."""
    wanted = options.adora_share_vision or options.adora_share_prompt or options.adora_skip_zero_signal
    return wanted or options.adora_dynamic_sampling > 0 or getattr(options, "adora_replay_groups", 0) > 0


def regroup_obstacle(config: Any) -> str:
    """The setting, if any, that makes the loss depend on which rows share a micro-batch; otherwise empty."""
    if config.loss_type not in REGROUPABLE:
        return f"loss_type: {config.loss_type}"
    if config.top_entropy_quantile < 1:  # of each micro-batch's tokens
        return f"top_entropy_quantile: {config.top_entropy_quantile}"
    return ""


def check_speed(config: Any) -> None:
    """Check the switches against the other keys. Raises `UserError`."""
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
    """Settings with which a step does the same work as stock TRL, without sharing any of it."""
    return dict.fromkeys(SWITCHES, False)
