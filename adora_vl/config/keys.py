"""The keys that this project adds to those of TRL and Transformers.

Each has its default, its help, and its range as its annotation. Nothing slow is imported here, so
`--help` and a wrong value are answered at once.
"""

from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from adora_vl.config.blocks import RolloutOptions, ToolOptions, key
from adora_vl.config.values import convert_fields
from adora_vl.data.prompts import DEFAULT_PROMPT, SYSTEM_PROMPTS, find_control_token, read_template
from adora_vl.rewards.entries import with_canonical_names
from adora_vl.utils.call_guards import MAX_DEADLINE_S, MIN_DEADLINE_S
from adora_vl.utils.convert import Name
from adora_vl.utils.errors import UserError, did_you_mean

_Eos = Annotated[str, Field(pattern="^eos$", description="eos")]
_Folder = Annotated[str, Field(pattern="/", description="a folder, with a / in its name")]
StepPart = Literal[
    "cache_images",
    "group_requests",
    "share_vision",
    "batch_windows",
    "share_prompt",
    "skip_old_pass",
    "skip_zero_signal",
    "spread_signal",
    "fill_micro_batches",
    "seeded_rollouts",
]
# which layers of the language model are computed again in the backward pass
Recompute = (
    Annotated[int, Field(ge=0)]
    | Annotated[str, Field(pattern="^(auto|all)$", description="auto or all")]
)
_SUM_TOLERANCE = 1e-3  # how far the sum of shares such as 0.333 may be from 1
_MAX_PROMPT_BYTES = 1_000_000  # the most bytes of a file with a system prompt


@dataclass
class AdoraScriptArguments:
    """What to train on and with which reward."""

    dataset_name: list[Name] = key(
        lambda: ["synthetic"],
        "A folder made by `python -m data_prep`, or 'synthetic' (drawn geometry) or 'knights' "
        "(puzzles without images), made on the spot; with adora_columns a table or hub id too. "
        "Several are mixed.",
    )
    dataset_train_split: Name = key("train", "Split to train on.")
    adora_synthetic_rows: Annotated[int, Field(ge=1)] = key(
        4096, "Training problems to make when dataset_name is 'synthetic' or 'knights'."
    )
    adora_columns: dict[str, Any] | None = key(
        None,
        "Where dataset_name is a table, a folder with one, or a hub id: our columns and the "
        "table's, such as {problem: question, answer: label, images: image}. Null: dataset_name "
        "is a prepared folder.",
    )
    adora_mixture: list[Annotated[float, Field(gt=0, le=1)]] | None = key(
        None,
        "The share of each of several data sets in dataset_name, such as [0.7, 0.3]; rows of a "
        "small one are repeated. Null: every row once per epoch.",
    )
    adora_system_prompt: str | None = key(
        "boxed",
        "System prompt of every conversation. boxed asks for a box, think for <think> before it, "
        "think_answer for <think>, then <answer> (think_format and think_answer_format check it); "
        "or a FILE.txt; or a text of more than one word; null for none.",
    )
    adora_prompt: str | None = key(
        DEFAULT_PROMPT,
        "The text of a problem's message from the columns of its row; a line whose columns are "
        "all null is left out. {multiple_choice} lists a row's choices with letters. Null: the "
        "problem alone.",
    )
    adora_overlong_prompts: Literal["error", "drop"] = key(
        "error",
        "What becomes of a row whose prompt leaves no room for an answer within "
        "vllm_max_model_length (or what the model allows): error (the run does not start) or drop "
        "(the row is left out).",
    )
    adora_reward: list[Name | dict[str, Any]] = key(
        lambda: ["boxed_accuracy"],
        "Reward preset: boxed_accuracy (1.0 / 0.1 / 0.0), easyr1 (0.9 + 0.1 format), accuracy "
        "(1 / 0), format (1 for a box), think_format, think_answer_format (1 for that form), knights (1.0 "
        "/ 0.1 / 0.0 on puzzles) or knights_logic_rl (3 / -0.5 / -1 / -3); steps (true and new "
        "claims on the row's figure); judge (a served model); or a function of your own, "
        "FILE.py:FUNCTION. One with options is {judge: {model: m}} or {accuracy: {rounding: "
        "true}}, which takes a rounded decimal. Several are summed with TRL's reward_weights.",
    )

    # The keys whose values a command has converted already; Python code leaves it empty.
    converted: InitVar[frozenset[str]] = field(default=frozenset(), kw_only=True)

    def __post_init__(self, converted: frozenset[str]) -> None:
        """Convert and check the keys, and replace the system prompt's name by its text.

        `converted`: the keys whose values a command has converted already. Raises `UserError`.
        """
        convert_fields(self, converted=converted)
        self.adora_reward = with_canonical_names(self.adora_reward)
        if self.adora_columns == {}:
            raise UserError(
                "adora_columns: {} is empty; write such as {problem: question, answer: label}"
            )
        _check_mixture(self.dataset_name, self.adora_mixture)
        if self.adora_prompt is not None:
            read_template(self.adora_prompt)  # for its errors alone
        self.adora_system_prompt = _system_prompt_text(self.adora_system_prompt)
        token = find_control_token(self.adora_system_prompt)
        if token:
            raise UserError(
                f"adora_system_prompt: it has the model's own token {token}; remove it from the "
                "text"
            )


