"""A run on the road: what was asked, and what the stops of `road.py` have found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from datasets import IterableDataset
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


def count_of(dataset: Any) -> int | None:
    return None if dataset is None or isinstance(dataset, IterableDataset) else len(dataset)


@dataclass(frozen=True)
class ModelSource:
    """The policy.

    `keys`: its name and how it is loaded. `loaded`: an object of Python's, `processor` too.
    """

    keys: ModelConfig
    peft_config: Any = None
    loaded: Any = None
    processor: Any = None


@dataclass(frozen=True)
class RunRequest:
    """What a user wants, whichever way it came.

    `rows`: a command's keys, or data sets of Python's. `rewards`: what Python gave. `given`: the
    command; None from Python. `most`: so many prompts are measured; None: all.
    """

    config: AdoraGRPOConfig
    model: ModelSource
    rows: AdoraScriptArguments | Datasets
    rewards: Any = None
    given: CliArgs | None = None
    most: int | None = None
    tools: Sequence[Any] = ()  # that Python gave beside the key's
    environment: Any = None  # that Python gave in the key's place

    @property
    def trl_evaluates(self) -> bool:
        """Whether TRL evaluates on the way, on a data set that Python gave."""
        return isinstance(self.rows, Datasets) and self.rows.evaluate is not None


@dataclass(repr=False)
class ResolvedRun:
    """A run on the road: what was asked, and what each stop has found; that is there from its turn
    on.
    """

    asked: RunRequest
    where: RunContext
    notes: list[str] = field(default_factory=list)
    # what could not be looked at; empty for all but a dry run
    unknown: list[str] = field(default_factory=list)
    extensions: dict[str, Extension] = field(init=False)  # by name
    plan: BatchLayout = field(init=False)
    rewards: ChosenRewards = field(init=False)
    tools: ChosenTools = field(init=False)
    toolbox: Toolbox | None = None  # where the run has tools
    # the folder of the model, or its hub id; of an adapter that of its base
    name: str = field(init=False)
    revision: str | None = field(init=False)  # of `name`
    # where an adapter was named: it, and those beneath it
    adapters: list[Adapter] = field(default_factory=list)
    model_config: PretrainedConfig = field(init=False)
    four_bit: bool = False  # whether the base is in 4 bits
    processor: Any = field(init=False)  # None where it is not here
    overlong: OverlongPrompts = field(init=False)
    data: list[str] = field(init=False)  # the folders of a command's data sets
    dataset: Any = field(init=False)  # None where it is not here
    evaluated: Any = None  # Python's, which TRL evaluates
    lengths: Measured | None = field(init=False)
    evaluations: EvaluationPlan | None = field(init=False)  # of the evaluations on the way
    folder: RunFolder = field(init=False)
    start: StartPoint = field(init=False)

    @property
    def config(self) -> AdoraGRPOConfig:
        return self.asked.config

    @property
    def model(self) -> ModelConfig:
        return self.asked.model.keys

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that goes on training: that one is named and no other one is asked for."""
        return self.adapters[0] if self.adapters and self.asked.model.peft_config is None else None

    @property
    def peft_config(self) -> Any:
        """PEFT's config of what is trained; None without an adapter."""
        return self.adapter.config if self.adapter is not None else self.asked.model.peft_config

    @cached_property
    def shape(self) -> ModelShape:
        """Of the policy as it will be trained."""
        byte = bytes_of(self.model.use_bnb_nested_quant) if self.four_bit else 0.0
        return describe(
            self.model_config,
            dtype=self.model.dtype,
            frozen=self.config.adora_freeze,
            peft_config=self.peft_config,
            four_bit_bytes=byte,
        )

    def policy(self) -> Any:
        """What TRL makes its model of: a name, or the model of an adapter that was named, or in 4
        bits.
        """
        if not self.adapters and not self.four_bit:
            return self.name
        init = {
            **(self.config.model_init_kwargs or {}),
            "revision": self.revision,
            "trust_remote_code": False,
        }
        init.pop("quantization_config", None)  # the folder says it
        if self.where.sharding.processes > 1:
            init["device_map"] = None  # as TRL has it
        base = self.name
        if self.model.load_in_4bit and not is_four_bit(self.model_config):
            base = four_bit_folder(base, self.revision, self.model)
        found = (load_policy if self.adapter is not None else load_merged)(
            base, self.adapters, init
        )
        keep_gradients(found)
        return found

    @property
    def script(self) -> AdoraScriptArguments | None:
        """The keys of a command's data and rewards; None from Python."""
        return self.asked.rows if isinstance(self.asked.rows, AdoraScriptArguments) else None

    @property
    def system_prompt(self) -> str | None:
        """What the model is told before each problem, tools among it: the key, or the start of
        Python's first row.
        """
        if self.script is not None:
            return with_tools(self.script.adora_system_prompt, self.schemas)
        prompt = next(iter(self.dataset))["prompt"]
        told = prompt[0] if prompt and not isinstance(prompt, str) else {}
        return str(told["content"]) if told.get("role") == "system" else None

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return self.toolbox.schemas if self.toolbox is not None else []

    @property
    def fingerprint(self) -> Fingerprint:
        return self.folder.now

    @property
    def own(self) -> dict[str, str]:
        """A hash of each file with code of the user's, by what it is for."""
        return {
            **{f"reward {file}": one for file, one in self.rewards.hashes.items()},
            **{f"method {file}": one for file, one in method_hashes(self.config).items()},
            **{f"extension {file}": one for file, one in extension_hashes(self.config).items()},
            **{f"tool {file}": one for file, one in self.tools.hashes.items()},
        }

    @property
    def environment(self) -> Any:
        """What makes one for each rollout, FILE.py:CLASS or an object of Python's; None without
        any.
        """
        return (
            self.asked.environment
            if self.asked.environment is not None
            else self.config.environment_factory
        )

    @property
    def first(self) -> bool:
        return bool(self.config.process_index == 0)

    def take(self, wanted: object) -> None:
        """Hold `output_dir` for a run of Python's.

        `wanted`: what its `train` was told. Raises `UserError`.
        """
        self.start = self.folder.take(wanted, from_python=True)

    def manifest(self) -> dict[str, Any]:
        asked = self.asked.given
        processes = self.where.sharding.processes
        return run_manifest(
            *filter(None, (self.script, self.config, self.model)),
            arguments=asked.arguments if asked else None,
            data=self.data or ["Python"],
            rows=count_of(self.dataset) or 0,
            fingerprint=self.fingerprint,
            plan=self.plan.describe(),
            processes=processes,
            checkpoint=self.start.checkpoint,
            own=self.own,
            left_out=len(self.overlong.left_out),
        )

    @property
    def finished(self) -> Path | None:
        """The checkpoint of the last step, if the run has reached it: Transformers would take one
        step more.
        """
        checkpoint = Path(self.start.checkpoint) if self.start.checkpoint else None
        over = checkpoint is not None and 0 < self.config.max_steps <= facts_of(checkpoint)["step"]
        return checkpoint if over else None

    def first_lines(self) -> list[str]:
        rows = count_of(self.dataset)
        problems = "a stream of problems" if rows is None else amount(rows, "training problem")
        facts = f"{problems}; {self.plan.describe()}"
        return [
            facts,
            *filter(None, [fewer_than_asked()]),
            *self.notes,
            *costs_of(self.config),
            *extension_costs(self.extensions, self.config),
            *self.start.notes,
        ]
