"""What a user asks for: by a command, or by Python code that passes objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import BitsAndBytesConfig, PreTrainedModel
from trl import ModelConfig
from trl.trainer.utils import get_config_model_id

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.command import CliArgs
from adora_vl.config.schema import Configs, build_configs
from adora_vl.models.check import make_lora_config
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import ProcessorMixin


@dataclass(frozen=True)
class ModelSource:
    """Where the policy comes from.

    `model_args`: TRL's model keys, its name and how it is loaded. `peft_config`: PEFT's config of
    an adapter to make; None for none. `loaded_model`, `processor`: a model and a processor that
    Python code passed as objects; None for those that are loaded by name.
    """

    model_args: ModelConfig
    peft_config: PeftConfig | None = None
    loaded_model: PreTrainedModel | None = None
    processor: ProcessorMixin | None = None


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for, whether by a command, a dry run or Python code.

    `config`: the training keys. `model`: where the policy comes from. `data_source`: the keys of
    a command's data and rewards, or the data sets that Python code passed. `rewards`, `tools` and
    `environment_factory`: objects of Python code; `tools` are added to those of the key, and
    `environment_factory` takes the key's place. `cli_args`: the command; None from Python.
    `max_rows`: the number of prompts whose length is measured; None: all.
    """

    config: AdoraGRPOConfig
    model: ModelSource
    data_source: AdoraScriptArguments | Datasets
    rewards: object = None
    cli_args: CliArgs | None = None
    max_rows: int | None = None
    tools: Sequence[str | Callable[..., Any]] = ()
    environment_factory: Callable[[], object] | None = None

    @property
    def script_args(self) -> AdoraScriptArguments | None:
        """The keys of a command's data and rewards; None from Python."""
        return self.data_source if isinstance(self.data_source, AdoraScriptArguments) else None

    @property
    def environment(self) -> Callable[[], object] | str | None:
        """What makes an environment for each rollout: FILE.py:CLASS, or a Python callable.

        None for a run without environments.
        """
        if self.environment_factory is not None:
            return self.environment_factory
        class_in_file: str | None = self.config.environment_factory
        return class_in_file

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0, which alone prints."""
        return bool(self.config.process_index == 0)

    @property
    def trl_evaluates(self) -> bool:
        """Whether TRL evaluates during training, on a data set that Python code passed."""
        return isinstance(self.data_source, Datasets) and self.data_source.evaluate is not None


def request_from_command(
    cli_args: CliArgs,
    *,
    max_rows: int | None = None,
    planned_processes: int | None = None,
) -> RunRequest:
    """Return what a command asks for, with its config dataclasses built.

    Args:
        cli_args: The command as it was read.
        max_rows: The number of prompts whose length is measured; None: all.
        planned_processes: The number of processes of the run that a dry run plans, also for a GPU
            that this machine lacks; None for a run on this machine.

    Raises `UserError`.
    """
    configs = build_configs(cli_args, planned_processes=planned_processes)
    _copy_init_kwargs_to_keys(configs, cli_args.set_keys)
    return RunRequest(
        config=configs.training,
        model=ModelSource(model_args=configs.model, peft_config=make_lora_config(configs.model)),
        data_source=configs.script_args,
        cli_args=cli_args,
        max_rows=max_rows,
    )


# Arguments of `from_pretrained` for which a command has a key, and that key.
_KEY_BY_INIT_ARGUMENT = {
    "dtype": "dtype",
    "attn_implementation": "attn_implementation",
    "revision": "model_revision",
}


def _copy_init_kwargs_to_keys(configs: Configs, set_keys: Collection[str]) -> None:
    """Copy arguments of `model_init_kwargs` to the keys that say the same.

    The model is loaded with the arguments, and checks, manifest and fingerprint read the keys. For
    example, `model_init_kwargs: {dtype: bfloat16}` becomes `dtype: bfloat16`.

    `set_keys`: the keys that the user has set. Raises `UserError` where one of them contradicts.
    """
    init_kwargs = dict(configs.training.model_init_kwargs or {})
    for argument, key in _KEY_BY_INIT_ARGUMENT.items():
        if init_kwargs.get(argument) is None:
            continue
        value = init_kwargs[argument]
        value_of_key = getattr(configs.model, key)
        if key in set_keys and value_of_key != value:
            raise UserError(
                f"model_init_kwargs: {argument}: {value} contradicts {key}: {value_of_key}; leave "
                "one of the two out"
            )
        setattr(configs.model, key, value)


def copy_or_default_config(args: object, model: str | PreTrainedModel) -> AdoraGRPOConfig:
    """Return a copy of the config that Python code passes to the trainer as `args`.

    It is a copy because the trainer writes into it, and the user may make another trainer with the
    same object. If `args` is None, the config has an `output_dir` that is named after the model, as
    in TRL. Raises `UserError` for a config of another class, such as TRL's own.
    """
    if args is None:
        model_name = _name_of_model(model).split("/")[-1]
        return AdoraGRPOConfig(output_dir=f"{model_name}-GRPO")
    if not isinstance(args, AdoraGRPOConfig):
        library = type(args).__module__.partition(".")[0]
        raise UserError(
            f"args: a {library}.{type(args).__name__} has other defaults, and steps and batches "
            "worked out of them; give its arguments to an AdoraGRPOConfig (from adora_vl import "
            "AdoraGRPOConfig)"
        )
    return copy(args)


def refuse_unsupported_arguments(
    train_dataset: object,
    reward_funcs: object,
    rollout_func: object,
    has_environments: bool,
) -> None:
    """Raise `UserError` for arguments of the trainer that no run can be made of.

    These are a `rollout_func`, a `train_dataset` that is no data set, and no reward. TRL would
    ignore them, or fail after the weights are loaded. With environments the data set and the reward
    may be missing: environments can say the problem, and reward the rollout.
    """
    if rollout_func is not None:
        raise UserError(
            "rollout_func: a sampler of your own is not supported, because its rollouts have "
            "neither seeds nor log-probabilities that can be checked; use tools, or "
            "trl.GRPOTrainer"
        )
    if isinstance(train_dataset, DatasetDict | IterableDatasetDict) and train_dataset:
        splits = [str(name) for name in train_dataset]
        raise UserError(
            f"train_dataset: has the splits {', '.join(splits)}; give one of them, such as "
            f"dataset[{splits[0]!r}]"
        )
    lacks_rows = train_dataset is None and not has_environments
    is_no_data_set = train_dataset is not None and not isinstance(
        train_dataset, Dataset | IterableDataset
    )
    if lacks_rows or is_no_data_set:
        kind = "None" if train_dataset is None else f"a {type(train_dataset).__name__}"
        raise UserError(
            f"train_dataset: {kind} is no data set; make one, such as "
            "datasets.Dataset.from_list(rows), or adora_vl.load_problems(FOLDER)"
        )
    if not reward_funcs and not has_environments:
        raise UserError(
            f"reward_funcs: {reward_funcs} would train on nothing; give a function, a preset or a "
            "list"
        )


def rows_for_environments(config: AdoraGRPOConfig, *, processes: int) -> Dataset:
    """Return the rows of a run whose environments say the problem themselves, when they are reset.

    As in TRL their prompts are empty, and there are as many rows as a generation has prompts. Where
    an optimizer step takes several generations, there are rows for all of them, since a step cannot
    go on beyond the end of an epoch.

    Raises `UserError` without `max_steps`, since nothing else says how long such a run is.

    Args:
        config: the training keys.
        processes: the number of processes, which draw the rows of a generation together.
    """
    if config.max_steps <= 0:
        raise UserError(
            "train_dataset: None, so that environments say the problems, leaves the length of the "
            "run open; set max_steps"
        )
    prompt = [{"role": "user", "content": ""}]
    layout = BatchLayout.of(config, processes=processes)
    micro_batches = math.lcm(
        layout.micro_batches_per_generation, layout.gradient_accumulation_steps
    )
    generation_count = micro_batches // layout.micro_batches_per_generation
    row_count = generation_count * layout.prompts_per_generation
    return Dataset.from_list([{"prompt": prompt}] * row_count)


def _name_of_model(model: str | PreTrainedModel) -> str:
    """Return the model's folder or hub id; empty where an object does not know it."""
    if isinstance(model, str):
        return model
    return str(get_config_model_id(model.config) or "")