@dataclass
class AdoraKeys:
    """ADORA's weights, the rollout guards, the engine, evaluation, freezing and pixel limits."""

    adora_method: dict[str, Any] | Name = key(
        "adora",
        "The method that computes the advantages: adora, grpo, dapo, ..., or FILE.py:NAME; "
        "several as dapo+adora, left to right; or a mapping of methods to their options, such as "
        "{adora: {factor: 0.3}}. Without adora its criteria judge the groups for the log alone: "
        "those of the recipe, if the command line names another method than it, else the default. "
        "docs/methods.md has all.",
    )
    adora_stock_step: bool | list[StepPart] = key(
        False,
        "true: compute a step as stock TRL does, for comparing; or the parts of it that are: "
        "cache_images, group_requests, share_vision, batch_windows, share_prompt, skip_old_pass, "
        "skip_zero_signal, spread_signal, fill_micro_batches, seeded_rollouts. docs/speed.md says "
        "what each saves, and how exact it is.",
    )
    adora_rollouts: RolloutOptions = key(
        RolloutOptions,
        "How a generation is filled and compared: refill, budget, ahead, staleness, old_logps.",
    )
    adora_extensions: dict[str, Any] = key(
        dict,
        "Methods that reach into the training step, each from a file: FILE.py:CLASS and its "
        "options. docs/methods.md says how.",
    )
    tools: list[str] = key(
        list,
        "What the model may call between its turns: zoom, mark, line, measure, calculate, or "
        "FILE.py:FUNCTION. docs/tools.md says how.",
    )
    environment_factory: Name | None = key(
        None,
        "FILE.py:CLASS, of which each rollout has an instance: reset(**row) begins it, its public "
        "methods are tools.",
    )
    # TRL has no limit.
    max_tool_calling_iterations: Annotated[int, Field(ge=1)] = key(
        3, "Turns whose calls are answered."
    )
    adora_tool_options: ToolOptions = key(
        ToolOptions,
        "Limits of tools: max_pixels, seconds, turn_tokens, max_text, images.",
    )
    adora_correct_above: float = key(0.5, "A rollout is correct above this reward.")
    adora_truncated: Annotated[int, Field(ge=1)] | _Eos | None = key(
        None,
        "Which rollouts count as truncated: those with so many tokens; null: "
        "max_completion_length - 2, as the reference (4094 of 4096); eos: those that nothing has "
        "ended.",
    )
    adora_max_drift: Annotated[float, Field(gt=0)] | None = key(
        0.3,
        "Stop when engine and trainer differ by more than this many nats per token on average. "
        "bf16 gives 0.01 to 0.05, a fault 1 and more. null switches the guard off.",
    )
    adora_self_check: bool = key(
        True,
        "Before the first step, compare engine and trainer on two prompts and refuse to train if "
        "they disagree; false skips this check. `python -m adora_vl.doctor` checks more.",
    )
    adora_max_ratio: Annotated[float, Field(ge=1)] | None = key(
        1000.0,
        "Skip a step with a larger importance ratio of new to old policy (per token, or per "
        "sequence with importance_sampling_level: sequence); null: never.",
    )
    adora_reward_timeout: Annotated[float, Field(ge=MIN_DEADLINE_S, le=MAX_DEADLINE_S)] | None = (
        key(
            300.0,
            "Seconds that a reward function of your own may take for the completions of one "
            "generation on one process, before the run is stopped; null: no limit.",
        )
    )
    adora_vllm_dtype: Literal["auto", "float32", "bfloat16", "float16"] = key(
        "auto", "dtype of the engine: auto follows bf16/fp16, else the model's own dtype."
    )
    adora_vllm_enforce_eager: bool | None = key(
        None,
        "Run the engine without torch.compile and CUDA graphs. null: on a CPU, where compiling "
        "takes half a minute at every start.",
    )
    adora_vllm_max_num_batched_tokens: Annotated[int, Field(ge=1)] = key(
        4096, "vLLM's prefill budget; must hold one prompt with its image tokens."
    )
    adora_weight_transfer: Literal["nccl", "file"] | _Folder = key(
        "nccl",
        "How weights reach vLLM servers (vllm_mode: server): nccl; or by files, for any network, "
        "several servers (vllm_server_base_url: http://a:8000,http://b:8000), and CPUs, in "
        ".weights of output_dir (file), or a folder that trainer and servers see, such as one in "
        "/dev/shm; the trainer's user alone can read it.",
    )
    adora_recompute: Recompute = key(
        "auto",
        "With gradient_checkpointing: true, the layers of the language model that the backward "
        "pass computes again. auto: for each micro-batch as few as leave a tenth of the GPU's "
        "memory free, by the dry run's formulas; all; or a number: so many, the first ones. It "
        "changes no value.",
    )
    adora_freeze: list[Literal["vision_tower", "projector", "language_model"]] = key(
        list,
        "The parts that are not trained: vision_tower, projector (the merger), language_model.",
    )
    adora_eval: list[str] = key(
        list,
        "With eval_strategy: steps, what to evaluate on every eval_steps: BENCHMARK=DATA with "
        "geometry3k, mathvista, mathvision, mmstar, wemath, mathverse, mmmu_pro, logicvista, "
        "dynamath, knights, problems (any prepared folder) or FILE.py:NAME. Default: the held-out "
        "split of dataset_name.",
    )
    adora_eval_limit: Annotated[int, Field(ge=1)] | None = key(
        None, "Evaluate on the first so many problems of each; null: all."
    )
    adora_record_gb: Annotated[float, Field(ge=0)] = key(
        2.0,
        "Bound on the record of the rollouts in output_dir/rollouts, in GB (10^9 bytes); the "
        "oldest steps are deleted beyond it. 0 records none.",
    )
    overwrite_output_dir: bool = key(
        False,
        "Start anew in an output_dir that holds a run. What it wrote goes at the first new "
        "checkpoint.",
    )
    min_pixels: Annotated[int, Field(ge=1)] | None = key(
        None, "Smallest image in pixels, for the processor and vLLM alike; null: the model's."
    )
    max_pixels: Annotated[int, Field(ge=1)] | None = key(
        None, "Largest image in pixels, for the processor and vLLM alike; null: the model's."
    )
    # TRL's default is every interface; the server is reached over loopback unless told otherwise.
    vllm_server_host: Name = key("127.0.0.1", "Host of the vLLM server (server mode).")

    def uses(self, part: StepPart) -> bool:
        """Return whether a part of the training step is computed in this project's faster way.

        `adora_stock_step` lists the parts that are computed as in TRL; true means all of them.
        """
        stock_parts = self.adora_stock_step
        if isinstance(stock_parts, list):
            return part not in stock_parts
        return not stock_parts

    @property
    def shares_vision(self) -> bool:
        """Whether the vision tower sees an image once for all rollouts of a group.

        Only images that are cached are known to be the same.
        """
        return self.uses("cache_images") and self.uses("share_vision")


