"""A generation is graded and collated as stock TRL does it, on the same completions.

Every column of the batch and every metric is equal to the bit.
"""

import copy
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import Qwen2Config, Qwen2ForSequenceClassification
from trl import GRPOTrainer

from adora_vl.config import AdoraGRPOConfig
from adora_vl.config.keys import StepPart
from adora_vl.data.prompts import SYSTEM_PROMPT, conversation
from adora_vl.models.load import PRETRAINED_FOLDER, load_processor
from adora_vl.rollout.rollouts import SamplingResult
from adora_vl.rollout.samplers import VLLMSampler
from adora_vl.trainer import AdoraGRPOTrainer
from tests.support.pictures import noise_picture

pytestmark = [pytest.mark.slow, pytest.mark.core]
NUM_GROUPS = 4
GROUP_SIZE = 4
IMAGE_COUNTS_BY_CASE = {
    "text": (0, 0, 0, 0),
    "one": (1, 1, 1, 1),
    "several": (2, 1, 3, 1),
    "mixed": (0, 2, 0, 1),
}
# Means that are summed in another order, without a mask as an index.
ROUNDED_METRICS = {
    "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/mean",
}


def reward_by_first_token(
    completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **columns: Any
) -> list[float]:
    """Reward by the first token, and log an extra column and a figure as a user's reward may."""
    log_extra("first", [ids[0] for ids in completion_ids])
    log_metric("shortest", min(map(len, completion_ids)))
    return [float(ids[0] % 3 == 0) for ids in completion_ids]


async def reward_some_groups_by_length(
    completions: list[Any], level: list[int], **columns: Any
) -> list[float | None]:
    """Reward problems of even level by their length, and give None for the others.

    TRL's examples for several tasks do so.
    """
    return [
        None if problem_level % 2 else len(completion[0]["content"]) / 7
        for problem_level, completion in zip(level, completions, strict=True)
    ]


class FlatImagesProcessor:
    """Wraps the processor for stock TRL, which gives it None for a row without images.

    Transformers raises on that.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, images: Any = None, **kwargs: Any) -> Any:
        return self._processor(
            images=images and [image for row in images for image in row or []], **kwargs
        )


def rows_of_rollouts(image_counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return a row for each rollout of four problems, which have so many images each."""
    rows = [
        {
            "prompt": conversation(f"What is {number}?", SYSTEM_PROMPT),
            "level": number,
            "images": [noise_picture(10 * number + image_number) for image_number in range(count)],
        }
        for number, count in enumerate(image_counts)
    ]
    return [copy.copy(row) for row in rows for _ in range(GROUP_SIZE)]


def random_completions_and_logps(
    end_token_ids: list[int],
) -> tuple[list[list[int]], list[list[float | None]]]:
    """Return random completions of 1 to 9 tokens, and an engine's log-probabilities of them.

    Every second completion has the end tokens. One log-probability is missing.
    """
    draw = torch.Generator().manual_seed(4)
    token_ids = []
    logps = []
    for row in range(NUM_GROUPS * GROUP_SIZE):
        ids = torch.randint(14, 400, (1 + row % 9,), generator=draw).tolist()
        token_ids.append([*ids, *end_token_ids[: row % 2]])
        row_logps: list[float | None] = (
            -3 * torch.rand(len(token_ids[-1]), generator=draw)
        ).tolist()
        logps.append([None, *row_logps[1:]] if row == 3 else row_logps)
    return token_ids, logps


def build_trainer(folder: Any, reward: Any, **settings: Any) -> AdoraGRPOTrainer:
    """Build our trainer of the tiny model, with every part of a step as in stock TRL."""
    processor = load_processor(str(PRETRAINED_FOLDER))
    peft_config = settings.pop("peft_config", None)
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": NUM_GROUPS * GROUP_SIZE,
        "per_device_eval_batch_size": NUM_GROUPS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": 12,
        "save_strategy": "no",
        "report_to": "none",
        "adora_method": "grpo",
        "adora_truncated": "eos",
        "adora_max_drift": None,
        "adora_stock_step": list(get_args(StepPart)),
    }
    data = Dataset.from_list([{"prompt": conversation("x"), "level": 0}] * 32)
    tokenizers = [None, processor.tokenizer][: len(reward)] if len(reward) > 1 else None
    return AdoraGRPOTrainer(
        str(PRETRAINED_FOLDER),
        reward,
        AdoraGRPOConfig(str(folder), **{**defaults, **settings}),
        data,
        processing_class=processor,
        reward_processing_classes=tokenizers,
        peft_config=peft_config,
    )


