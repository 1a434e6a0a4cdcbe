"""The request for a run, and what the checks of `run_checks.py` work out from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig
from trl import ModelConfig

from adora_vl.checkpoint.fingerprint import Fingerprint
from adora_vl.checkpoint.resume import StartPoint
from adora_vl.checkpoint.store import facts_of
from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.advantage import method_hashes
from adora_vl.config.batch_plan import BatchLayout
from adora_vl.config.checks import costs_of
from adora_vl.config.command import CliArgs
from adora_vl.config.run_context import RunContext
from adora_vl.data.prompt_lengths import Measured, OverlongPrompts
from adora_vl.data.prompts import with_tools
from adora_vl.evaluation import EvaluationPlan
from adora_vl.models.adapter import Adapter, load_merged, load_policy
from adora_vl.models.four_bit import bytes_of, four_bit_folder, is_four_bit, keep_gradients
from adora_vl.models.shape import ModelShape, describe
from adora_vl.preflight.python_inputs import Datasets
from adora_vl.preflight.run_folder import RunFolder
from adora_vl.record.manifest import run_manifest
from adora_vl.rewards import ChosenRewards
from adora_vl.tools.run import ChosenTools, Toolbox
from adora_vl.training.extensions import Extension, extension_costs, extension_hashes
from adora_vl.utils.cli import amount
from adora_vl.utils.launch import fewer_than_asked


def count_of(dataset: Dataset | IterableDataset | None) -> int | None:
    """The number of rows; None for a stream, and where the data set is not on this machine."""
    if dataset is None or isinstance(dataset, IterableDataset):
        return None
    return len(dataset)


@dataclass(frozen=True)
class ModelSource:
    """Where the policy comes from.

    `keys`: its name and how it is loaded. `peft_config`: PEFT's config of a new adapter.
    `loaded`, `processor`: a model and a processor that Python code passed as objects.
    """

    keys: ModelConfig
    peft_config: Any = None
    loaded: Any = None
    processor: Any = None


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for, whether by a command, a dry run or Python code.

    `rows`: the keys of a command, or the data sets that Python code passed. `rewards`, `tools`
    and `environment`: objects from Python; `tools` are added to those of the key, `environment`
    takes the key's place. `cli_args`: the command; None from Python. `max_rows`: the number of
    prompts whose length is measured; None: all.
    """

    config: AdoraGRPOConfig
    model: ModelSource
    rows: AdoraScriptArguments | Datasets
    rewards: Any = None
    cli_args: CliArgs | None = None
    max_rows: int | None = None
    tools: Sequence[Any] = ()
    environment: Any = None

    @property
    def trl_evaluates(self) -> bool:
        """Whether TRL evaluates during training, on a data set that Python code passed."""
        return isinstance(self.rows, Datasets) and self.rows.evaluate is not None


