"""Where a run takes place, and what the checks before it say to the user."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from adora_vl.config.dry_run_options import DryRunOptions, planned_sharding
from adora_vl.config.sharding import (
    Sharding,
    refuse_second_deepspeed,
    sharding_from_environment,
    with_deepspeed,
)

if TYPE_CHECKING:
    from adora_vl.config.schema import AdoraGRPOConfig

_OTHER_MACHINE_NOTE = (
    "the run is for another machine, so packages, trackers, servers, attention kernel, weights "
    "and output_dir were not looked at"
)
OutputDirMode = Literal["lock", "inspect", "ignore"]


@dataclass(frozen=True, kw_only=True)
class CheckMessages:
    """What the checks say to the user, in their order.

    `notes`: lines about the run, printed before it starts. `unchecked`: lines about what could not
    be checked; only a dry run has any. `refusals`: what a run would stop with, where a dry run goes
    on to predict its memory.
    """

    notes: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunContext:
    """Where a run takes place, and so what the checks before it may look at.

    `on_this_machine`: whether this machine will run it. If not, its packages, device, servers and
    folders are not checked. `sharding`: how the run is spread over processes. `output_dir_mode`:
    whether `output_dir` is locked for the run (`lock`), only looked at (`inspect`) or left alone
    (`ignore`). `dry_run`: whether nothing will run. Then what this machine lacks is reported as
    unknown, and not refused. `messages`: what the checks say to the user; each check adds its
    lines.
    """

    on_this_machine: bool
    sharding: Sharding
    output_dir_mode: OutputDirMode
    dry_run: bool = False
    messages: CheckMessages = field(default_factory=CheckMessages)

    @classmethod
    def of_launch(cls, config: AdoraGRPOConfig, *, output_dir_mode: OutputDirMode) -> RunContext:
        """Return the context of a run on this machine, spread over processes as it was launched.

        Args:
            config: The training keys, which say whether DeepSpeed divides the run.
            output_dir_mode: Whether `output_dir` is locked (`lock`), only looked at (`inspect`) or
                left alone (`ignore`).

        Raises `UserError` for FSDP, which is not supported.
        """
        return cls(
            on_this_machine=True,
            sharding=with_deepspeed(sharding_from_environment(), config.deepspeed_plugin),
            output_dir_mode=output_dir_mode,
            dry_run=False,
        )

    @classmethod
    def of_dry_run(
        cls, config: AdoraGRPOConfig, options: DryRunOptions, *, on_this_machine: bool
    ) -> RunContext:
        """Return the context of a dry run.

        Args:
            config: The training keys, which say whether DeepSpeed divides the run.
            options: Those of `--dry-run`.
            on_this_machine: Whether it plans for this machine.

        Raises `UserError` for FSDP, which is not supported, and where both the key and the
        accelerate config set up DeepSpeed.
        """
        sharding = planned_sharding(options)
        refuse_second_deepspeed(config.deepspeed, launch_has_stage=sharding.zero_stage is not None)
        # An accelerate config says itself what DeepSpeed divides. Without one, the key `deepspeed`
        # may start it.
        if config.deepspeed or options.accelerate_config is None:
            sharding = with_deepspeed(sharding, config.deepspeed_plugin)
        return cls(
            on_this_machine=on_this_machine,
            sharding=sharding,
            output_dir_mode="inspect" if on_this_machine else "ignore",
            dry_run=True,
            messages=CheckMessages(unchecked=[] if on_this_machine else [_OTHER_MACHINE_NOTE]),
        )
