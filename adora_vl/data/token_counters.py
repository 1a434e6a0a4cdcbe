"""Counters of the tokens of prompts, exact where the model's processor is at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from adora_vl.data.prompts import conversation, conversation_with_images
from adora_vl.utils.errors import UserError, describe_error

if TYPE_CHECKING:
    from transformers import ProcessorMixin

# Assumed where the tokenizer is not at hand; English mathematics has 3 to 4.
CHARACTERS_A_TOKEN = 2.5
_TEMPLATE_TOKENS = 30  # roles and markers of Qwen's chat template around two messages

TemplateOptions = dict[str, Any] | None  # TRL's `chat_template_kwargs`


# Takes texts (problems, or prompts that come from Python) and the number of images of each, and
# returns the tokens of each prompt. An image counts as one token.
TokenCounter = Callable[[Sequence[Any], Sequence[int]], list[int]]


def _chat_text(processor: ProcessorMixin, messages: Any, options: TemplateOptions) -> str:
    """Return messages in the model's chat template, the text that the model continues.

    `options` are further arguments of the template.
    """
    text: str = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **(options or {})
    )
    return text


def _token_counts(
    processor: ProcessorMixin, texts: list[str], *, add_special_tokens: bool
) -> list[int]:
    """Return the number of tokens of each text.

    `add_special_tokens` says whether those count that the tokenizer adds to a text.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    ids_of_texts = tokenizer(texts, add_special_tokens=add_special_tokens)["input_ids"]
    return [len(ids) for ids in ids_of_texts]


def tokenizer_counter(
    processor: ProcessorMixin, system_prompt: str | None, options: TemplateOptions = None
) -> TokenCounter:
    """Return a counter that uses the trainer's template and tokenizer.

    Args:
        processor: the model's processor, or a tokenizer.
        system_prompt: the system prompt of every conversation; None for none.
        options: further arguments of the chat template.
    """
    # A processor's template takes messages with a part for each image, a tokenizer's only text.
    takes_image_parts = hasattr(processor, "tokenizer")

    def count(problems: Sequence[Any], images: Sequence[int]) -> list[int]:
        """Return how many tokens each problem has in the chat that a training makes of it.

        `images` has the number of images of each.
        """
        texts = []
        for problem, n_images in zip(problems, images, strict=True):
            messages: Any
            if takes_image_parts:
                messages = conversation_with_images(problem, n_images, system_prompt)
            else:
                messages = conversation(problem, system_prompt)
            texts.append(_chat_text(processor, messages, options))
        return _token_counts(processor, texts, add_special_tokens=False)

    return count


def message_counter(processor: ProcessorMixin, options: TemplateOptions) -> TokenCounter:
    """Return a counter of prompts that TRL takes, texts or messages, tokenized as TRL does.

    `options` are further arguments of the chat template.
    """
    from trl.data_utils import prepare_multimodal_messages  # importing it takes seconds

    tokenizer = getattr(processor, "tokenizer", processor)

    def token_count(prompt: Any, n_images: int) -> int:
        """Return how many tokens a prompt has."""
        if isinstance(prompt, str):
            return _token_counts(processor, [prompt], add_special_tokens=True)[0]
        try:
            messages = prompt
            is_multimodal = tokenizer is not processor
            if is_multimodal:  # the images themselves are not needed
                messages = prepare_multimodal_messages(prompt, images=[None] * n_images)
            text = _chat_text(processor, messages, options)
            return _token_counts(processor, [text], add_special_tokens=False)[0]
        except Exception as error:  # a template raises what it likes
            raise UserError(
                f"train_dataset: the prompt {prompt!r:.80} is refused ({describe_error(error)})"
            ) from error

    def count(prompts: Sequence[Any], images: Sequence[int]) -> list[int]:
        """Return how many tokens each prompt has; `images` has its number of images."""
        return [
            token_count(prompt, n_images) for prompt, n_images in zip(prompts, images, strict=True)
        ]

    return count


def character_counter(system_prompt: str | None) -> TokenCounter:
    """Return a counter that estimates from characters, where the tokenizer cannot be reached."""
    system_characters = len(system_prompt or "")

    def count(problems: Sequence[Any], images: Sequence[int]) -> list[int]:
        """Return an estimate of the tokens of each problem, with system prompt and template.

        `images` has the number of images of each.
        """
        counts = []
        for problem, n_images in zip(problems, images, strict=True):
            characters = len(problem) + system_characters
            text_tokens = math.ceil(characters / CHARACTERS_A_TOKEN)
            counts.append(text_tokens + _TEMPLATE_TOKENS + n_images)
        return counts

    return count
