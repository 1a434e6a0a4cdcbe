"""The start of a seed: a small language model that copies the teacher, the same for all arms and
regimes.

It learns in two stages: first to compute, which one model does for many seeds, and then to answer
as the teacher does.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from adora_vl.builtin.processor import END_OF_TURN, build_tokenizer
from adora_vl.builtin.small_model import fit, fresh_model, is_built, save_built
from adora_vl.builtin.tiny_vl import language_settings
from benchmarks.attenuation.task import (
    ChainProblem,
    Regime,
    TeachingPlan,
    Trial,
    draw_chain_problem,
    teacher_answer,
)

HEADS = 4


def _problem(rng: random.Random, start: TeachingPlan) -> ChainProblem:
    labelled = rng.random() < 0.5
    return draw_chain_problem(rng, Regime(rng.choice(start.operations), labelled=labelled))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which every word, digit and sign is one token.

    So a step takes as many tokens in the form as in the chain.
    """
    return build_tokenizer(["any\n", "two\n", "ten\n", "guess\n"])


def _config(tokenizer: PreTrainedTokenizerFast, start: TeachingPlan) -> Qwen2Config:
    config = Qwen2Config(**language_settings(tokenizer))
    config.num_hidden_layers = start.layers
    config.layer_types = config.layer_types[:1] * start.layers
    config.hidden_size = start.width
    config.intermediate_size = 4 * start.width
    config.head_dim = start.width // HEADS
    config.num_attention_heads = config.num_key_value_heads = HEADS
    return config


def _teach(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    start: TeachingPlan,
    steps: int,
    example: Callable[[], tuple[ChainProblem, str]],
) -> float:
    """Train in place on what `example` draws. Returns the mean loss of the last 50 steps."""

    def loss_of(step: int) -> Tensor:
        examples = [example() for _ in range(start.batch_size)]
        prompt_ids = tokenizer([problem.prompt for problem, _ in examples])["input_ids"]
        answer_ids = tokenizer([answer + END_OF_TURN for _, answer in examples])["input_ids"]
        pairs = list(zip(prompt_ids, answer_ids, strict=True))
        ids_BT = pad_sequence([torch.tensor(a + t) for a, t in pairs], True, tokenizer.pad_token_id)
        labels_BT = pad_sequence([torch.tensor([-100] * len(a) + t) for a, t in pairs], True, -100)
        mask_BT = pad_sequence([torch.ones(len(a + t), dtype=torch.long) for a, t in pairs], True)
        loss: Tensor = model(input_ids=ids_BT, attention_mask=mask_BT, labels=labels_BT).loss
        return loss

    return fit(model, loss_of=loss_of, steps=steps, learning_rate=start.learning_rate)


def arithmetic_folder(output: Path, number: int) -> Path:
    return output / "starts" / (f"arithmetic-{number}" if number else "arithmetic")


def start_folder(output: Path, job: Trial) -> Path:
    return output / "starts" / (f"{job.model}-{job.seed}" if job.model else str(job.seed))


def hash_of_weights(folder: Path) -> str:
    """Of a model's weights.

    The same seed gives other weights on another machine, and then other starts.
    """
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8]


def build_arithmetic(folder: Path, start: TeachingPlan, number: int = 0) -> None:
    """Train a model that writes every chain without a slip, which starts are made of.

    One of this plan that is there stays.

    A teacher that slips from the beginning does not get the arithmetic across: after 600 steps no
    chain was right.
    """
    if is_built(folder, asdict(start)):
        return
    tokenizer = _tokenizer()
    rng = random.Random(f"arithmetic/{number}" if number else "arithmetic")
    model = fresh_model(
        partial(Qwen2ForCausalLM, _config(tokenizer, start)), tokenizer, seed=number
    )

    def example() -> tuple[ChainProblem, str]:
        problem = _problem(rng, start)
        return problem, problem.chain

    save_built(
        folder,
        model=model,
        processor=tokenizer,
        plan=start,
        loss=_teach(
            model, tokenizer=tokenizer, start=start, steps=start.arithmetic_steps, example=example
        ),
    )


def build_start(folder: Path, arithmetic: Path, start: TeachingPlan, seed: int) -> None:
    """Train the model of `arithmetic` on the teacher that guesses and slips.

    `folder` appears complete or not at all, and a start of this plan that is there stays.
    """
    if is_built(folder, asdict(start)):
        return
    model: Any = AutoModelForCausalLM.from_pretrained(arithmetic, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arithmetic)
    rng = random.Random(f"start/{seed}")

    def example() -> tuple[ChainProblem, str]:
        problem = _problem(rng, start)
        return problem, teacher_answer(rng, problem)

    save_built(
        folder,
        model=model,
        processor=tokenizer,
        plan=start,
        seed=seed,
        loss=_teach(model, tokenizer=tokenizer, start=start, steps=start.steps, example=example),
    )