def generate_batch(
    trainer: AdoraGRPOTrainer, method: Any, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Sample and grade one generation by a trainer's method.

    Returns its batch, the figures to be logged, and the columns of the table of completions.
    """
    trainer._metrics["train"].clear()
    trainer._metrics["eval"].clear()
    trainer.state.num_input_tokens_seen = 0
    for column in trainer._logs.values():
        column.clear()
    torch.manual_seed(0)
    batch = dict(method(trainer, rows))
    mode = "train" if trainer.model.training else "eval"
    table = {name: list(trainer._logs[name]) for name in ("completion", "advantages")}
    table |= {f"extra/{name}": list(values) for name, values in trainer._logs["extra"].items()}
    table |= {f"rewards/{name}": list(values) for name, values in trainer._logs["rewards"].items()}
    return {"batch": batch, "figures": dict(trainer._metrics[mode]), "table": table}


REWARD_MODEL_CONFIG = Qwen2Config(
    vocab_size=600,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_labels=1,
    pad_token_id=0,
)
TWO_REWARDS: dict[str, Any] = {"rewards": "two", "reward_weights": [1.0, 0.3]}
ENGINE_KEYS: dict[str, Any] = {"engine": True, "vllm_importance_sampling_correction": True}
SETTINGS_BY_CASE: dict[str, dict[str, Any]] = {
    **{f"images: {name}": {"images": name} for name in IMAGE_COUNTS_BY_CASE},
    "in an evaluation": {"training": False, "images": "mixed", "beta": 0.1},
    "with an engine in an evaluation": {"training": False, **ENGINE_KEYS},
    "reference model": {"beta": 0.1, "images": "mixed"},
    "adapter": {"beta": 0.1, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])},
    "reward model": {"rewards": "model"},
    **{
        f"two rewards, {scale}": {**TWO_REWARDS, "scale_rewards": scale}
        for scale in ("group", "batch", "none")
    },
    "two rewards, normalised first": {
        **TWO_REWARDS,
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "cut off answers masked": {"mask_truncated_completions": True, "beta": 0.1},
    "several steps": {
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
    },
    **{
        f"with an engine, {mode}": {
            **ENGINE_KEYS,
            "vllm_importance_sampling_mode": mode,
            "images": "mixed",
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "bfloat16": {"bf16": True, "beta": 0.1, **ENGINE_KEYS},
    "widths of eights": {"pad_to_multiple_of": 8, "images": "mixed"},
}


def assert_equal_columns_and_metrics(ours: dict[str, Any], stock: dict[str, Any]) -> None:
    """Assert that our generation has every column and metric of stock TRL's, to the bit."""
    for name, stock_value in stock["batch"].items():
        our_value = ours["batch"][name]
        if name == "sampling_per_token_logps":  # NaN where a log-probability is missing
            are_equal = torch.equal(our_value.nan_to_num(9), stock_value.nan_to_num(9))
        elif isinstance(stock_value, torch.Tensor):
            are_equal = torch.equal(our_value, stock_value)
        else:
            are_equal = our_value == stock_value
        assert are_equal, (name, our_value, stock_value)
        assert getattr(our_value, "dtype", None) == getattr(stock_value, "dtype", None), name
    for name, values in stock["figures"].items():
        (our_figure,) = ours["figures"][name]
        (stock_figure,) = values
        if name in ROUNDED_METRICS:
            assert our_figure == pytest.approx(stock_figure, rel=1e-6), name
        else:
            assert our_figure == stock_figure, name


@pytest.mark.parametrize("case", SETTINGS_BY_CASE)
def test_a_generation_is_trls(tmp_path, case):
    """Our own code builds the batch, the figures and the table that stock TRL builds.

    Both get the same made-up completions, so that nothing is sampled.
    """
    settings = dict(SETTINGS_BY_CASE[case])
    image_counts = IMAGE_COUNTS_BY_CASE[settings.pop("images", "one")]
    training = settings.pop("training", True)
    rewards = settings.pop("rewards", "one")
    has_engine = settings.pop("engine", False)
    torch.manual_seed(1)
    further_rewards = {
        "one": [],
        "two": [reward_some_groups_by_length],
        "model": [Qwen2ForSequenceClassification(REWARD_MODEL_CONFIG).eval()],
    }
    trainer = build_trainer(
        tmp_path, [reward_by_first_token, *further_rewards[rewards]], **settings
    )
    completions, logps = random_completions_and_logps(trainer.eos_token_ids[:1])
    answers = [
        SamplingResult(tokens=tokens, logps=scores)
        for tokens, scores in zip(completions, logps, strict=True)
    ]
    if has_engine:
        trainer.use_vllm = True
        trainer.parts.generation_logps.old_logps.corrects_engine = True
        fake_engine: Any = SimpleNamespace(
            sample=lambda *_, **__: answers, sync_weights=lambda: None, bytes_sent=0
        )
        fake_engine.take_images_from = lambda _: None
        fake_engine.staying_awake = nullcontext
        trainer.vllm_generation = fake_engine
        trainer.parts.generation_sampler.group_sampler.sampler = VLLMSampler(
            trainer.parts.context, trainer.parts.images, fake_engine
        )
        trainer.parts.batch_builder = replace(trainer.parts.batch_builder, has_engine_logps=True)
    trainer._generate_single_turn = lambda *_, **__: (completions, logps if has_engine else None)
    trainer.model.train(training)
    if "peft_config" in settings:
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.5)
        trainer.state.global_step = 1  # as after an update: at the start these would be equal

    processor = trainer.processing_class
    # stock TRL gives it None for a row without images, on which Transformers raises
    trainer.processing_class = FlatImagesProcessor(trainer.processing_class)
    stock_method = GRPOTrainer._generate_and_score_completions
    stock = generate_batch(trainer, stock_method, rows_of_rollouts(image_counts))
    trainer.processing_class = processor
    our_method = AdoraGRPOTrainer._generate_and_score_completions
    ours = generate_batch(trainer, our_method, rows_of_rollouts(image_counts))
    assert_equal_columns_and_metrics(ours, stock)
    # our table has the advantages before a method weighs them, which here none does
    our_advantages = ours["table"].pop("extra/advantage_raw")
    assert our_advantages == stock["table"].pop("advantages")
    assert any(our_advantages)
    for name, values in stock["table"].items():
        assert repr(ours["table"][name]) == repr(values), name  # with NaN in it
    assert {"reward", "completions/clipped_ratio", "shortest"} <= stock["figures"].keys()
    for key, column in (
        ("beta", "ref_per_token_logps"),
        ("steps_per_generation", "old_per_token_logps"),
    ):
        if key in settings:
            assert column in stock["batch"]
