"""`tiny_zoom`: the tiny model, taught to look at a corner of a picture again, or to guess the
number that stands there.

It sees 56 x 56 of 448 x 448 pixels (`max_pixels: 3136`), in which no number can be read.
"""

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from adora_vl.builtin.processor import END_OF_TURN, build_processor
from adora_vl.builtin.small_model import TrainingStage, UntrainedModel
from adora_vl.builtin.tiny_vl import build_model, token_loss
from adora_vl.config.blocks import ToolOptions
from adora_vl.data.prompts import conversation_with_images, with_tools
from adora_vl.models.load import PRETRAINED_FOLDER
from adora_vl.synthetic.corners import (
    CELLS_PER_SIDE,
    CORNER_NAMES,
    answer_with_number,
    draw_corner_cell,
    draw_numbered_corners,
    question_for_corner,
)
from adora_vl.tools.ours import View
from adora_vl.tools.run import Toolbox, choose_tools

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

DRAWN_SIZE = 448  # pixels of a drawn picture's side
SEEN_SIZE = 56  # pixels of its side as the model sees it
_TOKEN_SIDE = 28  # pixels of an image token's side
ZOOM_SYSTEM_PROMPT = "Look with zoom."  # as `configs/train/tiny_zoom.yaml` has it
_IMAGE_TOKENS = "<|vision_start|><|image_pad|><|vision_end|>"
_DATA_SEED = 3000  # other problems than any training run draws by default


class TextPart(NamedTuple):
    """A part of a conversation."""

    text: str
    is_learned: bool  # whether the model says it, so that its tokens are in the loss


class Example(NamedTuple):
    """A conversation that the model learns from."""

    parts: list[TextPart]
    images: list[Image.Image]  # in the order in which they are in the text


@dataclass(frozen=True)
class ZoomStart:
    """The numbers of a training in two stages: to read numbers, then to call the tool `zoom`."""

    # The steps of the first stage. Its prompts are short, by which a vision tower learns faster.
    steps: int = 400
    teacher_steps: int = 250  # of the second stage, in which a teacher's conversations are learned
    calls: float = 0.7  # share of the teacher's answers with a call; the others are guesses
    batch_size: int = 32
    learning_rate: float = 1.5e-3
    seed: int = 0


def zoom_call(corner: str) -> str:
    """Return the text of a call of the tool `zoom` for a corner of the picture.

    Its coordinates are pixels of the picture as the model sees it: the corner `top right` has x
    from 49 to 56 and y from 0 to 7.
    """
    side = SEEN_SIZE // CELLS_PER_SIDE  # of a corner
    x = 0 if "left" in corner else SEEN_SIZE - side
    y = 0 if "top" in corner else SEEN_SIZE - side
    call = json.dumps(
        {"name": "zoom", "arguments": {"x1": x, "y1": y, "x2": x + side, "y2": y + side}}
    )
    return f"<tool_call>\n{call}\n</tool_call>"