@dataclass(repr=False)
class ResolvedRun:
    """A request, and what each check has worked out from it.

    A field without a default is set by its check in `run_checks.CHECKS`, and exists from then on:
    a later check may read what an earlier one has set.
    """

    request: RunRequest
    context: RunContext
    # lines for the user, printed before the run starts
    notes: list[str] = field(default_factory=list)
    # lines about what could not be checked; only a dry run has any
    unknown: list[str] = field(default_factory=list)
    # what a run would stop with, of a dry run that goes on to predict memory; else empty
    refusal: str = ""
    # by the name of their entry in `adora_extensions`
    extensions: dict[str, Extension] = field(init=False)
    plan: BatchLayout = field(init=False)
    rewards: ChosenRewards = field(init=False)
    tools: ChosenTools = field(init=False)
    # None for a run without tools
    toolbox: Toolbox | None = None
    # the model's folder or hub id; where the user named an adapter, that of its base
    name: str = field(init=False)
    # the revision of `name` on the hub
    revision: str | None = field(init=False)
    # the adapter that the user named, then those that it was trained on top of
    adapters: list[Adapter] = field(default_factory=list)
    model_config: PretrainedConfig = field(init=False)
    # whether the base model is quantised to 4 bits
    four_bit: bool = False
    # None where a dry run cannot reach it
    processor: Any = field(init=False)
    overlong: OverlongPrompts = field(init=False)
    # the folders of a command's data sets
    data: list[str] = field(init=False)
    # None where a dry run does not have it
    dataset: Any = field(init=False)
    # the data set of Python code that TRL evaluates
    evaluated: Any = None
    lengths: Measured | None = field(init=False)
    # what is evaluated during training; None for nothing
    evaluations: EvaluationPlan | None = field(init=False)
    folder: RunFolder = field(init=False)
    start: StartPoint = field(init=False)

    @property
    def config(self) -> AdoraGRPOConfig:
        """The training arguments."""
        return self.request.config

    @property
    def model(self) -> ModelConfig:
        """The keys that say how the model is loaded."""
        return self.request.model.keys

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that continues training; None where a new one, or none, is trained.

        A named adapter continues unless the request has a `peft_config`: then it is merged into
        its base, and a new adapter is trained on top.
        """
        if self.adapters and self.request.model.peft_config is None:
            return self.adapters[0]
        return None

    @property
    def merged_adapters(self) -> list[Adapter]:
        """The adapters that are merged into the base before training."""
        return self.adapters if self.adapter is None else self.adapters[1:]

    @property
    def peft_config(self) -> Any:
        """PEFT's config of the adapter that is trained; None without one."""
        if self.adapter is not None:
            return self.adapter.config
        return self.request.model.peft_config

    @cached_property
    def shape(self) -> ModelShape:
        """Parameters and layers of the policy as it will be trained."""
        four_bit_bytes = bytes_of(self.model.use_bnb_nested_quant) if self.four_bit else 0.0
        return describe(
            self.model_config,
            dtype=self.model.dtype,
            frozen=self.config.adora_freeze,
            peft_config=self.peft_config,
            four_bit_bytes=four_bit_bytes,
        )

    def policy(self) -> Any:
        """The model argument for TRL: a name, or a loaded model for an adapter or 4 bits.

        Only `load_policy` and `load_merged` know how a named adapter, or a base in 4 bits, is
        loaded; for anything else TRL loads the model itself.
        """
        if not self.adapters and not self.four_bit:
            return self.name
        init = {
            **(self.config.model_init_kwargs or {}),
            "revision": self.revision,
            "trust_remote_code": False,
        }
        # the folder's own config has it
        init.pop("quantization_config", None)
        if self.context.sharding.processes > 1:
            # as TRL does: each process loads onto its own device
            init["device_map"] = None
        base = self.name
        if self.model.load_in_4bit and not is_four_bit(self.model_config):
            base = four_bit_folder(base, self.revision, self.model)
        if self.adapter is not None:
            policy = load_policy(base, self.adapters, init)
        else:
            policy = load_merged(base, self.adapters, init)
        keep_gradients(policy)
        return policy

    @property
    def script(self) -> AdoraScriptArguments | None:
        """The keys of a command's data and rewards; None from Python."""
        rows = self.request.rows
        return rows if isinstance(rows, AdoraScriptArguments) else None

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of each problem, with the tools; None without one.

        It is that of the key, or the system message of the first row that Python code passed.
        """
        if self.script is not None:
            return with_tools(self.script.adora_system_prompt, self.schemas)
        prompt = next(iter(self.dataset))["prompt"]
        if not prompt or isinstance(prompt, str):
            return None
        first_message = prompt[0]
        if first_message.get("role") != "system":
            return None
        return str(first_message["content"])

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools; empty for a run without tools."""
        return self.toolbox.schemas if self.toolbox is not None else []

    @property
    def fingerprint(self) -> Fingerprint:
        """Every setting that influences the steps, by which a checkpoint is compared."""
        return self.folder.now

    @property
    def user_code_hashes(self) -> dict[str, str]:
        """A hash of each file with the user's own code, by what the code is for."""
        hashes_by_kind = {
            "reward": self.rewards.hashes,
            "method": method_hashes(self.config),
            "extension": extension_hashes(self.config),
            "tool": self.tools.hashes,
        }
        return {
            f"{kind} {file}": digest
            for kind, hashes in hashes_by_kind.items()
            for file, digest in hashes.items()
        }

    @property
    def environment(self) -> Any:
        """The factory of an environment per rollout: FILE.py:CLASS or a Python object; or None."""
        if self.request.environment is not None:
            return self.request.environment
        return self.config.environment_factory

    @property
    def is_main_process(self) -> bool:
        """Whether this process is rank 0, which alone prints."""
        return bool(self.config.process_index == 0)

    def take(self, resume_from_checkpoint: object) -> None:
        """Lock `output_dir` for a run from Python, and choose where it starts.

        `resume_from_checkpoint`: the argument of `train`. Raises `UserError`.
        """
        self.start = self.folder.take(resume_from_checkpoint, from_python=True)

    def manifest(self) -> dict[str, Any]:
        """The content of `manifest.json` when the run starts."""
        cli_args = self.request.cli_args
        processes = self.context.sharding.processes
        return run_manifest(
            *filter(None, (self.script, self.config, self.model)),
            arguments=cli_args.arguments if cli_args else None,
            data=self.data or ["Python"],
            rows=count_of(self.dataset) or 0,
            fingerprint=self.fingerprint,
            plan=self.plan.describe(),
            processes=processes,
            checkpoint=self.start.checkpoint,
            user_code=self.user_code_hashes,
            left_out=len(self.overlong.left_out),
        )

    @property
    def finished(self) -> Path | None:
        """The checkpoint of the last step, if the run has reached it; else None.

        Such a run is not started again, because Transformers would take one step more.
        """
        if not self.start.checkpoint:
            return None
        checkpoint = Path(self.start.checkpoint)
        is_over = 0 < self.config.max_steps <= facts_of(checkpoint)["step"]
        return checkpoint if is_over else None

    def first_lines(self) -> list[str]:
        """The lines that describe the run before it starts."""
        rows = count_of(self.dataset)
        problems = "a stream of problems" if rows is None else amount(rows, "training problem")
        return [
            f"{problems}; {self.plan.describe()}",
            *filter(None, [fewer_than_asked()]),
            *self.notes,
            *costs_of(self.config),
            *extension_costs(self.extensions, self.config),
            *self.start.notes,
        ]
