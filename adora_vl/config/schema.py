"""The training config: TRL's own keys under their own names, and those of `config/keys.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import (
    is_torch_bf16_gpu_available,
    is_torch_cuda_available,
    is_torch_xla_available,
)
from trl import GRPOConfig, ModelConfig

from adora_vl.config.advantage import settle_methods
from adora_vl.config.checks import check_sampling_keys
from adora_vl.config.command import CliArgs, read
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.values import check_fields
from adora_vl.utils.cli import plain, spelled
from adora_vl.utils.errors import UserError
from adora_vl.utils.secrets import HIDDEN, masked

_CPU_RECIPE = "configs/train/smoke_cpu.yaml is a recipe for a CPU (use_cpu: true, bf16: false)"


@dataclass
class AdoraGRPOConfig(AdoraKeys, GRPOConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's `GRPOConfig` with our keys, all values checked when it is made."""

    def __post_init__(self) -> None:
        """Raises `UserError` for our checks, and `ValueError` for those of TRL."""
        check_fields(self, GRPOConfig)
        check_device(self)
        # The best of many evaluations on one set is a choice on that set, and Transformers'
        # evaluation is not ours.
        instead = (
            "keep checkpoints with save_total_limit: null and `python -m adora_vl.export "
            "OUT/checkpoint-N BEST`"
        )
        if self.load_best_model_at_end:
            raise UserError(f"load_best_model_at_end: true is not supported; {instead}")
        if spelled(self.save_strategy) == "best":
            raise UserError(f"save_strategy: best is not supported; {instead}")
        self.method_notes = settle_methods(self)
        given = vars(self).get("generation_batch_size"), vars(self).get("steps_per_generation")
        groups: Any = vars(self).get("num_generations_eval")
        try:
            # whether TRL evaluates, in whole groups, is known when there are data
            self.num_generations_eval: Any = 1
            super().__post_init__()
        except ValueError:
            self._check_groups(*given)
            raise
        finally:
            self.num_generations_eval = groups
        check_sampling_keys(self)
        masked(vars(self))  # notes what is not to be shown from here on
        for key in ("hub_token", "model_init_kwargs", "vllm_server_base_url"):
            value = getattr(self, key)
            if HIDDEN in (
                value,
                *(value.values() if isinstance(value, dict) else ()),
            ) or f"//{HIDDEN}@" in str(value):
                left_out = (
                    f"{key}: '{HIDDEN}' stands for a secret that was left out of a printed command"
                )
                raise UserError(f"{left_out}; write it, or log in with `hf auth login` for the hub")

    def _check_groups(self, batch: int | None, steps: int | None) -> None:
        """Raise `UserError` in the keys as they were given, where TRL's words have a number made of
        them.
        """
        made = self.generation_batch_size
        rows = self.per_device_train_batch_size
        each = self.num_generations
        if batch is not None or made is None or made % each == 0:
            return
        key = "steps_per_generation" if steps else "gradient_accumulation_steps"
        processes = made // (rows * self.steps_per_generation)
        product = (
            f"{rows} x {key}: {steps or self.gradient_accumulation_steps} x {processes} process"
        )
        product += f"{'' if processes == 1 else 'es'} = {made} rollouts"
        whole = (
            f"which do not divide into groups of num_generations: {each}; make the product a "
            "multiple of it"
        )
        raise UserError(f"per_device_train_batch_size: {product}, {whole}")

    def __getstate__(self) -> dict[str, Any]:
        """Every checkpoint has a pickle of the config (training_args.bin), and is made to be handed
        on.
        """
        return dict(masked(vars(self), hidden=None))

    def to_dict(self) -> dict[str, Any]:
        """Stock Transformers shows this to trackers, with secrets below the first level."""
        return dict(masked(plain(super().to_dict())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"

    __str__ = __repr__

    @property
    def seed_of_rows(self) -> int:
        """By which rows are shuffled and mixed: `data_seed`, or else `seed`."""
        seed = self.seed if self.data_seed is None else self.data_seed
        return int(seed)

    @property
    def truncated_at(self) -> int | None:
        """Tokens from which on a completion counts as truncated; None: where nothing has ended it."""
        at = self.adora_truncated
        return None if isinstance(at, str) else self.max_completion_length - 2 if at is None else at


class NoGPUError(UserError):
    """The config needs a GPU and there is none. `key` is the key that needs it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: true needs a GPU, and there is none here; {_CPU_RECIPE}")
        self.key = key


def check_device(config: Any) -> None:
    """Raises `NoGPUError` or `UserError` for settings that Transformers refuses without naming a
    key or a remedy.
    """
    if config.use_cpu:
        return
    bf16 = bool(config.bf16) if config.bf16 is not None else not config.fp16  # as TRL fills it in
    if bf16 and not is_torch_bf16_gpu_available() and not is_torch_xla_available():
        if is_torch_cuda_available():
            raise UserError(
                "bf16: true, but this GPU cannot compute in bfloat16; set bf16: false and fp16: "
                "true"
            )
        raise NoGPUError("bf16")
    if config.fp16 and not is_torch_cuda_available():
        raise NoGPUError("fp16")


DATACLASSES = (AdoraScriptArguments, AdoraGRPOConfig, ModelConfig)
Parsed = tuple[AdoraScriptArguments, AdoraGRPOConfig, ModelConfig]


def build(given: CliArgs) -> Parsed:
    """The three dataclasses of a training command. Raises `UserError`."""
    return given.build(AdoraScriptArguments), given.build(AdoraGRPOConfig), given.build(ModelConfig)


def parse(arguments: Sequence[str]) -> Parsed:
    """As `build`, from the words of a command, which need name no model."""
    return build(read(arguments, whole=False))