class _Teacher:
    """Draws conversations for the model to learn from, in the two stages of its training."""

    def __init__(self, processor: "ProcessorMixin", toolbox: Toolbox, plan: ZoomStart) -> None:
        self.processor = processor
        self.toolbox = toolbox
        self.plan = plan
        self.rng = random.Random(plan.seed + _DATA_SEED)

    def prompt(self, corner: str) -> str:
        """Return the prompt that asks for the number in a corner, with the tools described."""
        question = question_for_corner(corner)
        system_prompt = with_tools(ZOOM_SYSTEM_PROMPT, self.toolbox.schemas)
        messages = conversation_with_images(question, n_images=1, system_prompt=system_prompt)
        return str(
            self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def single_corner(self) -> Example:
        """Return an example of the first stage: the picture of one corner, and the number in it."""
        number = self.rng.randrange(10, 100)
        parts = [_prompt(_IMAGE_TOKENS), _completion(answer_with_number(number))]
        return Example(parts, images=[draw_corner_cell(self.rng, number)])

    def conversation(self) -> Example:
        """Return an example of the second stage: a problem, and how a teacher answers it.

        The teacher guesses, or calls `zoom` and answers with the number that the tool shows. The
        share of calls is in the plan.
        """
        image, numbers = draw_numbered_corners(self.rng, DRAWN_SIZE)
        corner = self.rng.choice(CORNER_NAMES)
        calls_zoom = self.rng.random() < self.plan.calls
        if not calls_zoom:
            guess = answer_with_number(self.rng.randrange(10, 100))
            return Example([_prompt(self.prompt(corner)), _completion(guess)], images=[image])
        # Half of the calls are for any corner: which one to look at is left to reinforcement
        # learning.
        called_corner = corner if self.rng.random() < 0.5 else self.rng.choice(CORNER_NAMES)
        call = zoom_call(called_corner)
        reply = self.toolbox.answer(call, [image], seed="", last=False)
        assert reply is not None
        reply_text = "".join(
            part if isinstance(part, str) else _IMAGE_TOKENS for part in reply.parts
        )
        reply_images = [part for part in reply.parts if isinstance(part, Image.Image)]
        reply_turn = f"\n<|im_start|>user\n{reply_text}{END_OF_TURN}\n<|im_start|>assistant\n"
        parts = [
            _prompt(self.prompt(corner)),
            _completion(call),
            _prompt(reply_turn),
            _completion(answer_with_number(numbers[called_corner])),
        ]
        return Example(parts, images=[image, *reply_images])


def _prompt(text: str) -> TextPart:
    """Return a text that the model reads."""
    return TextPart(text, is_learned=False)


def _completion(text: str) -> TextPart:
    """Return a text that the model learns to say, up to the end of its turn."""
    return TextPart(text + END_OF_TURN, is_learned=True)


def _loss(
    model: "PreTrainedModel",
    processor: "ProcessorMixin",
    examples: list[Example],
) -> Tensor:
    """Return the mean cross-entropy of the tokens that the model learns to write."""
    images = []
    for example in examples:
        for image in example.images:
            images.append(image.resize((SEEN_SIZE, SEEN_SIZE), Image.Resampling.BICUBIC))
    image_inputs = processor.image_processor(images=images, return_tensors="pt")
    image_id = model.config.image_token_id
    tokens_per_image = (SEEN_SIZE // _TOKEN_SIDE) ** 2
    sequences = []
    labels = []
    for example in examples:
        ids: list[int] = []
        is_learned: list[bool] = []  # for each of `ids`
        for part in example.parts:
            # An image is one token in the text, and `tokens_per_image` for the model.
            for token in processor.tokenizer(part.text, add_special_tokens=False)["input_ids"]:
                ids += [token] * (tokens_per_image if token == image_id else 1)
            new_tokens = len(ids) - len(is_learned)
            is_learned += [part.is_learned] * new_tokens
        sequence = torch.tensor(ids)
        sequences.append(sequence)
        labels.append(torch.where(torch.tensor(is_learned), sequence, -100))
    return token_loss(model, sequences=sequences, labels=labels, **image_inputs)


def _shipped_model_with(processor: "ProcessorMixin", seed: int) -> Any:
    """Return the shipped model with the vocabulary of another processor.

    The shipped model has learned to read numbers in drawn figures. Tokens that its vocabulary lacks
    get random embeddings, from the seed.
    """
    model = build_model(processor.tokenizer, seed)
    shipped = AutoModelForImageTextToText.from_pretrained(PRETRAINED_FOLDER)
    shipped_vocabulary = AutoTokenizer.from_pretrained(PRETRAINED_FOLDER).get_vocab()
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in shipped.state_dict().items():
            if "embed_tokens" not in name and "lm_head" not in name:
                state[name].copy_(tensor)
                continue
            # The rows of tokens that both vocabularies have are copied to their new numbers.
            for token, row in processor.tokenizer.get_vocab().items():
                if token in shipped_vocabulary:
                    state[name][row].copy_(tensor[shipped_vocabulary[token]])
    return model


def prepare_zoom(plan: ZoomStart) -> UntrainedModel:
    """Return the shipped tiny model with another vocabulary, and the two stages of its training."""
    view = View(low=SEEN_SIZE**2, high=SEEN_SIZE**2, unit=_TOKEN_SIDE)
    toolbox = Toolbox(choose_tools(["zoom"]), ToolOptions(), view)
    system = with_tools(ZOOM_SYSTEM_PROMPT, toolbox.schemas)
    # The text around each problem, which the tokenizer learns to write with few tokens.
    surrounding_text = (
        f"system {system} user assistant\n<tool_response>\nPicture 1: \n</tool_response>"
    )
    texts = [
        zoom_call(corner) + answer_with_number(number) + question_for_corner(corner)
        for corner in CORNER_NAMES
        for number in range(10, 100)
    ]
    processor = build_processor([*[surrounding_text] * 200, *texts])
    model = _shipped_model_with(processor, plan.seed)
    teacher = _Teacher(processor, toolbox, plan)

    def reading_loss(_: int) -> Tensor:
        """Return the loss of the first stage, in which the model learns to read numbers."""
        examples = [teacher.single_corner() for _ in range(2 * plan.batch_size)]
        return _loss(model, processor, examples)

    def conversation_loss(_: int) -> Tensor:
        """Return the loss of the second stage, in which it learns how a conversation goes."""
        examples = [teacher.conversation() for _ in range(plan.batch_size)]
        return _loss(model, processor, examples)

    stages = [
        TrainingStage(steps=plan.steps, learning_rate=plan.learning_rate, loss_of=reading_loss),
        TrainingStage(
            steps=plan.teacher_steps,
            learning_rate=plan.learning_rate * 2 / 3,
            loss_of=conversation_loss,
        ),
    ]
    return UntrainedModel(model=model, processor=processor, stages=stages)