def _check_mixture(dataset_names: list[str], shares: list[float] | None) -> None:
    """Raise `UserError` unless `dataset_name` names each data set once, and the shares fit them.

    `shares`: the value of `adora_mixture`, one share for each data set; None without one.
    """
    if not dataset_names:
        raise UserError("dataset_name: [] is empty; name a data set")
    for number, name in enumerate(dataset_names):
        if name in dataset_names[:number]:
            raise UserError(f"dataset_name: {name!r} is given twice; name each data set once")
    if shares is None:
        return
    if len(shares) != len(dataset_names):
        raise UserError(
            f"adora_mixture: {shares} has {len(shares)} values for the {len(dataset_names)} of "
            f"dataset_name: {dataset_names}"
        )
    if abs(sum(shares) - 1) > _SUM_TOLERANCE:
        raise UserError(
            f"adora_mixture: {shares} sum to {sum(shares):g}; write shares that sum to 1, "
            "such as [0.7, 0.3]"
        )


def _system_prompt_text(value: str | None) -> str | None:
    """Return the text of the system prompt that `adora_system_prompt` means.

    The value is the name of a built-in prompt, a text of more than one word, or else a FILE.txt.
    Raises `UserError` for a file that cannot be read, is empty or too large.
    """
    if value is None:
        return None
    if value in SYSTEM_PROMPTS:
        return SYSTEM_PROMPTS[value]
    # The path of a file may contain spaces, but hardly a line break.
    may_be_file = value.endswith(".txt") and "\n" not in value
    has_several_words = len(value.split()) > 1
    if has_several_words and not may_be_file:
        return value
    try:
        content = Path(value).read_bytes()
        text = content.decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        # An OSError has a `strerror`, and the error of a text that is not UTF-8 a `reason`.
        reason = getattr(error, "strerror", None) or getattr(error, "reason", None) or error
        raise UserError(
            f"adora_system_prompt: {value!r} is not one of {', '.join(SYSTEM_PROMPTS)}, nor a "
            f"UTF-8 text that can be read ({reason}), nor a text of more than one word"
            f"{did_you_mean(value, SYSTEM_PROMPTS)}"
        ) from error
    if not text or len(content) > _MAX_PROMPT_BYTES:
        raise UserError(
            f"adora_system_prompt: {value!r} has {len(content)} bytes; name a file with a prompt "
            "in it"
        )
    return text
