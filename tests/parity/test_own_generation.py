"""A generation is graded and collated as TRL does it: every column and figure to the bit, on the
same completions.
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
from adora_vl.models.load import PRETRAINED, load_processor
from adora_vl.rollout.rollouts import SamplingResult
from adora_vl.rollout.samplers import VLLMSampler
from adora_vl.trainer import AdoraGRPOTrainer
from tests.support.pictures import noise_picture

pytestmark = [pytest.mark.slow, pytest.mark.core]
GROUPS = 4
SIZE = 4
IMAGES = {
    "text": (0, 0, 0, 0),
    "one": (1, 1, 1, 1),
    "several": (2, 1, 3, 1),
    "mixed": (0, 2, 0, 1),
}
# Means that are summed in another order, without a mask as an index.
ROUNDED = {"sampling/sampling_logp_difference/mean", "sampling/importance_sampling_ratio/mean"}


def by_tokens(
    completion_ids: list[list[int]], log_extra: Any, log_metric: Any, **columns: Any
) -> list[float]:
    log_extra("first", [ids[0] for ids in completion_ids])
    log_metric("shortest", min(map(len, completion_ids)))
    return [float(ids[0] % 3 == 0) for ids in completion_ids]


async def of_some_groups(
    completions: list[Any], level: list[int], **columns: Any
) -> list[float | None]:
    """Reward every other problem by its length, and say nothing of the rest.

    TRL's examples for several tasks do so."""
    return [
        None if is_scored % 2 else len(completion[0]["content"]) / 7
        for is_scored, completion in zip(level, completions, strict=True)
    ]


class Flat:
    """The processor for stock TRL, which gives it None for a row without images: Transformers
    raises on that.
    """

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, images: Any = None, **kwargs: Any) -> Any:
        return self._processor(
            images=images and [image for row in images for image in row or []], **kwargs
        )


def rows_of(images: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = [
        {
            "prompt": conversation(f"What is {number}?", SYSTEM_PROMPT),
            "level": number,
            "images": [noise_picture(10 * number + image_number) for image_number in range(count)],
        }
        for number, count in enumerate(images)
    ]
    return [copy.copy(row) for row in rows for _ in range(SIZE)]


def sampled(ends: list[int]) -> tuple[list[list[int]], list[list[float | None]]]:
    """Completions of 1 to 9 tokens, of which some have an end, and what an engine could say of
    them.
    """
    draw = torch.Generator().manual_seed(4)
    token_ids = []
    logps = []
    for row in range(GROUPS * SIZE):
        ids = torch.randint(14, 400, (1 + row % 9,), generator=draw).tolist()
        token_ids.append([*ids, *ends[: row % 2]])
        row_logps: list[float | None] = (
            -3 * torch.rand(len(token_ids[-1]), generator=draw)
        ).tolist()
        logps.append([None, *row_logps[1:]] if row == 3 else row_logps)
    return token_ids, logps


def trainer_of(folder: Any, reward: Any, **settings: Any) -> AdoraGRPOTrainer:
    processor = load_processor(str(PRETRAINED))
    peft = settings.pop("peft_config", None)
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": GROUPS * SIZE,
        "per_device_eval_batch_size": GROUPS * SIZE,
        "num_generations": SIZE,
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
        str(PRETRAINED),
        reward,
        AdoraGRPOConfig(str(folder), **{**defaults, **settings}),
        data,
        processing_class=processor,
        reward_processing_classes=tokenizers,
        peft_config=peft,
    )


