"""The training config: TRL's own keys under their own names, and those of `config/keys.py`."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, NamedTuple

from accelerate.utils import parse_flag_from_env
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import (
    is_torch_bf16_gpu_available,
    is_torch_cuda_available,
    is_torch_tf32_available,
    is_torch_xla_available,
)
from trl import GRPOConfig, ModelConfig

from adora_vl.config.command import CliArgs, convert_cli_value
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.methods import build_methods_and_set_keys, replace_functions_by_names
from adora_vl.config.sharding import refuse_second_deepspeed
from adora_vl.config.values import annotations_of_keys, convert_fields
from adora_vl.utils.cli import enum_value, flow_mapping, to_json_types
from adora_vl.utils.convert import refuse_unknown_options
from adora_vl.utils.errors import UserError
from adora_vl.utils.launch import release_killed_builds, under_launcher
from adora_vl.utils.secrets import HIDDEN_MARK, without_secrets

# Keys that have other values while TRL checks its keys (`_init_trl_keys`).
_KEYS_HIDDEN_FROM_TRL = ("num_generations_eval", "tf32", "ddp_backend")
_CPU_RECIPE = "configs/train/smoke_cpu.yaml is a recipe for a CPU (use_cpu: true, bf16: false)"


@dataclass
class AdoraGRPOConfig(AdoraKeys, GRPOConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's `GRPOConfig` with our keys; every value is checked when it is constructed."""

    # The keys whose values a command has converted already; Python code leaves it empty.
    converted: InitVar[frozenset[str]] = field(default=frozenset(), kw_only=True)
    # The processes of the run that a dry run plans, maybe for another machine; None for a real run.
    planned_processes: InitVar[int | None] = field(default=None, kw_only=True)

    def __post_init__(self, converted: frozenset[str], planned_processes: int | None) -> None:
        """Convert and check the keys, build the methods, and let TRL fill in its own keys.

        `converted`: the keys whose values a command has converted already. `planned_processes`: the
        number of processes that a dry run plans; None for a run on this machine. Raises `UserError`
        if a check of this project fails, `ValueError` if one of TRL does.
        """
        self.adora_method, functions = replace_functions_by_names(self.adora_method)
        convert_fields(self, converted=converted, library_class=GRPOConfig)
        # A dry run may plan for a GPU that this machine does not have.
        is_for_other_machine = (
            planned_processes is not None and key_that_needs_missing_gpu(self) is not None
        )
        if not is_for_other_machine:
            check_device(self)
        self._refuse_best_checkpoint()
        self._refuse_contradictions()
        # Before TRL's own checks, because a method may set keys of TRL.
        self.methods = build_methods_and_set_keys(self, functions)
        # A dry run plans for the launch that its options name, and not for its own.
        if planned_processes is None:
            launch_has_stage = "ACCELERATE_DEEPSPEED_ZERO_STAGE" in os.environ
            refuse_second_deepspeed(self.deepspeed, launch_has_stage=launch_has_stage)
        if self.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            # From here on DeepSpeed may ask torch for operators, and torch would wait for ever.
            release_killed_builds()
        self._init_trl_keys(planned_processes)
        # For its side effect: `without_secrets` remembers the secrets among the values, so that no
        # later output shows them.
        without_secrets(vars(self))
        self._refuse_masked_secrets()

    def _refuse_best_checkpoint(self) -> None:
        """Raise `UserError` for keys that ask Transformers to choose the best checkpoint.

        The best of many evaluations on one set is overfitted to that set. Besides, Transformers
        would choose by an evaluation that is not this project's.
        """
        remedy = (
            "keep checkpoints with save_total_limit: null and `python -m adora_vl.export "
            "OUT/checkpoint-N BEST`"
        )
        if self.load_best_model_at_end:
            raise UserError(f"load_best_model_at_end: true is not supported; {remedy}")
        if enum_value(self.save_strategy) == "best":
            raise UserError(f"save_strategy: best is not supported; {remedy}")

    def _refuse_contradictions(self) -> None:
        """Raise `UserError` for two keys that exclude each other, with their values and the remedy.

        The libraries refuse most of them too, but say neither.
        """
        if self.bf16 and self.fp16:
            raise UserError("bf16: true, but fp16: true as well; set one of them to false")
        # accelerate ignores it on a CPU, and computes in float32.
        if self.fp16 and self.use_cpu:
            raise UserError("fp16: true needs a GPU, and use_cpu is true; set fp16 to false")
        if self.generation_batch_size is not None and self.steps_per_generation is not None:
            raise UserError(
                f"generation_batch_size: {self.generation_batch_size}, but steps_per_generation: "
                f"{self.steps_per_generation} says the same in other words; leave one of them out"
            )
        options = self.accelerator_config
        if isinstance(options, str):
            options = flow_mapping(options)
        if isinstance(options, dict):
            names = [option.name for option in fields(AcceleratorConfig)]
            refuse_unknown_options("accelerator_config", options, names)

    def _init_trl_keys(self, planned_processes: int | None) -> None:
        """Let TRL check its keys and fill in those that follow from others.

        Some of its checks are about this machine, or about things that are not known yet. So TRL
        sees a few other values, which are set back afterwards.

        `planned_processes`: the number of processes that a dry run plans; None for a run on this
        machine. Raises `UserError` for rollouts that do not divide into groups, `ValueError` if
        another check of TRL fails.
        """
        # TRL computes each of these two from the other. The error names the one that was set.
        user_batch_size = self.generation_batch_size
        user_steps = self.steps_per_generation
        value_by_hidden_key = {key: getattr(self, key) for key in _KEYS_HIDDEN_FROM_TRL}
        # A dry run plans also for a GPU that this machine lacks, and Transformers refuses the key
        # that needs it: `bf16`, `fp16` or `tf32`.
        gpu_key = key_that_needs_missing_gpu(self) if planned_processes is not None else None
        try:
            # TRL refuses evaluation batches of partial groups, but whether it evaluates at all is
            # only known once there are data. A group size of 1 passes its check.
            self.num_generations_eval = 1
            self._processes_for_trl = planned_processes  # which `world_size` returns
            if gpu_key is not None:
                self.use_cpu = True
                self.bf16 = False
                self.fp16 = False
                self.tf32 = None
            if not under_launcher() and "WORLD_SIZE" not in os.environ:
                # Without processes to connect, Transformers would fail in a backend, and a dry run
                # plans for processes that are not here. Other launchers set the variable.
                self.ddp_backend = None
            super().__post_init__()
        except ValueError:
            self._check_groups(
                generation_batch_size=user_batch_size, steps_per_generation=user_steps
            )
            raise
        finally:
            del self._processes_for_trl
            for key, value in value_by_hidden_key.items():
                setattr(self, key, value)
            if gpu_key is not None:
                self.use_cpu = False
                setattr(self, gpu_key, True)

    @property
    def world_size(self) -> int:
        """The number of processes; while TRL fills in its keys, that of the run that is planned."""
        return vars(self).get("_processes_for_trl") or int(super().world_size)

    def _refuse_masked_secrets(self) -> None:
        """Raise `UserError` for a command with a mask in the place of a secret.

        Commands are printed with their secrets masked, and a user may copy a printed command.
        """
        for key in ("hub_token", "model_init_kwargs", "vllm_server_base_url"):
            value = getattr(self, key)
            values = [value]
            if isinstance(value, dict):
                values += value.values()
            if HIDDEN_MARK in values or f"//{HIDDEN_MARK}@" in str(value):
                raise UserError(
                    f"{key}: '{HIDDEN_MARK}' stands for a secret that was left out of a printed "
                    "command; write it, or log in with `hf auth login` for the hub"
                )

    def _check_groups(
        self, *, generation_batch_size: int | None, steps_per_generation: int | None
    ) -> None:
        """Raise `UserError` if the rollouts of a generation do not divide into groups.

        It replaces TRL's error, which names `generation_batch_size`. That key is a product. Most
        users set its factors, so this error names the factors.

        Args:
            generation_batch_size: The value that the user has set, None without one. With one,
                TRL's own error is clear, and this method returns.
            steps_per_generation: The value that the user has set, None without one. Then it is
                `gradient_accumulation_steps`.
        """
        rollouts = self.generation_batch_size
        if generation_batch_size is not None or rollouts is None:
            return
        group_size = self.num_generations
        if rollouts % group_size == 0:
            # TRL refused the config for another reason.
            return
        rows = self.per_device_train_batch_size
        processes = rollouts // (rows * self.steps_per_generation)
        noun = "process" if processes == 1 else "processes"
        if steps_per_generation:
            micro_batches = f"steps_per_generation: {steps_per_generation}"
        else:
            micro_batches = f"gradient_accumulation_steps: {self.gradient_accumulation_steps}"
        raise UserError(
            f"per_device_train_batch_size: {rows} x {micro_batches} x {processes} {noun} = "
            f"{rollouts} rollouts, which do not divide into groups of num_generations: "
            f"{group_size}; make the product a multiple of it"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without secrets and without the built methods.

        Every checkpoint has a pickle of the config (training_args.bin). Checkpoints are given to
        other people, so secrets are left out. A method may be of a class in a file of the user's,
        which could not be unpickled.
        """
        state = {name: value for name, value in vars(self).items() if name != "methods"}
        return dict(without_secrets(state, hidden_as=None))

    def __copy__(self) -> AdoraGRPOConfig:
        """Return a copy with secrets and methods, which a copy by `__getstate__` would lack."""
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> AdoraGRPOConfig:
        """Return a deep copy with secrets. The methods have no state, so both configs share them.

        `memo`: the `copy` module's dictionary of the copies so far, by the id of the original.
        """
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        # With this entry `deepcopy` takes the methods as they are.
        memo[id(self.methods)] = self.methods
        copied.__dict__.update(deepcopy(vars(self), memo))
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values with secrets masked, which Transformers sends to trackers.

        Transformers itself masks only the first level.
        """
        return dict(without_secrets(to_json_types(super().to_dict())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    __str__ = __repr__

    @property
    def seed_of_rows(self) -> int:
        """The seed by which rows are shuffled and mixed: `data_seed`, or else `seed`."""
        seed = self.seed if self.data_seed is None else self.data_seed
        return int(seed)

    @property
    def truncated_at(self) -> int | None:
        """The length in tokens at which a completion counts as truncated.

        None with `adora_truncated: eos`: a completion then counts as truncated if it has no
        end-of-sequence token.
        """
        length_or_eos = self.adora_truncated
        if isinstance(length_or_eos, str):
            return None
        if length_or_eos is None:
            # as the reference implementation of ADORA does: 4094 of 4096
            return int(self.max_completion_length) - 2
        return length_or_eos

    @property
    def uses_servers(self) -> bool:
        """Whether vLLM servers sample, which the user starts and ends."""
        return bool(self.use_vllm) and self.vllm_mode == "server"

    @property
    def has_colocated_engine(self) -> bool:
        """Whether vLLM samples inside of each training process."""
        return bool(self.use_vllm) and self.vllm_mode == "colocate"

    @property
    def corrects_per_sequence(self) -> bool:
        """Whether the correction for vLLM has one importance ratio for a whole answer.

        Otherwise it has one for each token, or there is none.
        """
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        return bool(corrects) and self.vllm_importance_sampling_mode.startswith("sequence")

    @property
    def evaluates(self) -> bool:
        """Whether something is evaluated during training."""
        return enum_value(self.eval_strategy) != "no"

    @property
    def loss_uses_engine_logps(self) -> bool:
        """Whether the loss depends on the log-probabilities that vLLM returns with its samples.

        It does if vLLM's importance sampling correction is on, or if vLLM's values are taken as
        the old log-probabilities of the policy ratio.
        """
        takes_engine_logps = self.adora_rollouts.old_logps == "engine"
        return bool(self.vllm_importance_sampling_correction) or takes_engine_logps


def key_that_needs_missing_gpu(config: AdoraGRPOConfig) -> str | None:
    """Return the key (`bf16`, `fp16`, `tf32`) that needs a GPU which this machine does not have.

    None if no key does.
    """
    if config.use_cpu:
        return None
    has_accelerator = (
        is_torch_bf16_gpu_available() or is_torch_xla_available() or is_torch_cuda_available()
    )
    if computes_in_bf16(config.bf16, config.fp16) and not has_accelerator:
        return "bf16"
    if config.fp16 and not is_torch_cuda_available():
        return "fp16"
    if config.tf32 and not is_torch_cuda_available():
        return "tf32"
    return None


def computes_in_bf16(bf16: bool | None, fp16: bool) -> bool:
    """Return whether a run computes in bfloat16; TRL's default for bf16 is the opposite of fp16."""
    return not fp16 if bf16 is None else bf16


def check_device(config: AdoraGRPOConfig) -> None:
    """Raise `UserError` if this machine cannot compute in the precision of the config.

    Transformers refuses such a config too, but names neither the key nor a remedy.
    """
    key = key_that_needs_missing_gpu(config)
    if key is not None:
        raise UserError(f"{key}: true needs a GPU, and there is none here; {_CPU_RECIPE}")
    if config.tf32 and not is_torch_tf32_available():
        raise UserError("tf32: true needs an NVIDIA GPU of Ampere or newer; leave it out")
    if config.use_cpu or not computes_in_bf16(config.bf16, config.fp16):
        return
    if not is_torch_bf16_gpu_available() and not is_torch_xla_available():
        raise UserError(
            "bf16: true, but this GPU cannot compute in bfloat16; set bf16: false and fp16: true"
        )


class Configs(NamedTuple):
    """The three dataclasses of a training command."""

    script_args: AdoraScriptArguments
    training: AdoraGRPOConfig
    model: ModelConfig


def build_configs(cli_args: CliArgs, *, planned_processes: int | None = None) -> Configs:
    """Build the three dataclasses of a training command from the values that the user has set.

    Args:
        cli_args: The command as it was read. Values of keys that only TRL knows are converted here.
        planned_processes: Number of processes of the run that a dry run plans, also for a GPU that
            this machine lacks; None for a run on this machine.

    Raises `UserError`, also for an error of TRL or Transformers, whose text becomes one line.
    """
    converted_values = dict(cli_args.converted_values)
    try:
        script_kwargs = _kwargs_for(AdoraScriptArguments, cli_args, converted_values)
        script_args = AdoraScriptArguments(**script_kwargs, converted=frozenset(script_kwargs))
        training_kwargs = _kwargs_for(AdoraGRPOConfig, cli_args, converted_values)
        training = AdoraGRPOConfig(
            **training_kwargs,
            converted=frozenset(training_kwargs),
            planned_processes=planned_processes,
        )
        model = ModelConfig(**_kwargs_for(ModelConfig, cli_args, converted_values))
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        one_line = " ".join(str(error).split())
        raise UserError(one_line) from error
    return Configs(script_args=script_args, training=training, model=model)


def _kwargs_for(
    config_class: Any, cli_args: CliArgs, converted_values: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments for a config dataclass: its keys that the user has set, converted.

    `converted_values`: the values that are converted already, by key. Those that are converted here
    are added, since two dataclasses may have a key in common.
    """
    kwargs: dict[str, Any] = {}
    for key, hint in annotations_of_keys(config_class).items():
        if key in cli_args.raw_values and key not in converted_values:
            converted_values[key] = convert_cli_value(key, cli_args.raw_values[key], hint)
        if key in converted_values:
            kwargs[key] = converted_values[key]
    return kwargs
