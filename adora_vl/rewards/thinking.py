r"""Blocks of thinking: which part of a response is its answer, and whether a prompt opens a block.

A draft in `<think> </think>` is no answer. All code that reads answers, in rewards and in
evaluations, reads `text_after_thinking` alone. There the boxes of all models are `\boxed{}`.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence

THINK_TAGS = ("<think>", "</think>")
# Thinking models differ in spelling: Qwen, GLM and DeepSeek write the first, Seed the third, Kimi
# the fourth, Magistral the last, and further models the second.
_THINKING_TAG_PATTERN = re.compile(
    r"</?think>|</?thinking>|</?seed:think>|◁/?think▷|\[/?THINK\]", re.IGNORECASE
)
# A template that opens the block ends the prompt with it, and with a line break behind it.
_OPENING_TAG_AT_THE_END_PATTERN = re.compile(
    r"(?:<think>|<thinking>|<seed:think>|◁think▷|\[THINK\])\s*\Z", re.IGNORECASE
)
# GLM-4.1V, GLM-4.5V and GLM-4.6V write their answer between these tokens in place of `\boxed{}`.
BOX_TOKENS = ("<|begin_of_box|>", "<|end_of_box|>")
_TAIL_TOKENS = 16  # a tokenizer without a token for the tag needs some five
# Characters that show nothing, though Unicode calls them letters or symbols: fillers, blank
# Braille.
_BLANK_CHARACTERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
# The first letters of Unicode's categories of spaces, of controls and formats, and of marks.
_INVISIBLE_CATEGORIES = ("Z", "C", "M")


def text_after_thinking(response: str, thinking_opened: bool = False) -> str:
    r"""Return the part of a response that is its answer: what stands behind the last `</think>`.

    Nothing is left where a block was opened and not closed. A response without a block is returned
    whole, so that this may be called again on what it returns. A box of GLM becomes `\boxed{}`.

    Args:
        response: the whole text that the model has sampled.
        thinking_opened: whether the prompt ended in `<think>`, so that the response begins inside.
    """
    response = with_latex_boxes(response)
    tags = list(_THINKING_TAG_PATTERN.finditer(response)) if _may_have_tags(response) else []
    if not tags:
        return "" if thinking_opened else response
    last_tag = tags[-1]
    if not _is_closing(last_tag):
        return ""  # the last block is still open, so that all behind its tag is thinking
    return response[last_tag.end() :].lstrip()


def _may_have_tags(response: str) -> bool:
    """Return whether a text may have a tag.

    Searching for tags takes ten times as long as this check.
    """
    has_bracket = "<" in response or "◁" in response or "[" in response
    return has_bracket and "think" in response.lower()


def with_latex_boxes(text: str) -> str:
    r"""Return `text` with `\boxed{5}` for `<|begin_of_box|>5<|end_of_box|>`.

    A token without its partner is left out or opens a box that never ends, so that it holds no
    answer.
    """
    opening, closing = BOX_TOKENS
    if opening not in text:
        return text.replace(closing, "")
    return text.replace(opening, r"\boxed{").replace(closing, "}")


def closes_unopened_block(response: str) -> bool:
    """Return whether the first tag in a response closes a block.

    The prompt must have opened it.
    """
    first_tag = _THINKING_TAG_PATTERN.search(response)
    return first_tag is not None and _is_closing(first_tag)


def closes_block(response: str) -> bool:
    """Return whether a response has a closing tag anywhere."""
    return any(_is_closing(tag) for tag in _THINKING_TAG_PATTERN.finditer(response))


def _is_closing(tag: re.Match[str]) -> bool:
    """Return whether a match of `_THINKING_TAG_PATTERN` closes a block."""
    return "/" in tag[0]


def opens_thinking(prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> bool:
    """Return whether a prompt ends inside a block of thinking, as some chat templates do.

    Args:
        prompt_ids: all tokens of the prompt.
        decode: the function that also decodes the responses, so that both show the same tags.
    """
    end_of_prompt = decode(list(prompt_ids[-_TAIL_TOKENS:]))
    return _OPENING_TAG_AT_THE_END_PATTERN.search(end_of_prompt) is not None


def is_blank(text: str) -> bool:
    """Return whether a text has only spaces, controls and zero-width characters."""
    return all(
        character in _BLANK_CHARACTERS
        or unicodedata.category(character)[0] in _INVISIBLE_CATEGORIES
        for character in text
    )
