"""`tiny_zoom`: the tiny model, taught to look at a corner of a picture again, or to guess the
number that stands there.

It sees 56 x 56 of 448 x 448 pixels (`max_pixels: 3136`), in which no number can be read.
"""

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

from adora_vl.builtin.processor import END_OF_TURN, build_processor
from adora_vl.builtin.small_model import Lesson, Untaught
from adora_vl.builtin.tiny_vl import build_model, token_loss
from adora_vl.config.blocks import ToolOptions
from adora_vl.data.prompts import conversation_with_images, with_tools
from adora_vl.models.load import PRETRAINED
from adora_vl.synthetic.corners import CORNERS, PARTS, answer, cell, drawn, question
from adora_vl.tools.ours import View
from adora_vl.tools.run import Toolbox, choose_tools

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin

SIZE = 448
SEEN = 56
SYSTEM = "Look with zoom."  # as `configs/train/tiny_zoom.yaml` has it
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_DATA_SEED = 3000  # other problems than any training run draws by default
Part = tuple[str, bool]  # of a conversation: a text, and whether the model says it


@dataclass(frozen=True)
class ZoomStart:
    """Two stages: to read single corners, behind short prompts, by which a vision tower learns
    several times faster; then conversations of a teacher that calls with the share `calls`, half of
    the time for any corner, and else guesses.

    `tool`: without it the number is told at once, which nobody can see.
    """

    steps: int = 400
    teacher_steps: int = 250
    calls: float = 0.7
    batch_size: int = 32
    learning_rate: float = 1.5e-3
    seed: int = 0
    tool: bool = True


def call_for(corner: str) -> str:
    """Return the call of `zoom` for a corner, in pixels of the picture as it is seen."""
    part = SEEN // PARTS
    x = 0 if "left" in corner else SEEN - part
    y = 0 if "top" in corner else SEEN - part
    call = json.dumps(
        {"name": "zoom", "arguments": {"x1": x, "y1": y, "x2": x + part, "y2": y + part}}
    )
    return f"<tool_call>\n{call}\n</tool_call>"


class _Teacher:
    """Draws the examples of the two lessons.

    An example is parts of text, each with whether it is learned, and its pictures.
    """

    def __init__(self, processor: "ProcessorMixin", toolbox: Toolbox, plan: ZoomStart) -> None:
        self.processor = processor
        self.toolbox = toolbox
        self.plan = plan
        self.rng = random.Random(plan.seed + _DATA_SEED)

    def prompt(self, corner: str) -> str:
        """Return the prompt that asks for the number in a corner, with the tools described."""
        messages = conversation_with_images(
            question(corner), 1, with_tools(SYSTEM, self.toolbox.schemas)
        )
        return str(
            self.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        )

    def single(self) -> tuple[list[Part], list[Image.Image]]:
        """Return a corner by itself and its number."""
        number = self.rng.randrange(10, 100)
        return [(_IMAGE, False), (answer(number) + END_OF_TURN, True)], [cell(self.rng, number)]

    def direct(self, *, short: bool) -> tuple[list[Part], list[Image.Image]]:
        """Return a problem and its answer at once."""
        image, numbers = drawn(self.rng, SIZE)
        corner = self.rng.choice(CORNERS)
        prompt = _IMAGE + corner if short else self.prompt(corner)
        return [(prompt, False), (answer(numbers[corner]) + END_OF_TURN, True)], [image]

    def turns(self) -> tuple[list[Part], list[Image.Image]]:
        """Return a problem, mostly a call and what comes back, and an answer."""
        image, numbers = drawn(self.rng, SIZE)
        corner = self.rng.choice(CORNERS)
        if self.rng.random() >= self.plan.calls:
            guess = answer(self.rng.randrange(10, 100)) + END_OF_TURN
            return [(self.prompt(corner), False), (guess, True)], [image]
        # Half of the calls are for any corner: which one to look at is left to reinforcement.
        at = corner if self.rng.random() < 0.5 else self.rng.choice(CORNERS)
        reply = self.toolbox.answer(call_for(at), [image], seed="", last=False)
        assert reply is not None
        reply_text = "".join(part if isinstance(part, str) else _IMAGE for part in reply.parts)
        reply_images = [part for part in reply.parts if isinstance(part, Image.Image)]
        back = f"\n<|im_start|>user\n{reply_text}{END_OF_TURN}\n<|im_start|>assistant\n"
        parts = [(self.prompt(corner), False), (call_for(at) + END_OF_TURN, True), (back, False)]
        return [*parts, (answer(numbers[at]) + END_OF_TURN, True)], [image, *reply_images]