def made(trainer: AdoraGRPOTrainer, method: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Columns, figures and table of one generation."""
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


REWARD_MODEL = Qwen2Config(
    vocab_size=600,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_labels=1,
    pad_token_id=0,
)
TWO: dict[str, Any] = {"rewards": "two", "reward_weights": [1.0, 0.3]}
ENGINE: dict[str, Any] = {"engine": True, "vllm_importance_sampling_correction": True}
CASES: dict[str, dict[str, Any]] = {
    **{f"images: {name}": {"images": name} for name in IMAGES},
    "in an evaluation": {"training": False, "images": "mixed", "beta": 0.1},
    "with an engine in an evaluation": {"training": False, **ENGINE},
    "reference model": {"beta": 0.1, "images": "mixed"},
    "adapter": {"beta": 0.1, "peft_config": LoraConfig(r=2, target_modules=["q_proj"])},
    "reward model": {"rewards": "model"},
    **{
        f"two rewards, {scale}": {**TWO, "scale_rewards": scale}
        for scale in ("group", "batch", "none")
    },
    "two rewards, normalised first": {**TWO, "multi_objective_aggregation": "normalize_then_sum"},
    "cut off answers masked": {"mask_truncated_completions": True, "beta": 0.1},
    "several steps": {
        "steps_per_generation": 2,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 8,
    },
    **{
        f"with an engine, {mode}": {
            **ENGINE,
            "vllm_importance_sampling_mode": mode,
            "images": "mixed",
        }
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    },
    "bfloat16": {"bf16": True, "beta": 0.1, **ENGINE},
    "widths of eights": {"pad_to_multiple_of": 8, "images": "mixed"},
}


@pytest.mark.parametrize("case", CASES)
def test_a_generation_is_trls(tmp_path, case):
    settings = dict(CASES[case])
    images = settings.pop("images", "one")
    training = settings.pop("training", True)
    rewards = settings.pop("rewards", "one")
    engine = settings.pop("engine", False)
    torch.manual_seed(1)
    further_rewards = {
        "one": [],
        "two": [of_some_groups],
        "model": [Qwen2ForSequenceClassification(REWARD_MODEL).eval()],
    }
    trainer = trainer_of(tmp_path, [by_tokens, *further_rewards[rewards]], **settings)
    completions, logps = sampled(trainer.eos_token_ids[:1])
    answers = [
        SamplingResult(tokens=tokens, logps=scores)
        for tokens, scores in zip(completions, logps, strict=True)
    ]
    if engine:
        trainer.use_vllm = True
        trainer.old_logps.corrects_engine = True
        fake_engine: Any = SimpleNamespace(
            sample=lambda *_: answers, sync_weights=lambda: None, bytes_sent=0
        )
        fake_engine.take_images_from = lambda _: None
        fake_engine.staying_awake = nullcontext
        trainer.vllm_generation = fake_engine
        trainer.generation_sampler.group_sampler.sampler = VLLMSampler(
            trainer.context, trainer.images, fake_engine
        )
        trainer.batch_builder = replace(trainer.batch_builder, has_engine_logps=True)
    trainer._generate_single_turn = lambda *_: (completions, logps if engine else None)
    trainer.model.train(training)
    if "peft_config" in settings:
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter.data, std=0.5)
        trainer.state.global_step = 1  # as after an update: at the start these would be equal

    processor = trainer.processing_class
    trainer.processing_class = Flat(trainer.processing_class)
    stock = made(trainer, GRPOTrainer._generate_and_score_completions, rows_of(IMAGES[images]))
    trainer.processing_class = processor
    ours = made(trainer, AdoraGRPOTrainer._generate_and_score_completions, rows_of(IMAGES[images]))
    for name, theirs in stock["batch"].items():
        our_value = ours["batch"][name]
        equal = (
            torch.equal(our_value, theirs)
            if isinstance(theirs, torch.Tensor)
            else our_value == theirs
        )
        if name == "sampling_per_token_logps":
            equal = torch.equal(our_value.nan_to_num(9), theirs.nan_to_num(9))
        assert equal, (name, our_value, theirs)
        assert getattr(our_value, "dtype", None) == getattr(theirs, "dtype", None), name
    for name, values in stock["figures"].items():
        (our_value,) = ours["figures"][name]
        (theirs,) = values
        assert our_value == (pytest.approx(theirs, rel=1e-6) if name in ROUNDED else theirs), name
    raw = ours["table"].pop("extra/advantage_raw")
    assert raw == stock["table"].pop("advantages")
    assert any(raw)
    for name, values in stock["table"].items():
        assert repr(ours["table"][name]) == repr(values), name  # with NaN in it
    assert {"reward", "completions/clipped_ratio", "shortest"} <= stock["figures"].keys()
    for name, column in (
        ("beta", "ref_per_token_logps"),
        ("steps_per_generation", "old_per_token_logps"),
    ):
        assert (name in settings) <= (column in stock["batch"])
