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

from adora_vl.config.advantage import name_functions, settle_methods
from adora_vl.config.checks import check_sampling_keys
from adora_vl.config.command import CliArgs, read
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.values import check_fields
from adora_vl.utils.cli import plain, spelled
from adora_vl.utils.errors import UserError
from adora_vl.utils.secrets import HIDDEN, masked

_CPU_RECIPE = "configs/train/smoke_cpu.yaml is a recipe for a CPU (use_cpu: true, bf16: false)"


class UndividedError(UserError):
    """A generation of this launch does not divide into groups; one of more processes may."""


@dataclass
class AdoraGRPOConfig(AdoraKeys, GRPOConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's `GRPOConfig` with our keys; every value is checked when it is constructed."""

    def __post_init__(self) -> None:
        """Check the keys. Raises `UserError` for our checks, `ValueError` for those of TRL."""
        self.adora_method = name_functions(self.adora_method)
        check_fields(self, GRPOConfig)
        check_device(self)
        # The best of many evaluations on one set is overfitted to that set, and Transformers would
        # choose it by an evaluation that is not ours.
        instead = (
            "keep checkpoints with save_total_limit: null and `python -m adora_vl.export "
            "OUT/checkpoint-N BEST`"
        )
        if self.load_best_model_at_end:
            raise UserError(f"load_best_model_at_end: true is not supported; {instead}")
        if spelled(self.save_strategy) == "best":
            raise UserError(f"save_strategy: best is not supported; {instead}")
        self.method_notes = settle_methods(self)
        # TRL works these two out of each other, and an error names those that the user has set.
        generation_batch_size = vars(self).get("generation_batch_size")
        steps_per_generation = vars(self).get("steps_per_generation")
        num_generations_eval: Any = vars(self).get("num_generations_eval")
        try:
            # TRL wants whole groups in an evaluation, but whether it evaluates at all is only known
            # once there are data. A group of 1 passes its check.
            self.num_generations_eval: Any = 1
            super().__post_init__()
        except ValueError:
            self._check_groups(generation_batch_size, steps_per_generation)
            raise
        finally:
            self.num_generations_eval = num_generations_eval
        check_sampling_keys(self)
        # registers the secrets, so that no later output shows them
        masked(vars(self))
        self._refuse_masked()

    def _refuse_masked(self) -> None:
        """Raise `UserError` for the mask that a printed command has in the place of a secret."""
        for key in ("hub_token", "model_init_kwargs", "vllm_server_base_url"):
            value = getattr(self, key)
            values = [value]
            if isinstance(value, dict):
                values += value.values()
            if HIDDEN in values or f"//{HIDDEN}@" in str(value):
                raise UserError(
                    f"{key}: '{HIDDEN}' stands for a secret that was left out of a printed "
                    "command; write it, or log in with `hf auth login` for the hub"
                )

    def _check_groups(self, batch: int | None, steps: int | None) -> None:
        """Raise `UserError` for a generation that does not divide into groups.

        TRL's error names `generation_batch_size`, a product that the user may not have set; this
        one names its factors. `batch`, `steps`: `generation_batch_size` and `steps_per_generation`
        as the user has set them, before TRL fills them in.
        """
        rollouts = self.generation_batch_size
        rows = self.per_device_train_batch_size
        group_size = self.num_generations
        if batch is not None or rollouts is None or rollouts % group_size == 0:
            return
        key = "steps_per_generation" if steps else "gradient_accumulation_steps"
        processes = rollouts // (rows * self.steps_per_generation)
        plural = "" if processes == 1 else "es"
        raise UndividedError(
            f"per_device_train_batch_size: {rows} x "
            f"{key}: {steps or self.gradient_accumulation_steps} x {processes} process{plural} = "
            f"{rollouts} rollouts, which do not divide into groups of num_generations: "
            f"{group_size}; make the product a multiple of it"
        )

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle, without secrets.

        Every checkpoint has a pickle of the config (training_args.bin), and checkpoints are passed
        on to others.
        """
        return dict(masked(vars(self), hidden=None))

    def to_dict(self) -> dict[str, Any]:
        """The keys and values with secrets masked, which Transformers sends to trackers.

        Transformers itself masks only the first level.
        """
        return dict(masked(plain(super().to_dict())))

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

        None with `adora_truncated: eos`: then one counts as truncated if it has no end token.
        """
        limit = self.adora_truncated
        if isinstance(limit, str):
            return None
        if limit is None:
            # as the reference implementation of ADORA does: 4094 of 4096
            return int(self.max_completion_length) - 2
        return limit


class NoGPUError(UserError):
    """The config needs a GPU and there is none. `key` is the key that needs it."""

    def __init__(self, key: str) -> None:
        super().__init__(f"{key}: true needs a GPU, and there is none here; {_CPU_RECIPE}")
        self.key = key


def check_device(config: AdoraGRPOConfig) -> None:
    """Check that this machine computes in the precision of the config.

    Transformers refuses it, too, but names neither key nor remedy. Raises `NoGPUError` where there
    is no GPU, and `UserError` for a GPU without bfloat16.
    """
    if config.use_cpu:
        return
    # TRL's default for bf16 is the opposite of fp16
    bf16 = bool(config.bf16) if config.bf16 is not None else not config.fp16
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


def build(cli_args: CliArgs) -> Parsed:
    """Build the three dataclasses of a training command. Raises `UserError`."""
    script = cli_args.build(AdoraScriptArguments)
    config = cli_args.build(AdoraGRPOConfig)
    model = cli_args.build(ModelConfig)
    return script, config, model


def parse(arguments: Sequence[str]) -> Parsed:
    """Read the words of a command, which need not name a model, and `build` its dataclasses."""
    return build(read(arguments, needs_model=False))