def _loss(
    model: "PreTrainedModel",
    processor: "ProcessorMixin",
    rows: list[tuple[list[Part], list[Image.Image]]],
) -> Tensor:
    """Return the mean loss over the tokens that the model writes itself."""
    image_inputs = processor.image_processor(
        images=[
            image.resize((SEEN, SEEN), Image.Resampling.BICUBIC)
            for _, images in rows
            for image in images
        ],
        return_tensors="pt",
    )
    image_id = model.config.image_token_id
    tokens_per_image = (SEEN // 28) ** 2
    sequences = []
    labels = []
    for parts, _ in rows:
        ids = list[int]()
        is_policy = list[bool]()
        for text, is_policy_text in parts:
            # An image is one token in the text, and as many for the model as it has patches.
            for token in processor.tokenizer(text, add_special_tokens=False)["input_ids"]:
                ids += [token] * (tokens_per_image if token == image_id else 1)
            is_policy += [is_policy_text] * (len(ids) - len(is_policy))
        sequences.append(torch.tensor(ids))
        labels.append(torch.where(torch.tensor(is_policy), sequences[-1], -100))
    return token_loss(model, sequences=sequences, labels=labels, **image_inputs)


def _begun(processor: "ProcessorMixin", seed: int) -> Any:
    """Return the shipped model behind another vocabulary.

    It has learned to read numbers in drawn figures.
    """
    model = build_model(processor.tokenizer, seed)
    shipped = AutoModelForImageTextToText.from_pretrained(PRETRAINED)
    shipped_vocabulary = AutoTokenizer.from_pretrained(PRETRAINED).get_vocab()
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


def begin_zoom(plan: ZoomStart) -> Untaught:
    """Return the shipped tiny model behind another vocabulary, and its two lessons."""
    toolbox = Toolbox(choose_tools(["zoom"]), ToolOptions(), View(SEEN**2, SEEN**2, 28))
    system = with_tools(SYSTEM, toolbox.schemas)
    often = f"system {system} user assistant\n<tool_response>\nPicture 1: \n</tool_response>"
    texts = [
        call_for(corner) + answer(number) + question(corner)
        for corner in CORNERS
        for number in range(10, 100)
    ]
    processor = build_processor([*[often] * 200, *texts])
    model = _begun(processor, plan.seed)
    teacher = _Teacher(processor, toolbox, plan)

    def read(_: int) -> Tensor:
        """Return the loss of the first lesson, in which the model learns to read numbers."""
        rows = [
            teacher.single() if plan.tool else teacher.direct(short=True)
            for _ in range(2 * plan.batch_size)
        ]
        return _loss(model, processor, rows)

    def talk(_: int) -> Tensor:
        """Return the loss of the second lesson, in which it learns how a conversation goes."""
        rows = [
            teacher.turns() if plan.tool else teacher.direct(short=False)
            for _ in range(plan.batch_size)
        ]
        return _loss(model, processor, rows)

    lessons = [
        Lesson(plan.steps, plan.learning_rate, read),
        Lesson(plan.teacher_steps, plan.learning_rate * 2 / 3, talk),
    ]
    return Untaught(model, processor, lessons)
