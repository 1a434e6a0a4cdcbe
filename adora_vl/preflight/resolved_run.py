"""What the preflight checks work out: one frozen result for each check, and the resolved run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from adora_vl.checkpoint.store import read_checkpoint_manifest
from adora_vl.config.batch_plan import total_optimizer_steps
from adora_vl.config.methods import notes_on_methods
from adora_vl.models.adapter import load_merged, load_policy
from adora_vl.models.families import sees_images
from adora_vl.models.four_bit import (
    four_bit_folder,
    four_bit_parameter_bytes,
    is_four_bit,
    prevent_repacking,
)
from adora_vl.models.shape import ModelShape, model_shape
from adora_vl.preflight.check_sampling import notes_on_filters
from adora_vl.preflight.python_inputs import system_message_text
from adora_vl.record.manifest import TrainingData, run_manifest
from adora_vl.training.extensions import Extension, extension_costs, extension_hashes
from adora_vl.utils.cli import pluralize
from adora_vl.utils.launch import single_process_note

if TYPE_CHECKING:
    from datasets import IterableDataset
    from peft import PeftConfig
    from transformers import PretrainedConfig, ProcessorMixin

    from adora_vl.checkpoint.fingerprint import Fingerprint
    from adora_vl.checkpoint.resume import StartPoint
    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.config.batch_plan import BatchLayout
    from adora_vl.config.run_context import CheckMessages, RunContext
    from adora_vl.data.overlong_prompts import PromptLengthFilter
    from adora_vl.data.prompt_lengths import PromptLengths
    from adora_vl.evaluation import EvaluationPlan
    from adora_vl.models.adapter import Adapter
    from adora_vl.preflight.python_inputs import AnyDatasets
    from adora_vl.preflight.request import RunRequest
    from adora_vl.preflight.run_folder import RunFolder
    from adora_vl.rewards import RewardSet
    from adora_vl.tools.run import Toolbox, ToolSet


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """The model of a run, as far as it is known before its weights are loaded.

    `name`: its folder or hub id; where the user named an adapter, that of its base. `revision`: of
    `name` on the hub. `config`: that of Transformers. `adapters`: the one that the user named, then
    those that it was trained on top of; empty without one. `continued_adapter`: the named adapter
    if it goes on training; None where a new adapter, or none, is trained. `peft_config`: of the
    adapter that is trained; None without one. `is_four_bit`: whether the base is quantised to 4
    bits.
    """

    name: str
    revision: str | None
    config: PretrainedConfig
    adapters: tuple[Adapter, ...] = ()
    continued_adapter: Adapter | None = None
    peft_config: PeftConfig | None = None
    is_four_bit: bool = False

    @property
    def merged_adapters(self) -> tuple[Adapter, ...]:
        """The adapters that are merged into the base before training."""
        if self.continued_adapter is None:
            return self.adapters
        return self.adapters[1:]

    @property
    def folders_or_ids(self) -> list[str]:
        """The model and the adapters that the run reads: folders, or hub ids."""
        return [self.name, *(str(adapter.folder) for adapter in self.adapters)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptInfo:
    """What turns a row into a prompt, and says whether it leaves room for an answer.

    `processor`: the model's; None where a dry run cannot reach it. `toolbox`: the tools that the
    model may call; None for a run without tools. `system_prompt`: that of a command, with a
    description of the tools; None from Python, where the rows have it. `length_filter`: measures
    the prompts, and has the limits of pixels and tokens.
    """

    processor: ProcessorMixin | None
    toolbox: Toolbox | None
    system_prompt: str | None
    length_filter: PromptLengthFilter

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools; empty for a run without tools."""
        return self.toolbox.schemas if self.toolbox is not None else []