def model_source(
    model: str | PreTrainedModel,
    *,
    config: AdoraGRPOConfig,
    processor: ProcessorMixin | None,
    peft_config: PeftConfig | None,
    quantization_config: Any,
) -> ModelSource:
    """Return where the policy of a run from Python comes from, with the keys of a command for it.

    Args:
        model: A name, or a model that is loaded already.
        config: The training keys; its `model_init_kwargs` say how a named model is loaded.
        processor: The processor of the model; None for the model's own.
        peft_config: The config of a new adapter; None for no adapter.
        quantization_config: How the model is quantised, a `BitsAndBytesConfig`. None: that of
            `model_init_kwargs`, if they have one.

    Raises `UserError` for a quantisation that is not supported.
    """
    init_kwargs = dict(config.model_init_kwargs or {})
    quantisation = quantization_config or init_kwargs.pop("quantization_config", None)
    if quantisation is not None:
        _check_quantisation(quantisation)
    has_adapter = False
    loaded_model = None
    if not isinstance(model, str):
        loaded_model = model
        is_quantised = getattr(model, "quantization_method", None) is not None
        if quantisation is not None or is_quantised:
            raise UserError(
                "model: an object has no folder in 4 bits; give its name, and quantization_config"
            )
        has_adapter = hasattr(model, "peft_config")
        # The arguments by which it was loaded.
        init_kwargs = {
            "dtype": model.dtype,
            "attn_implementation": getattr(model.config, "_attn_implementation", None),
            "revision": None,
        }
    # TRL's default. A base in 4 bits computes in bfloat16 alone.
    default_dtype = "float32" if quantisation is None else "bfloat16"
    model_args = ModelConfig(
        model_name_or_path=_name_of_model(model),
        model_revision=init_kwargs.get("revision"),
        dtype=str(init_kwargs.get("dtype", default_dtype)).removeprefix("torch."),
        attn_implementation=init_kwargs.get("attn_implementation"),
        use_peft=peft_config is not None or has_adapter,
        load_in_4bit=quantisation is not None,
        bnb_4bit_quant_type=getattr(quantisation, "bnb_4bit_quant_type", "nf4"),
        bnb_4bit_quant_storage=_storage_dtype(quantisation),
        use_bnb_nested_quant=bool(getattr(quantisation, "bnb_4bit_use_double_quant", False)),
    )
    return ModelSource(
        model_args=model_args,
        # A copy, because PEFT writes the name of the base model into it.
        peft_config=deepcopy(peft_config),
        loaded_model=loaded_model,
        processor=processor,
    )


