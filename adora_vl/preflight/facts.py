"""What the preflight checks work out: one frozen result for each check, and the resolved run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adora_vl.checkpoint.store import facts_of
from adora_vl.config.methods import method_overheads
from adora_vl.models.adapter import load_merged, load_policy
from adora_vl.models.four_bit import (
    four_bit_folder,
    four_bit_parameter_bytes,
    is_four_bit,
    keep_gradients,
)
from adora_vl.models.shape import ModelShape, model_shape
from adora_vl.preflight.check_sampling import sampling_overheads
from adora_vl.record.manifest import run_manifest
from adora_vl.training.extensions import Extension, extension_costs, extension_hashes
from adora_vl.utils.cli import amount
from adora_vl.utils.launch import fewer_than_asked

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from peft import PeftConfig
    from transformers import PretrainedConfig, ProcessorMixin

    from adora_vl.checkpoint.fingerprint import Fingerprint
    from adora_vl.checkpoint.resume import StartPoint
    from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
    from adora_vl.config.batch_plan import BatchLayout
    from adora_vl.config.run_context import Messages, RunContext
    from adora_vl.data.prompt_lengths import OverlongPrompts, PromptLengths
    from adora_vl.evaluation import EvaluationPlan
    from adora_vl.models.adapter import Adapter
    from adora_vl.preflight.python_inputs import AnyDatasets
    from adora_vl.preflight.request import RunRequest
    from adora_vl.preflight.run_folder import RunFolder
    from adora_vl.rewards import RewardSet
    from adora_vl.tools.run import Toolbox, ToolSet


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The model of a run, as far as it is known before its weights are loaded.

    `name`: its folder or hub id; where the user named an adapter, that of its base. `revision`: of
    `name` on the hub. `config`: that of Transformers. `adapters`: the one that the user named, then
    those that it was trained on top of. `continued`: the adapter that goes on training; None where
    a new one, or none, is trained. `peft_config`: of the adapter that is trained; None without one.
    `four_bit`: whether the base is quantised to 4 bits.
    """

    name: str
    revision: str | None
    config: PretrainedConfig
    adapters: tuple[Adapter, ...]
    continued: Adapter | None
    peft_config: PeftConfig | None
    four_bit: bool

    @property
    def merged(self) -> tuple[Adapter, ...]:
        """The adapters that are merged into the base before training."""
        return self.adapters if self.continued is None else self.adapters[1:]

    @property
    def sources(self) -> list[str]:
        """The model and the adapters that the run reads: folders, or hub ids."""
        return [self.name, *(str(adapter.folder) for adapter in self.adapters)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptFacts:
    """What turns a row into a prompt, and says whether it leaves room for an answer.

    `processor`: None where a dry run cannot reach it. `toolbox`: what the model may call; None for
    a run without tools. `system_prompt`: that of a command, with the tools; None from Python, where
    the rows have it. `lengths`: measures prompts, and has the limits of pixels and tokens.
    """

    processor: ProcessorMixin | None
    toolbox: Toolbox | None
    system_prompt: str | None
    lengths: OverlongPrompts

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools; empty for a run without tools."""
        return self.toolbox.schemas if self.toolbox is not None else []


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """The rows of a run.

    `folders`: the data sets of a command. `train`: the rows to train on; None where a dry run does
    not have them. `evaluated`: the data set of Python code that TRL evaluates. `rows`: the number
    of rows to train on; None where `train` is None, or a stream. `measured`: the lengths of their
    prompts; None where nothing limits them. `left_out`: the ids of rows without room for an answer.
    """

    folders: tuple[str, ...]
    train: Dataset | IterableDataset | None
    evaluated: AnyDatasets | None
    rows: int | None
    measured: PromptLengths | None
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFacts:
    """Where a run writes, and where it starts.

    `folder`: the run's `output_dir`; None for a run on another machine. `start`: from the first
    step, or from a checkpoint.
    """

    folder: RunFolder | None
    start: StartPoint


@dataclass(frozen=True, kw_only=True, repr=False)
class ResolvedRun:
    """A request, and all that the checks have worked out from it."""

    request: RunRequest
    context: RunContext
    # by the name of their entry in `adora_extensions`
    extensions: Mapping[str, Extension]
    layout: BatchLayout
    rewards: RewardSet
    tools: ToolSet
    model: ModelFacts
    prompts: PromptFacts
    data: DataFacts
    # what is evaluated during training; None for nothing
    evaluations: EvaluationPlan | None
    output: OutputFacts
    messages: Messages

    @property
    def config(self) -> AdoraGRPOConfig:
        """The training arguments."""
        return self.request.config

    @property
    def script(self) -> AdoraScriptArguments | None:
        """The keys of a command's data and rewards; None from Python."""
        return self.request.script

    @property
    def folder(self) -> RunFolder:
        """The run's `output_dir`, on the machine that runs it."""
        folder = self.output.folder
        assert folder is not None, "a run on another machine has no folder here"
        return folder

    @property
    def fingerprint(self) -> Fingerprint:
        """Every setting that influences the steps, by which a checkpoint is compared."""
        return self.folder.fingerprint

    @property
    def user_code_hashes(self) -> dict[str, str]:
        """A hash of each file with the user's own code, by what the code is for."""
        return hashes_of_user_code(self.config, self.rewards, self.tools)

    @cached_property
    def shape(self) -> ModelShape:
        """Parameters and layers of the policy as it will be trained."""
        keys = self.request.model.keys
        four_bit_bytes = (
            four_bit_parameter_bytes(keys.use_bnb_nested_quant) if self.model.four_bit else 0.0
        )
        return model_shape(
            self.model.config,
            dtype=keys.dtype,
            frozen=self.config.adora_freeze,
            peft_config=self.model.peft_config,
            four_bit_bytes=four_bit_bytes,
        )

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of each problem, with the tools; None without one.

        It is that of the key, or the system message of the first row that Python code passed.
        """
        if self.script is not None:
            return self.prompts.system_prompt
        assert self.data.train is not None, "Python code passes its rows"
        prompt = next(iter(self.data.train))["prompt"]
        if not prompt or isinstance(prompt, str):
            return None
        first_message = prompt[0]
        if first_message.get("role") != "system":
            return None
        return str(first_message["content"])

    def policy(self) -> Any:
        """Return the model argument for TRL: a name, or a loaded model for an adapter or 4 bits.

        Only `load_policy` and `load_merged` know how a named adapter, or a base in 4 bits, is
        loaded; for anything else TRL loads the model itself.
        """
        model = self.model
        keys = self.request.model.keys
        if not model.adapters and not model.four_bit:
            return model.name
        init = {
            **(self.config.model_init_kwargs or {}),
            "revision": model.revision,
            "trust_remote_code": False,
        }
        # the folder's own config has it
        init.pop("quantization_config", None)
        if self.context.sharding.processes > 1:
            # as TRL does: each process loads onto its own device
            init["device_map"] = None
        base = model.name
        if keys.load_in_4bit and not is_four_bit(model.config):
            base = four_bit_folder(base, model.revision, keys)
        if model.continued is not None:
            policy = load_policy(base, model.adapters, init)
        else:
            policy = load_merged(base, model.adapters, init)
        keep_gradients(policy)
        return policy

    def claimed(self, resume_from_checkpoint: bool | str | None) -> ResolvedRun:
        """Return the run with `output_dir` locked, and the start that Python's `train` asks for.

        `resume_from_checkpoint`: the argument of `train`. Raises `UserError`.
        """
        start = self.folder.take(resume_from_checkpoint, from_python=True)
        return replace(self, output=OutputFacts(folder=self.folder, start=start))

    def manifest(self) -> dict[str, Any]:
        """Return the content of `manifest.json` when the run starts."""
        cli_args = self.request.cli_args
        keys = self.request.model.keys
        sections = [self.config, keys] if self.script is None else [self.script, self.config, keys]
        return run_manifest(
            *sections,
            arguments=cli_args.words if cli_args else None,
            data=list(self.data.folders) or ["Python"],
            rows=self.data.rows or 0,
            fingerprint=self.fingerprint,
            plan=self.layout.describe(),
            processes=self.context.sharding.processes,
            checkpoint=self.output.start.checkpoint,
            user_code=self.user_code_hashes,
            left_out=len(self.data.left_out),
        )

    @property
    def finished(self) -> Path | None:
        """The checkpoint of the last step, if the run has reached it; else None.

        Such a run is not started again, because Transformers would take one step more.
        """
        if not self.output.start.checkpoint:
            return None
        checkpoint = Path(self.output.start.checkpoint)
        is_over = 0 < self.config.max_steps <= facts_of(checkpoint)["step"]
        return checkpoint if is_over else None

    def first_lines(self) -> list[str]:
        """Return the lines that model_shape the run before it starts."""
        problems = "a stream of problems"
        if self.data.rows is not None:
            problems = amount(self.data.rows, "training problem")
        return [
            f"{problems}; {self.layout.describe()}",
            *filter(None, [fewer_than_asked()]),
            *self.messages.notes,
            *method_overheads(self.config),
            *sampling_overheads(self.config),
            *extension_costs(self.extensions, self.config),
            *self.output.start.notes,
        ]


def hashes_of_user_code(
    config: AdoraGRPOConfig, rewards: RewardSet, tools: ToolSet
) -> dict[str, str]:
    """Return a hash of each file with the user's own code, by what the code is for."""
    hashes_by_kind = {
        "reward": rewards.hashes,
        "method": config.methods.hashes,
        "extension": extension_hashes(config),
        "tool": tools.hashes,
    }
    return {
        f"{kind} {file}": digest
        for kind, hashes in hashes_by_kind.items()
        for file, digest in hashes.items()
    }