@dataclass(frozen=True, kw_only=True, slots=True)
class DataInfo:
    """The rows of a run.

    `folders`: the data sets of a command; empty from Python. `train_dataset`: the rows to train on;
    None where a dry run does not have them. `eval_dataset`: the data set of Python code that TRL
    evaluates; else None. `prompt_lengths`: the lengths of the prompts to train on; None where
    nothing limits them. `left_out_ids`: the ids of the rows that are not trained on, since their
    prompts leave no room for an answer.
    """

    folders: tuple[str, ...] = ()
    train_dataset: Dataset | IterableDataset | None
    eval_dataset: AnyDatasets | None = None
    prompt_lengths: PromptLengths | None
    left_out_ids: tuple[str, ...] = ()

    @property
    def row_count(self) -> int | None:
        """The number of rows to train on; None where they are a stream, or not here."""
        return len(self.train_dataset) if isinstance(self.train_dataset, Dataset) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputInfo:
    """Where a run writes, and where it starts.

    `folder`: the run's `output_dir`; None for a run on another machine. `start_point`: the first
    step, or the checkpoint that the run resumes from.
    """

    folder: RunFolder | None
    start_point: StartPoint


@dataclass(frozen=True, kw_only=True, repr=False)
class ResolvedRun:
    """A request to train, and all that the checks before the training have worked out from it.

    `request`: what the user asks for. `context`: where the run takes place. `extensions`: the
    user's extensions of the training step, by their entries in `adora_extensions`. `layout`: the
    sizes of the batches. `evaluations`: what is evaluated during training; None for nothing.
    `user_code_hashes`: those of `hashes_of_user_code`.
    """

    request: RunRequest
    context: RunContext
    extensions: Mapping[str, Extension]
    layout: BatchLayout
    rewards: RewardSet
    tools: ToolSet
    model: ModelInfo
    prompts: PromptInfo
    data: DataInfo
    evaluations: EvaluationPlan | None
    user_code_hashes: Mapping[str, str]
    output: OutputInfo

    @property
    def messages(self) -> CheckMessages:
        """What the user is told before the run."""
        return self.context.messages

    @property
    def config(self) -> AdoraGRPOConfig:
        """The training arguments."""
        return self.request.config

    @property
    def script_args(self) -> AdoraScriptArguments | None:
        """The keys of a command's data and rewards; None from Python."""
        return self.request.script_args

    @property
    def folder(self) -> RunFolder:
        """The run's `output_dir`, on the machine that runs it."""
        folder = self.output.folder
        assert folder is not None, "a run on another machine has no folder here"
        return folder

    @property
    def fingerprint(self) -> Fingerprint:
        """Everything that influences the steps of the run, by which it is compared with others."""
        return self.folder.fingerprint

    @cached_property
    def shape(self) -> ModelShape:
        """Parameters and layers of the policy as it will be trained."""
        model_args = self.request.model.model_args
        bytes_per_four_bit_parameter = (
            four_bit_parameter_bytes(model_args.use_bnb_nested_quant)
            if self.model.is_four_bit
            else 0.0
        )
        return model_shape(
            self.model.config,
            dtype=model_args.dtype,
            frozen=self.config.adora_freeze,
            peft_config=self.model.peft_config,
            bytes_per_four_bit_parameter=bytes_per_four_bit_parameter,
        )

    @property
    def system_prompt(self) -> str | None:
        """The run's system prompt, with a description of the tools; None without one.

        For a command it is the text of the key. For Python code it is the system message of the
        first row.
        """
        if self.script_args is not None:
            return self.prompts.system_prompt
        assert self.data.train_dataset is not None, "Python code passes its rows"
        return system_message_text(next(iter(self.data.train_dataset))["prompt"])

    def policy(self) -> Any:
        """Return the model argument for TRL's trainer: a name, or a model that is loaded here.

        TRL loads a model by its name. It cannot load a base in 4 bits, nor a model with an adapter
        that goes on training or is merged first. So these are loaded here.
        """
        model = self.model
        model_args = self.request.model.model_args
        if not model.adapters and not model.is_four_bit:
            return model.name
        init_kwargs = {
            **(self.config.model_init_kwargs or {}),
            "revision": model.revision,
            "trust_remote_code": False,
        }
        # A base in 4 bits is read from a folder whose own config says how it is quantised.
        init_kwargs.pop("quantization_config", None)
        # The one that the checks assume. For a base in 4 bits it differs from TRL's default.
        init_kwargs.setdefault("dtype", model_args.dtype)
        if self.context.sharding.processes > 1:
            # Each process loads onto its own device, as in TRL.
            init_kwargs["device_map"] = None
        base = model.name
        if model_args.load_in_4bit and not is_four_bit(model.config):
            # The base is quantised once, and kept in a folder.
            base = four_bit_folder(base, model.revision, model_args)
        if model.continued_adapter is not None:
            policy = load_policy(base, model.adapters, init_kwargs)
        else:
            policy = load_merged(base, model.adapters, init_kwargs)
        # Layers in 4 bits that bitsandbytes repacks on a CPU would have no gradients.
        prevent_repacking(policy)
        return policy

    def lock_output_dir(self, resume_from_checkpoint: bool | str | None) -> ResolvedRun:
        """Lock `output_dir`, and return this run with the checkpoint from which it goes on, if any.

        `train` calls this in a run from Python, where the checkpoint is an argument of `train`. A
        command has locked the folder in its checks.

        `resume_from_checkpoint`: the argument of `train`. Raises `UserError`, such as for a folder
        that another run has locked.
        """
        start_point = self.folder.lock(resume_from_checkpoint, from_python=True)
        return replace(self, output=OutputInfo(folder=self.folder, start_point=start_point))

    def manifest(self) -> dict[str, Any]:
        """Return the content of `manifest.json` when the run starts: its settings and inputs."""
        cli_args = self.request.cli_args
        settings: list[Any] = [self.config, self.request.model.model_args]
        if self.script_args is not None:
            settings = [self.script_args, *settings]
        data = TrainingData(
            folders=list(self.data.folders) or ["Python"],
            row_count=self.data.row_count or 0,
            overlong_row_count=len(self.data.left_out_ids),
        )
        manifest = run_manifest(
            *settings,
            arguments=cli_args.words if cli_args else None,
            data=data,
            fingerprint=self.fingerprint,
            batch_plan=self.layout.describe(),
            processes=self.context.sharding.processes,
            checkpoint=self.output.start_point.checkpoint,
            user_code_hashes=self.user_code_hashes,
        )
        manifest["model"]["sees_images"] = sees_images(self.model.config)
        if self.model.adapters:
            manifest["model"]["base"] = self.model.name
        return manifest

    @property
    def merges_at_end(self) -> bool:
        """Whether the run leaves a merged model beside its adapter when it ends.

        Under ZeRO-3, and with a base in 4 bits, merging is left to the user.
        """
        has_adapter = self.model.peft_config is not None or self.model.continued_adapter is not None
        return has_adapter and self.context.sharding.zero_stage != 3 and not self.model.is_four_bit

    @property
    def finished_checkpoint(self) -> Path | None:
        """The checkpoint to resume from if it is that of the run's last step; else None.

        Such a run is not started again, because Transformers would take one step more.
        """
        if self.output.start_point.checkpoint is None:
            return None
        checkpoint = Path(self.output.start_point.checkpoint)
        total_steps = total_optimizer_steps(self.config, self.layout, self.data.row_count)
        is_last = (
            total_steps is not None and read_checkpoint_manifest(checkpoint)["step"] >= total_steps
        )
        return checkpoint if is_last else None

    def lines_before_start(self) -> list[str]:
        """Return the lines that describe the run before it starts."""
        problems = "a stream of problems"
        if self.data.row_count is not None:
            problems = pluralize(self.data.row_count, "training problem")
        lines = [f"{problems}; {self.layout.describe()}"]
        note_on_processes = single_process_note()
        if note_on_processes:
            lines.append(note_on_processes)
        return [
            *lines,
            *self.messages.notes,
            *notes_on_methods(self.config),
            *notes_on_filters(self.config),
            *extension_costs(self.extensions, self.config),
            *self.output.start_point.notes,
        ]


def hashes_of_user_code(
    config: AdoraGRPOConfig, rewards: RewardSet, tools: ToolSet
) -> dict[str, str]:
    """Return a hash of each file with the user's own code, by names such as `tool my_tools.py`."""
    hashes_by_purpose = {
        "reward": rewards.hashes,
        "method": config.methods.hashes,
        "extension": extension_hashes(config),
        "tool": tools.hashes,
    }
    hash_by_name: dict[str, str] = {}
    for purpose, hash_by_file in hashes_by_purpose.items():
        for file, digest in hash_by_file.items():
            hash_by_name[f"{purpose} {file}"] = digest
    return hash_by_name
