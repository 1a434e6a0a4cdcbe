"""The configuration: TRL's own fields under their own names, and ours, which start with `adora_`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from adora_vl.config.advantage import AdvantageConfig, set_method_settings
from adora_vl.config.data import DataOptions, settle_data_options
from adora_vl.config.device import check_device
from adora_vl.config.faults import FaultOptions
from adora_vl.config.noise import NoiseOptions
from adora_vl.config.record import RecordOptions
from adora_vl.config.replay import ReplayOptions
from adora_vl.config.self_check import CheckOptions
from adora_vl.config.speed import SpeedOptions
from adora_vl.config.values import check_fields
from adora_vl.config.visual import VisualOptions
from adora_vl.prompts import SYSTEM_PROMPT


@dataclass
class AdoraScriptArguments(DataOptions):
    """What to train on and with which reward."""

    dataset_name: list[str] = field(
        default_factory=lambda: ["synthetic"],
        metadata={
            "help": "A folder made by `python -m data_prep`, or 'synthetic' (drawn geometry) or 'knights' (puzzles "
            "without images), made on the spot; with adora_columns a table or hub id too. Several are mixed."
        },
    )
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    adora_synthetic_rows: int = field(
        default=4096, metadata={"help": "Training problems to make when dataset_name is 'synthetic' or 'knights'."}
    )
    adora_system_prompt: str | None = field(
        default=SYSTEM_PROMPT, metadata={"help": "System prompt of every conversation; null for none."}
    )
    adora_reward: list[str] = field(
        default_factory=lambda: ["adora"],
        metadata={
            "help": "Reward preset: adora (1.0 / 0.1 / 0.0), easyr1 (0.9 + 0.1 format), accuracy (1 / 0), format "
            "(1 for a box), think_format, think_answer_format (1 for that form), knights (1.0 / 0.1 / 0.0 on "
            "puzzles) or knights_logic_rl (3 / -0.5 / -1 / -3); judge (a served model); or a function of your own, "
            "FILE.py:FUNCTION. Several are summed with TRL's reward_weights."
        },
    )
    adora_reward_options: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Arguments of reward functions of your own, such as \'{"brevity": {"target": 50}}\'.'},
    )
    adora_rounding: bool = field(
        default=False, metadata={"help": "Accept a decimal that equals the gold rounded to as many places."}
    )

    def __post_init__(self) -> None:
        """A YAML file may name a single preset without brackets."""
        reward: object = self.adora_reward
        if isinstance(reward, str):
            self.adora_reward = [reward]
        settle_data_options(self)


@dataclass
class OwnKeys(
    AdvantageConfig,
    CheckOptions,
    FaultOptions,
    NoiseOptions,
    RecordOptions,
    ReplayOptions,
    SpeedOptions,
    VisualOptions,
):
    """Our keys that have a file of their own."""


@dataclass
class AdoraGRPOConfig(OwnKeys, GRPOConfig):  # type: ignore[misc]  # TRL is untyped to mypy
    """TRL's `GRPOConfig` with ADORA's weights, the rollout guards, freezing and pixel limits."""

    adora_mode: str = field(
        default="attenuation",
        metadata={
            "help": "attenuation (TDS prompts x factor), amplification (TAS prompts x factor) or off (plain GRPO).",
            "choices": ["attenuation", "amplification", "off"],
        },
    )
    adora_factor: float = field(default=0.1, metadata={"help": "The factor of adora_mode; the reference uses 0.1."})
    adora_criteria: list[str] = field(
        default_factory=lambda: ["length"], metadata={"help": "Criteria of an advantageous prompt: length, difficulty."}
    )
    adora_combine: str = field(
        default="any", metadata={"help": "A prompt is TAS if any or all criteria hold.", "choices": ["any", "all"]}
    )
    adora_tau: float = field(default=0.5, metadata={"help": "Pass rate up to which the difficulty criterion holds."})
    adora_difficulty_needs_correct: bool = field(
        default=False,
        metadata={"help": "The difficulty criterion does not hold at a pass rate of 0; the paper's holds there."},
    )
    adora_correct_above: float = field(default=0.5, metadata={"help": "A rollout is correct above this reward."})
    adora_truncation: str = field(
        default="length",
        metadata={
            "help": "length: truncated from adora_truncated_at tokens on; eos: truncated without an end-of-turn token.",
            "choices": ["length", "eos"],
        },
    )
    adora_truncated_at: int | None = field(
        default=None,
        metadata={"help": "Tokens; null means max_completion_length - 2, as the reference (4094 of 4096)."},
    )
    adora_empty_wrong: str = field(
        default="attenuate",
        metadata={
            "help": "Length criterion without an untruncated wrong rollout: attenuate (VLM reference) or keep.",
            "choices": ["attenuate", "keep"],
        },
    )
    adora_no_correct: str = field(
        default="keep",
        metadata={
            "help": "Groups without a correct rollout that meet no criterion: keep (VLM reference) or attenuate (LLM "
            "reference).",
            "choices": ["keep", "attenuate"],
        },
    )
    adora_max_drift: float | None = field(
        default=0.3,
        metadata={
            "help": "Stop when engine and trainer differ by more than this many nats per token on average. bf16 gives "
            "0.01 to 0.05, a fault 1 and more. null switches the guard off."
        },
    )
    adora_vllm_dtype: str = field(
        default="auto",
        metadata={
            "help": "dtype of the engine: auto follows bf16/fp16, else the model's own dtype.",
            "choices": ["auto", "float32", "bfloat16", "float16"],
        },
    )
    adora_vllm_enforce_eager: bool | None = field(
        default=None,
        metadata={
            "help": "Run the engine without torch.compile and CUDA graphs. null: on a CPU, where compiling takes half "
            "a minute at every start."
        },
    )
    adora_vllm_max_num_batched_tokens: int = field(
        default=4096, metadata={"help": "vLLM's prefill budget; must hold one prompt with its image tokens."}
    )
    adora_freeze_vision_tower: bool = field(default=False, metadata={"help": "Do not train the vision tower."})
    adora_freeze_projector: bool = field(default=False, metadata={"help": "Do not train the projector (merger)."})
    adora_freeze_language_model: bool = field(default=False, metadata={"help": "Do not train the language model."})
    adora_eval: list[str] = field(
        default_factory=list,
        metadata={
            "help": "With eval_strategy: steps, what to evaluate on every eval_steps: BENCHMARK=DATA with geometry3k, "
            "mathvista, mmstar or knights. Default: the held-out split of dataset_name."
        },
    )
    adora_eval_limit: int | None = field(
        default=None, metadata={"help": "Evaluate on the first so many problems of each; null: all."}
    )
    adora_seeded_rollouts: bool = field(
        default=True,
        metadata={
            "help": "Sample each rollout from a seed of its own (run seed, step, row), whatever was drawn before it. "
            "On a GPU vLLM samples a little slower with it."
        },
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Start anew in an output_dir that holds a run, which goes at the first new checkpoint."},
    )
    min_pixels: int | None = field(
        default=None,
        metadata={"help": "Smallest image in pixels, for the processor and vLLM alike; null: the model's."},
    )
    max_pixels: int | None = field(
        default=None, metadata={"help": "Largest image in pixels, for the processor and vLLM alike; null: the model's."}
    )
    # TRL's default is every interface; the server is reached over loopback unless told otherwise.
    vllm_server_host: str = field(default="127.0.0.1", metadata={"help": "Host of the vLLM server (server mode)."})

    def __post_init__(self) -> None:
        """TRL's own checks raise `ValueError`. YAML reads a bare `off` as false; here it is the mode of that name."""
        mode: object = self.adora_mode
        if mode is False:
            self.adora_mode = "off"
        check_fields(self)
        check_device(self)
        self.method_notes = set_method_settings(self)
        evaluates = str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no"
        if evaluates and vars(self).get("num_generations_eval") is None:
            self.num_generations_eval = 1  # TRL's evaluation is not used, so its batch need not hold whole groups
        super().__post_init__()

    @property
    def frozen_components(self) -> list[str]:
        names = ("vision_tower", "projector", "language_model")
        return [name for name in names if getattr(self, f"adora_freeze_{name}")]

    @property
    def truncated_at(self) -> int:
        """Tokens from which a completion counts as truncated when `adora_truncation` is `length`."""
        return self.adora_truncated_at if self.adora_truncated_at is not None else self.max_completion_length - 2