def _storage_dtype(quantisation: object) -> str | None:
    """Return the dtype that a base in 4 bits is stored as, such as `bfloat16`; None for bytes.

    `quantisation`: a `BitsAndBytesConfig`, whose default is bytes; None for a whole model.
    """
    storage = getattr(quantisation, "bnb_4bit_quant_storage", None)
    if storage in (None, torch.uint8):
        return None
    return str(storage).removeprefix("torch.")


def _check_quantisation(quantisation: object) -> None:
    """Raise `UserError` for a quantisation other than 4 bits of bitsandbytes.

    A base in 4 bits computes in bfloat16. A `BitsAndBytesConfig` has float32 by default, so float32
    is taken for not set.

    `quantisation`: a `BitsAndBytesConfig`, or any other config of Transformers.
    """
    if not isinstance(quantisation, BitsAndBytesConfig) or not quantisation.load_in_4bit:
        raise UserError(
            "quantization_config: only 4 bits are supported; give "
            "BitsAndBytesConfig(load_in_4bit=True)"
        )
    computed_in = quantisation.bnb_4bit_compute_dtype
    if computed_in not in (torch.bfloat16, torch.float32):
        raise UserError(
            f"quantization_config: bnb_4bit_compute_dtype: {computed_in}: a base in 4 bits computes "
            "in bfloat16 here; leave it out"
        )
    if quantisation.llm_int8_skip_modules:
        raise UserError(
            f"quantization_config: llm_int8_skip_modules: {quantisation.llm_int8_skip_modules}: "
            "which layers stay whole is the same in every run; leave it out"
        )
