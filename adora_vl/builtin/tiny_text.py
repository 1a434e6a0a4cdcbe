"""The tiny text-only policy: a Qwen2.5 language model with its own small vocabulary, for knights
and knaves.

It is built where it is missing. A teacher shows right answers to puzzles with two people and stops
early: most greedy answers are right then, but few sampled ones, and reinforcement learning has the
rest to teach.
"""

import random
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from adora_vl.builtin.processor import END_OF_TURN, build_tokenizer
from adora_vl.builtin.small_model import TrainingStage, UntrainedModel, init_random_model
from adora_vl.builtin.tiny_vl import EncodedPrompts, answer_loss, language_settings
from adora_vl.data.prompts import conversation
from adora_vl.synthetic.knights import generate

_VOCABULARY_ROWS = 500  # puzzles that the tokenizer is trained on
_DATA_SEED = 1000  # other puzzles than any training run draws by default


@dataclass(frozen=True)
class TextStart:
    """The numbers of the training on puzzles of knights and knaves."""

    steps: int = 80  # with more of them, less is left for reinforcement learning
    batch_size: int = 64
    learning_rate: float = 2e-3
    rows: int = 3000
    people: tuple[int, int] = (2, 2)  # the fewest and the most in a puzzle
    seed: int = 1


def prepare_text(plan: TextStart) -> UntrainedModel:
    """Return the text-only model with random weights, and the stage of its training."""
    texts = [
        f"system user assistant You are a helpful assistant.\n{row['problem']}\n{row['answer']}"
        for row in generate(_VOCABULARY_ROWS, seed=_DATA_SEED)
    ]
    tokenizer = build_tokenizer(texts)
    config = Qwen2Config(**language_settings(tokenizer))
    model = init_random_model(partial(Qwen2ForCausalLM, config), tokenizer, plan.seed)
    rng = random.Random(plan.seed)
    prompts = list[Tensor]()
    answers = list[Tensor]()
    for row in generate(plan.rows, seed=_DATA_SEED, people=plan.people):
        messages = conversation(row["problem"], system_prompt=None)
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answer = row["meta"]["solution"] + END_OF_TURN
        prompts.append(torch.tensor(tokenizer(prompt)["input_ids"]))
        answers.append(torch.tensor(tokenizer(answer)["input_ids"]))

    def loss_of(_: int) -> Tensor:
        """Return the loss of a random batch, whatever the step."""
        row_numbers = rng.sample(range(len(prompts)), plan.batch_size)
        return answer_loss(
            model,
            encoded_prompts=EncodedPrompts(prompts=prompts),
            answers=answers,
            row_numbers=row_numbers,
        )

    stage = TrainingStage(steps=plan.steps, learning_rate=plan.learning_rate, loss_of=loss_of)
    return UntrainedModel(model=model, processor=tokenizer, stages=[stage])
