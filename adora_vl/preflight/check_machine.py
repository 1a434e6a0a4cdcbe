"""Checks of batches, schedule and optimizer, and of the machines that are to run the training."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeGuard

import torch
from accelerate.utils import parse_flag_from_env
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import Trainer, get_scheduler

from adora_vl.config.batch_plan import BatchLayout, build_batch_layout
from adora_vl.config.sharding import FSDP_IS_UNSUPPORTED
from adora_vl.record.trackers import check_trackers
from adora_vl.utils.cli import enum_value
from adora_vl.utils.convert import check_finite
from adora_vl.utils.errors import UserError, describe_error
from adora_vl.utils.hub import hub_unavailable_reason
from adora_vl.utils.open_files import check_open_files

if TYPE_CHECKING:
    from adora_vl.config import AdoraGRPOConfig
    from adora_vl.config.run_context import RunContext
    from adora_vl.config.sharding import Sharding

# Optimizer steps of a schedule whose length is not known yet. Unless its warmup is given in steps,
# the curve is the same for every length.
TRIAL_SCHEDULE_STEPS = 1000
# Optimizers that cannot be tried without a model.
_OPTIMIZERS_THAT_NEED_A_MODEL = (
    "galore",
    "apollo",
    "lomo",
    "adalomo",
)


def check_batches(config: AdoraGRPOConfig, sharding: Sharding) -> BatchLayout:
    """Return the sizes of a run's batches, and check that its machines can compute them.

    `sharding`: how the run is spread over processes and machines. Raises `UserError`.
    """
    check_several_machines(config, processes=sharding.processes, machines=sharding.machines)
    return build_batch_layout(config, sharding.processes)


def check_machine(config: AdoraGRPOConfig, context: RunContext) -> None:
    """Raise `UserError` if this machine lacks the optimizer, the trackers or access to the hub.

    The same holds if it allows too few open files, or if accelerate was launched so that the key
    `deepspeed` does nothing. A dry run for another machine checks none of it.
    """
    if not context.on_this_machine:
        return
    # Without this the model would be trained undivided, or under ZeRO-3 be loaded in shards.
    if config.deepspeed and parse_flag_from_env("ACCELERATE_USE_CPU"):
        raise UserError(
            "deepspeed: accelerate was launched with use_cpu: true, and does not start DeepSpeed "
            "then; leave the key out, and launch with configs/accelerate/cpu_zero3.yaml"
        )
    if config.use_vllm or context.sharding.processes > 1:
        check_open_files()
    check_optimizer(config)
    check_trackers(config.report_to)
    # Checked here, since Transformers creates the repository only after the weights are loaded.
    offline_reason = hub_unavailable_reason() if config.push_to_hub else None
    if offline_reason:
        raise UserError(
            f"push_to_hub: true, but {offline_reason}; set it to false and upload output_dir "
            "afterwards"
        )


def build_lr_schedule(config: AdoraGRPOConfig, optimizer_steps: int) -> LRScheduler:
    """Build the learning rate's schedule of a run with `optimizer_steps` optimizer steps.

    The optimizer behind it has a single parameter, and is there for the schedule alone.
    """
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule: LRScheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.get_warmup_steps(optimizer_steps),
        num_training_steps=optimizer_steps,
        scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )
    return schedule


def depends_only_on_step(schedule: LRScheduler) -> TypeGuard[LambdaLR]:
    """Return whether a schedule's learning rate depends on the step alone.

    Some schedules, such as reduce_lr_on_plateau, depend on how the training goes.
    """
    return isinstance(schedule, LambdaLR)


def check_schedule(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for `lr_scheduler_kwargs` that the schedule refuses or does not read.

    The schedule is built, and asked for the rate in the middle of the run.
    """
    name = enum_value(config.lr_scheduler_type)
    optimizer_steps = config.max_steps if config.max_steps > 0 else TRIAL_SCHEDULE_STEPS
    kwargs = dict(config.lr_scheduler_kwargs or {})
    check_finite("lr_scheduler_kwargs", kwargs)
    # Transformers ignores them for these schedules.
    if kwargs and name.startswith("constant"):
        raise UserError(
            f"lr_scheduler_kwargs: {kwargs} has no meaning for lr_scheduler_type: {name}; leave it "
            "out"
        )
    try:
        schedule = build_lr_schedule(config, optimizer_steps)
        # Other schedules, such as reduce_lr_on_plateau, have no function of the step to try.
        if depends_only_on_step(schedule):
            schedule.lr_lambdas[0](optimizer_steps // 2)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        reason = f"does not fit lr_scheduler_type: {name} ({describe_error(error)})"
        raise UserError(f"lr_scheduler_kwargs: {kwargs} {reason}") from error


def check_optimizer(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for an optimizer that is not installed, or that refuses its arguments.

    Liger's kernels have to be installed too, if the config asks for them.
    """
    if config.use_liger_kernel and find_spec("liger_kernel") is None:
        raise UserError(
            "use_liger_kernel: true is not installed here; pip install liger-kernel, or leave it "
            "out"
        )
    _check_optimizer_arguments(config.optim_args or "")
    name = enum_value(config.optim)
    try:
        optimizer_class, kwargs = Trainer.get_optimizer_cls_and_kwargs(config)
        # Transformers may return a function in place of a class; then nothing is tried.
        if isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer):
            optimizer_class([torch.nn.Parameter(torch.zeros(1))], **kwargs)
    except ImportError as error:
        raise UserError(
            f"optim: {name} is not installed ({describe_error(error)}); use adamw_torch"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        # An optimizer that needs a model fails here without one, which says nothing against it.
        if not name.startswith(_OPTIMIZERS_THAT_NEED_A_MODEL):
            raise UserError(
                f"optim: {name} cannot be used here ({describe_error(error)}); use adamw_torch"
            ) from error
    _refuse_unread_optimizer_arguments(config)


def _check_optimizer_arguments(optim_args: str) -> None:
    """Raise `UserError` unless `optim_args` is a list such as `beta=0.9,eps=1e-8`.

    NaN and infinity are refused too.
    """
    if not optim_args:
        return
    for pair in optim_args.replace(" ", "").split(","):
        name, _, value = pair.partition("=")
        is_finite = value.lower().lstrip("+-") not in ("nan", "inf", "infinity")
        if not name or not value or not is_finite:
            raise UserError(
                f"optim_args: {optim_args!r} is not NAME=VALUE,NAME=VALUE with finite numbers"
            )


def _refuse_unread_optimizer_arguments(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` for an entry of `optim_args` that the optimizer does not read.

    Transformers ignores such an entry. It is found by trying (`_is_read`). Nothing can be tried
    where Transformers refuses the other entries alone, as it does for optimizers that need a model.
    """
    pairs = [pair for pair in (config.optim_args or "").replace(" ", "").split(",") if pair]
    for pair in pairs:
        remaining_pairs = [remaining for remaining in pairs if remaining != pair]
        if _optimizer_arguments(config, remaining_pairs) is None:
            continue
        argument = pair.partition("=")[0]
        if not _is_read(argument, remaining_pairs, config):
            name = enum_value(config.optim)
            raise UserError(
                f"optim_args: {argument} is nothing that optim: {name} reads; leave it out (adam_beta1, "
                "adam_beta2, adam_epsilon, weight_decay and learning_rate are keys)"
            )


def _is_read(argument: str, other_pairs: Sequence[str], config: AdoraGRPOConfig) -> bool:
    """Return whether the optimizer reads an argument of `optim_args`.

    The argument is tried with two values that no optimizer has by default. It is read if one of
    them changes the optimizer's arguments, or is refused.

    `other_pairs`: the other entries of `optim_args`, such as `eps=1e-8`.
    """
    arguments_before = _optimizer_arguments(config, other_pairs)
    for value in ("?", "true"):
        tried_pairs = [*other_pairs, f"{argument}={value}"]
        if _optimizer_arguments(config, tried_pairs) != arguments_before:
            return True
    return False


def _optimizer_arguments(config: AdoraGRPOConfig, pairs: Sequence[str]) -> object:
    """Return what Transformers makes of these `optim_args`, as a text; None if it refuses them.

    `pairs`: the entries of `optim_args`, such as `eps=1e-8`.
    """
    tried_config = copy(config)
    tried_config.optim_args = ",".join(pairs)
    try:
        return repr(Trainer.get_optimizer_cls_and_kwargs(tried_config))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def check_several_machines(config: AdoraGRPOConfig, processes: int, machines: int) -> None:
    """Raise `UserError` for FSDP, and for keys that do not go with several machines.

    `processes`: the number of processes on all machines together.
    """
    if config.fsdp:
        raise UserError(f"fsdp: {config.fsdp} {FSDP_IS_UNSUPPORTED}")
    if machines == 1:
        return
    if config.save_on_each_node:
        raise UserError(
            "save_on_each_node: true is not supported, because a checkpoint is one folder into "
            "which all machines write; leave it out, and choose an output_dir on a disk that they "
            "share"
        )
    local_processes = processes // machines
    engine_processes = config.vllm_tensor_parallel_size
    if config.has_colocated_engine and local_processes % engine_processes != 0:
        raise UserError(
            f"vllm_tensor_parallel_size: {engine_processes} does not divide the {local_processes} "
            "processes of one machine; an engine lies on one machine"
        )
