"""What a user asks for: by a command, or by Python code that passes objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel
from trl import ModelConfig
from trl.trainer.utils import get_config_model_id

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.command import CliArgs
from adora_vl.config.schema import build_configs
from adora_vl.models.check import lora_of
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.utils.errors import UserError

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import ProcessorMixin


@dataclass(frozen=True)
class ModelSource:
    """Where the policy comes from.

    `keys`: its name and how it is loaded. `peft_config`: PEFT's config of a new adapter.
    `loaded`, `processor`: a model and a processor that Python code passed as objects.
    """

    keys: ModelConfig
    peft_config: PeftConfig | None = None
    loaded: PreTrainedModel | None = None
    processor: ProcessorMixin | None = None


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for, whether by a command, a dry run or Python code.

    `rows`: the keys of a command, or the data sets that Python code passed. `rewards`, `tools` and
    `environment_factory`: objects from Python; `tools` are added to those of the key,
    `environment_factory` takes the key's place. `cli_args`: the command; None from Python.
    `max_rows`: the number of prompts whose length is measured; None: all. `runs_here`: whether this
    machine could run it; only a dry run is ever asked for another one.
    """

    config: AdoraGRPOConfig
    model: ModelSource
    rows: AdoraScriptArguments | Datasets
    rewards: object = None
    cli_args: CliArgs | None = None
    max_rows: int | None = None
    runs_here: bool = True
    tools: Sequence[str | Callable[..., Any]] = ()
    environment_factory: Callable[[], object] | None = None

    @property
    def script(self) -> AdoraScriptArguments | None:
        """The keys of a command's data and rewards; None from Python."""
        return self.rows if isinstance(self.rows, AdoraScriptArguments) else None

    @property
    def environment(self) -> Callable[[], object] | str | None:
        """The factory of an environment per rollout: FILE.py:CLASS or a Python object; or None."""
        if self.environment_factory is not None:
            return self.environment_factory
        named: str | None = self.config.environment_factory
        return named

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0, which alone prints."""
        return bool(self.config.process_index == 0)

    @property
    def trl_evaluates(self) -> bool:
        """Whether TRL evaluates during training, on a data set that Python code passed."""
        return isinstance(self.rows, Datasets) and self.rows.evaluate is not None


def request_from_command(
    cli_args: CliArgs,
    *,
    any_machine: bool = False,
    max_rows: int | None = None,
    processes: int = 1,
) -> RunRequest:
    """Build the configs of a command, and the request for its run. Raises `UserError`.

    `any_machine`: take also a config for GPUs that this machine does not have. `max_rows`: the
    number of prompts whose length is measured; None: all. `processes`: of the run that is planned.
    """
    configs = build_configs(cli_args, any_machine=any_machine, processes=processes)
    return RunRequest(
        config=configs.training,
        model=ModelSource(keys=configs.model, peft_config=lora_of(configs.model)),
        rows=configs.script,
        cli_args=cli_args,
        max_rows=max_rows,
        runs_here=configs.runs_here,
    )


def config_of(args: object, model: str | PreTrainedModel) -> AdoraGRPOConfig:
    """Return the trainer's `args`; for None, a config named after the model, as in TRL.

    Raises `UserError` for a config that is not an `AdoraGRPOConfig`.
    """
    if args is None:
        return AdoraGRPOConfig(f"{_name_of(model).split('/')[-1]}-GRPO")
    if not isinstance(args, AdoraGRPOConfig):
        kind = f"a {type(args).__module__.partition('.')[0]}.{type(args).__name__}"
        remedy = "give its arguments to an AdoraGRPOConfig (from adora_vl import AdoraGRPOConfig)"
        raise UserError(
            f"args: {kind} has other defaults, and steps and batches worked out of them; {remedy}"
        )
    return args


def refuse_objects(
    train_dataset: object,
    reward_funcs: object,
    rollout_func: object,
    environment_factory: object,
) -> None:
    """Raise `UserError` for an argument that would be ignored, or would fail after loading."""
    if rollout_func:
        raise UserError(
            "rollout_func: a sampler of your own is not supported, because its rollouts have "
            "neither seeds nor log-probabilities that can be checked; use tools, or "
            "trl.GRPOTrainer"
        )
    if not isinstance(train_dataset, Dataset | IterableDataset):
        kind = "None" if train_dataset is None else f"a {type(train_dataset).__name__}"
        raise UserError(
            f"train_dataset: {kind} is no data set; make one, such as "
            "datasets.Dataset.from_list(rows)"
        )
    if not reward_funcs and environment_factory is None:
        raise UserError(
            f"reward_funcs: {reward_funcs} would train on nothing; give a function, a preset or a "
            "list"
        )


def _name_of(model: str | PreTrainedModel) -> str:
    """Return the model's folder or hub id; empty where an object does not know it."""
    if isinstance(model, str):
        return model
    return str(get_config_model_id(model.config) or "")


def model_keys(
    model: str | PreTrainedModel,
    config: AdoraGRPOConfig,
    peft_config: PeftConfig | None,
    quantised: Any = None,
) -> ModelConfig:
    """Return the keys that a command would have for this model.

    `quantised`: the trainer's `quantization_config`, which may stand in `model_init_kwargs` too.
    Raises `UserError` for a quantisation that is not supported.
    """
    init = dict(config.model_init_kwargs or {})
    quantised = quantised or init.pop("quantization_config", None)
    if quantised is not None and not getattr(quantised, "load_in_4bit", False):
        raise UserError(
            "quantization_config: only 4 bits are supported; give "
            "BitsAndBytesConfig(load_in_4bit=True)"
        )
    if not isinstance(model, str):
        if quantised or getattr(model, "quantization_method", None):
            raise UserError(
                "model: an object has no folder in 4 bits; give its name, and quantization_config"
            )
        attention = getattr(model.config, "_attn_implementation", None)
        init = {"dtype": model.dtype, "attn_implementation": attention, "revision": None}
    has_adapter = not isinstance(model, str) and hasattr(model, "peft_config")
    return ModelConfig(
        model_name_or_path=_name_of(model),
        model_revision=init.get("revision"),
        dtype=str(init.get("dtype", "float32")).removeprefix("torch."),
        attn_implementation=init.get("attn_implementation"),
        use_peft=peft_config is not None or has_adapter,
        load_in_4bit=quantised is not None,
        bnb_4bit_quant_type=getattr(quantised, "bnb_4bit_quant_type", "nf4"),
        use_bnb_nested_quant=bool(getattr(quantised, "bnb_4bit_use_double_quant", False)),
    )
