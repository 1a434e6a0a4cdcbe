"""The model that a run starts from: small, and the same for all arms and regimes of a seed.

It learns in two stages: first to compute, which one model does for many seeds, and then to answer
as the teacher does, who guesses and slips.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from adora_vl.builtin.processor import END_OF_TURN, build_tokenizer
from adora_vl.builtin.small_model import fit, init_random_model, is_built, save_model_and_facts
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
IGNORED_LABEL = -100  # a token with this label is left out of Transformers' loss


def _draw_problem(rng: random.Random, start: TeachingPlan) -> ChainProblem:
    """Draw a problem to learn from, of any length of the plan, with a label half of the time."""
    labelled = rng.random() < 0.5
    return draw_chain_problem(rng, Regime(rng.choice(start.operations), labelled=labelled))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer in which every word, digit and sign is one token.

    So a step takes as many tokens in the form as in the chain.
    """
    return build_tokenizer(["any\n", "two\n", "ten\n", "guess\n"])


def _config(tokenizer: PreTrainedTokenizerFast, start: TeachingPlan) -> Qwen2Config:
    """Return the config of the small language model."""
    config = Qwen2Config(**language_settings(tokenizer))
    config.num_hidden_layers = start.layers
    config.layer_types = config.layer_types[:1] * start.layers
    config.hidden_size = start.width
    config.intermediate_size = 4 * start.width
    config.head_dim = start.width // HEADS
    config.num_attention_heads = HEADS
    config.num_key_value_heads = HEADS
    return config


def _teach(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    start: TeachingPlan,
    steps: int,
    draw_example: Callable[[], tuple[ChainProblem, str]],
) -> float:
    """Train a model in place on drawn examples. Returns the mean loss of the last 50 steps.

    `draw_example`: returns a problem and the answer to learn.
    """

    def loss_of_step(step: int) -> Tensor:
        """Return the loss of one batch, over the tokens of the answers."""
        examples = [draw_example() for _ in range(start.batch_size)]
        prompt_ids = tokenizer([problem.prompt for problem, _ in examples])["input_ids"]
        answer_ids = tokenizer([answer + END_OF_TURN for _, answer in examples])["input_ids"]
        ids = []
        labels = []
        masks = []
        for prompt, answer in zip(prompt_ids, answer_ids, strict=True):
            ids.append(torch.tensor(prompt + answer))
            labels.append(torch.tensor([IGNORED_LABEL] * len(prompt) + answer))
            masks.append(torch.ones(len(prompt + answer), dtype=torch.long))
        loss: Tensor = model(
            input_ids=pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            attention_mask=pad_sequence(masks, batch_first=True),
            labels=pad_sequence(labels, batch_first=True, padding_value=IGNORED_LABEL),
        ).loss
        return loss

    return fit(model, loss_of=loss_of_step, steps=steps, learning_rate=start.learning_rate)


def arithmetic_folder(output: Path, number: int) -> Path:
    """Return the folder of the arithmetic model of a number."""
    name = f"arithmetic-{number}" if number else "arithmetic"
    return output / "starts" / name


def start_folder(output: Path, trial: Trial) -> Path:
    """Return the folder of the model from which a trial starts."""
    name = f"{trial.model}-{trial.seed}" if trial.model else str(trial.seed)
    return output / "starts" / name


def hash_of_weights(folder: Path) -> str:
    """Return eight digits of the hash of a model's weights.

    The same seed gives other weights on another machine, and then other starts.
    """
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:8]


def build_arithmetic(folder: Path, start: TeachingPlan, number: int = 0) -> None:
    """Train a model that writes every chain without a slip, from which starts are made.

    A model of this plan that is there already stays. The stage is needed, since a teacher that
    slips from the beginning does not get the arithmetic across: after 600 steps no chain was right.
    """
    if is_built(folder, asdict(start)):
        return
    tokenizer = _tokenizer()
    rng = random.Random(f"arithmetic/{number}" if number else "arithmetic")
    model = init_random_model(
        partial(Qwen2ForCausalLM, _config(tokenizer, start)), tokenizer, seed=number
    )

    def draw_example() -> tuple[ChainProblem, str]:
        problem = _draw_problem(rng, start)
        return problem, problem.chain

    save_model_and_facts(
        folder,
        model=model,
        processor=tokenizer,
        plan=start,
        loss=_teach(
            model,
            tokenizer=tokenizer,
            start=start,
            steps=start.arithmetic_steps,
            draw_example=draw_example,
        ),
    )


def build_start(folder: Path, arithmetic: Path, start: TeachingPlan, seed: int) -> None:
    """Train the model of `arithmetic` on the teacher that guesses and slips.

    `folder` appears complete or not at all, and a start of this plan that is there stays.
    """
    if is_built(folder, asdict(start)):
        return
    model = AutoModelForCausalLM.from_pretrained(arithmetic, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(arithmetic)
    rng = random.Random(f"start/{seed}")

    def draw_example() -> tuple[ChainProblem, str]:
        problem = _draw_problem(rng, start)
        return problem, teacher_answer(rng, problem)

    save_model_and_facts(
        folder,
        model=model,
        processor=tokenizer,
        plan=start,
        seed=seed,
        loss=_teach(
            model,
            tokenizer=tokenizer,
            start=start,
            steps=start.steps,
            draw_example=draw_example,
        ),
    )
