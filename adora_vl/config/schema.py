"""The training config: TRL's own keys under their own names, and those of `config/keys.py`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

from transformers.utils import (
    is_torch_bf16_gpu_available,
    is_torch_cuda_available,
    is_torch_xla_available,
)
from trl import GRPOConfig, ModelConfig

from adora_vl.config.command import CliArgs, read, read_value
from adora_vl.config.keys import AdoraKeys, AdoraScriptArguments
from adora_vl.config.methods import name_functions, settle_methods
from adora_vl.config.values import annotations_of_keys, convert_fields
from adora_vl.utils.cli import plain, spelled
from adora_vl.utils.errors import UserError
from adora_vl.utils.secrets import HIDDEN, masked

_CPU_RECIPE = "configs/train/smoke_cpu.yaml is a recipe for a CPU (use_cpu: true, bf16: false)"


class UndividedError(UserError):
    """A generation of this process does not divide into groups; one of more processes may."""


@dataclass
class AdoraGRPOConfig(AdoraKeys, GRPOConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's `GRPOConfig` with our keys; every value is checked when it is constructed."""

    # the keys whose values were converted before, by a command
    converted: InitVar[frozenset[str]] = field(default=frozenset(), kw_only=True)

    def __post_init__(self, converted: frozenset[str]) -> None:
        """Check the keys. Raises `UserError` for our checks, `ValueError` for those of TRL."""
        self.adora_method, functions = name_functions(self.adora_method)
        convert_fields(self, converted=converted, library_class=GRPOConfig)
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
        self.methods = settle_methods(self, functions)
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
        """Return the state to pickle, without secrets and without the built methods.

        Every checkpoint has a pickle of the config (training_args.bin), and checkpoints are passed
        on to others. A class from a file of the user's could not be read back.
        """
        state = {name: value for name, value in vars(self).items() if name != "methods"}
        return dict(masked(state, hidden=None))

    def __copy__(self) -> AdoraGRPOConfig:
        """Return a copy with secrets and methods, which the state to pickle lacks."""
        copied = object.__new__(type(self))
        copied.__dict__.update(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> AdoraGRPOConfig:
        """Return a deep copy with secrets. The methods have no state, and are shared."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        methods = self.methods
        memo[id(methods)] = methods
        copied.__dict__.update(deepcopy(vars(self), memo))
        return copied

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values with secrets masked, which Transformers sends to trackers.

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

    @property
    def learns_by_engine(self) -> bool:
        """Whether the loss weighs each token by its log-probability in the engine.

        It does by the ratio to the engine, or where the old log-probabilities are the engine's.
        """
        takes_engine_logps = self.adora_rollouts.old_logps == "engine"
        return bool(self.vllm_importance_sampling_correction) or takes_engine_logps


def missing_gpu(*, use_cpu: bool, bf16: bool | None, fp16: bool) -> str | None:
    """Return the key that needs a GPU where there is none: `bf16` or `fp16`; else None."""
    if use_cpu:
        return None
    if computes_in_bf16(bf16, fp16) and not (
        is_torch_bf16_gpu_available() or is_torch_xla_available() or is_torch_cuda_available()
    ):
        return "bf16"
    return "fp16" if fp16 and not is_torch_cuda_available() else None


def computes_in_bf16(bf16: bool | None, fp16: bool) -> bool:
    """Return whether a run computes in bfloat16; TRL's default for bf16 is the opposite of fp16."""
    return not fp16 if bf16 is None else bf16


def check_device(config: AdoraGRPOConfig) -> None:
    """Check that this machine computes in the precision of the config.

    Transformers refuses it, too, but names neither key nor remedy. Raises `UserError`.
    """
    key = missing_gpu(use_cpu=config.use_cpu, bf16=config.bf16, fp16=config.fp16)
    if key is not None:
        raise UserError(f"{key}: true needs a GPU, and there is none here; {_CPU_RECIPE}")
    if config.use_cpu or not computes_in_bf16(config.bf16, config.fp16):
        return
    if not is_torch_bf16_gpu_available() and not is_torch_xla_available():
        raise UserError(
            "bf16: true, but this GPU cannot compute in bfloat16; set bf16: false and fp16: true"
        )


DATACLASSES = (AdoraScriptArguments, AdoraGRPOConfig, ModelConfig)


class Configs(NamedTuple):
    """The three dataclasses of a training command.

    `runs_here`: whether this machine has what the training config needs; if not, it was built for
    another one.
    """

    script: AdoraScriptArguments
    training: AdoraGRPOConfig
    model: ModelConfig
    runs_here: bool = True


def build_configs(cli_args: CliArgs, *, any_machine: bool = False, processes: int = 1) -> Configs:
    """Build the dataclasses of a training command, and convert the values that are still unread.

    `any_machine`: build them also where this machine has no GPU for them. `processes`: of the run
    that is planned, of which this one is the first. Raises `UserError`, also
    for an error of TRL or Transformers, whose text becomes one line.
    """
    values = dict(cli_args.values)
    try:
        script_kwargs = _kwargs_of(AdoraScriptArguments, cli_args, values)
        script = AdoraScriptArguments(**script_kwargs, converted=frozenset(script_kwargs))
        training_kwargs = _kwargs_of(AdoraGRPOConfig, cli_args, values)
        missing = None
        if any_machine:
            missing = missing_gpu(
                use_cpu=training_kwargs.get("use_cpu", False),
                bf16=training_kwargs.get("bf16"),
                fp16=training_kwargs.get("fp16", False),
            )
        training = _training_of_many(training_kwargs, missing, processes)
        model = ModelConfig(**_kwargs_of(ModelConfig, cli_args, values))
    except UserError:
        raise
    except (ValueError, TypeError) as error:
        raise UserError(" ".join(str(error).split())) from error
    return Configs(script, training, model, runs_here=missing is None)


def _kwargs_of(kind: Any, cli_args: CliArgs, values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of those keys of a dataclass that were set.

    Unread ones are converted into `values`, once, though two dataclasses may have a key in common.
    """
    kwargs: dict[str, Any] = {}
    for key, hint in annotations_of_keys(kind).items():
        if key in cli_args.unread and key not in values:
            values[key] = read_value(key, cli_args.unread[key], hint)
        if key in values:
            kwargs[key] = values[key]
    return kwargs


def _training_of_many(
    kwargs: dict[str, Any], missing: str | None, processes: int
) -> AdoraGRPOConfig:
    """Build the training config of a run of so many processes, of which this is one.

    TRL divides a generation of this process alone into groups. Where one of all processes divides,
    it is built with as many passes as all of them make, and gets its own number back.
    """
    try:
        return _training_config(kwargs, missing)
    except UndividedError:
        if processes == 1:
            raise
    passes = kwargs.get("steps_per_generation") or kwargs.get("gradient_accumulation_steps", 1)
    config = _training_config({**kwargs, "steps_per_generation": passes * processes}, missing)
    config.steps_per_generation = passes
    config.generation_batch_size = config.per_device_train_batch_size * passes
    return config


def _training_config(kwargs: dict[str, Any], missing: str | None) -> AdoraGRPOConfig:
    """Build the training config. `missing`: the key that needs a GPU which is not here.

    Transformers refuses such a config, so the keys that it refuses are switched off while it is
    built, and restored. No method reads them.
    """
    if missing is None:
        return AdoraGRPOConfig(**kwargs, converted=frozenset(kwargs))
    on_cpu = {**kwargs, "use_cpu": True, "bf16": False, "fp16": False}
    config = AdoraGRPOConfig(**on_cpu, converted=frozenset(on_cpu))
    config.use_cpu = False
    setattr(config, missing, True)
    return config


def parse(arguments: Sequence[str]) -> tuple[AdoraScriptArguments, AdoraGRPOConfig, ModelConfig]:
    """Read the words of a command, which need not name a model, and build its dataclasses."""
    configs = build_configs(read(arguments, needs_model=False))
    return configs.script, configs.training, configs.model
