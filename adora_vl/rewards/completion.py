"""Reads a completion: its text, its last boxed answer, the form of its thinking, and its words of
reflection.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from adora_vl.rewards.thinking import THINK_TAGS, is_blank, text_after_thinking

MAX_ADJACENT_BOXES = 24  # boxes that count as one answer
MAX_CHARS_OF_ADJACENT_BOXES = 20_000  # the end of a response in which such boxes are searched for
MAX_CHARS_BETWEEN_BOXES = 40  # characters between two such boxes
# The end of a response that is read. A character takes at most about 0.15 microseconds.
MAX_CHARS = 200_000
# `\{`, `\}` and `\\` are skipped as pairs so that a set `\{1,2\}` does not count as braces. A `\\`
# before `boxed{` is not a pair: models that escape twice write `\\boxed{5}`. No groups: the search
# then skips what begins no token.
_BOX_OPENING_PATTERN = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE_OR_BOX_PATTERN = re.compile(
    rf"{_BOX_OPENING_PATTERN.pattern}|\\\\(?!(?:boxed|fbox)\s*\{{)|\\[{{}}]|\{{|\}}"
)
_UNFINISHED_BOX_PATTERN = re.compile(rf"{_BOX_OPENING_PATTERN.pattern}\s*\Z")
# No form feed: at the start it is what careless JSON has left of `\frac`.
_SPACE_CHARACTERS = " \t\n\r"
ANSWER_TAGS = ("<answer>", "</answer>")
Completion = str | Sequence[Mapping[str, Any]]  # a text, or messages


class _Box(NamedTuple):
    r"""A complete box, as positions in the response.

    For example, `so \boxed{5}` has the start 3, the content start 10 and the end 11.
    """

    start: int
    """The backslash of the command."""
    content_start: int
    """Behind the opening brace."""
    end: int
    """The closing brace."""


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last complete box behind the thinking, else None.

    Outer spaces are removed. A box inside a block of thinking is a draft (`text_after_thinking`).
    If boxes are nested, the outermost complete box counts, because what stands beside an inner box
    belongs to the answer: `\boxed{x = \boxed{5}}` gives `x = \boxed{5}`. A box that holds nothing
    but another box is peeled: `\boxed{\boxed{5}}` gives `5`. A response that was cut off as it
    began a box has no answer.

    The response is read once with a stack, so the time is linear in its length, however deep or
    many the boxes are. Only the last `MAX_CHARS` characters are read. Source: the grading policy,
    point 1.
    """
    response = text_after_thinking(response)[-MAX_CHARS:]
    # The pattern matches a box that begins and has nothing in it at the end of the text: the
    # response was cut off there. The brace is looked for first, as the pattern searches all the
    # text.
    if response.rstrip().endswith("{") and _UNFINISHED_BOX_PATTERN.search(response):
        return None
    boxes = _complete_boxes(response)
    if not boxes:
        return None
    # Boxes are in the order of their closing braces, so the last one is the outermost, and a box
    # directly inside stands before it.
    box = boxes.pop()
    for inner_box in reversed(boxes):
        if inner_box.start < box.content_start:
            break  # it stands before this box, not inside
        text_before = response[box.content_start : inner_box.start]
        text_behind = response[inner_box.end + 1 : box.end]
        if text_before.strip() or text_behind.strip():
            break
        box = inner_box
    return response[box.content_start : box.end].strip(_SPACE_CHARACTERS)


class _OpenBox(NamedTuple):
    r"""A box whose closing brace has not been reached yet, as positions in the response."""

    depth: int
    """The number of braces around its content."""
    start: int
    """The backslash of the command."""
    content_start: int


def _complete_boxes(response: str) -> list[_Box]:
    r"""Return all complete `\boxed{}` of a response in the order in which they close.

    In `\boxed{x = \boxed{5}}` the inner box comes first.
    """
    complete_boxes: list[_Box] = []
    open_boxes: list[_OpenBox] = []
    # The number of open braces, counted from the first box on. A box ends at the brace that closes
    # its own depth.
    depth = 0
    first = _BOX_OPENING_PATTERN.search(response)
    if first is None:
        return complete_boxes
    for match in _BRACE_OR_BOX_PATTERN.finditer(response, first.start()):
        piece = match[0]
        if piece == "{":
            depth += 1
        elif _BOX_OPENING_PATTERN.fullmatch(piece):
            depth += 1
            open_boxes.append(_OpenBox(depth=depth, start=match.start(), content_start=match.end()))
        elif piece == "}":
            if open_boxes and open_boxes[-1].depth == depth:
                box = open_boxes.pop()
                complete_boxes.append(
                    _Box(start=box.start, content_start=box.content_start, end=match.start())
                )
            depth -= 1  # below 0 after a stray `}` in the prose, which is harmless
    return complete_boxes


# What may stand between two boxes that are one answer: a unit or noun, a comma, "and" or "or", the
# next one's name.
_TEXT_BETWEEN_BOXES_PATTERN = re.compile(
    r"(?:[\s$]|\\[()\[\]]|\\quad)*(?:[a-z]{1,12}(?<!\band)(?<!\bor)\s+(?=and\b|or\b))?"
    r"(?:[,;]|\\text\s*\{)?\s*(?:and\b|or\b)?(?:[\s$}]|\\[()\[\]]|\\quad)*"
    r"(?:(?:[A-Za-z](?:_(?:\d|\{\d\}))?|[A-Z]{2,3})\s*(?:=|\bis\b)[\s$]*)?"
)
# The name of the value in a box, at the end of what stands before it.
_NAME_BEFORE_BOX_PATTERN = re.compile(
    r"(?<![A-Za-z\\])([A-Za-z](?:_(?:\d|\{\d\}))?|[A-Z]{2,3})\s*(?:=|\bis\b)(?:[\s$]|\\[(\[])*\Z"
)


def last_adjacent_boxes(response: str, answer_tags: bool, with_names: bool = False) -> list[str]:
    r"""Return the contents of the last complete boxes that stand in a row, as one answer.

    Little but a comma, "and" or "or" separates such boxes. `\boxed{1}, no: \boxed{2} and \boxed{3}`
    gives `2` and `3`.

    Args:
        response: the whole response, or the text behind its thinking.
        answer_tags: whether boxes before the last `<answer>` block are ignored.
        with_names: whether the names before the boxes are included if all have one, as `AB = 4` for
            `AB is \boxed{4}`.
    """
    response = text_after_thinking(response)[-MAX_CHARS_OF_ADJACENT_BOXES:]
    if answer_tags:
        response = response[max(0, response.rfind(ANSWER_TAGS[0])) :]
    boxes = _last_adjacent_box_positions(response)
    contents = [response[box.content_start : box.end].strip(_SPACE_CHARACTERS) for box in boxes]
    # A box that holds `AB = 4` has its name inside, so no other is looked for.
    has_equation = any("=" in content for content in contents)
    if not with_names or has_equation:
        return contents
    named_contents = []
    for box, content in zip(boxes, contents, strict=True):
        # The name is searched for in the few characters before the box.
        name = _NAME_BEFORE_BOX_PATTERN.search(
            response, max(0, box.start - MAX_CHARS_BETWEEN_BOXES), box.start
        )
        if name is None:  # where one box has no name, none gets its name
            return contents
        named_contents.append(f"{name[1]} = {content}")
    return named_contents


def _last_adjacent_box_positions(response: str) -> list[_Box]:
    """Return the last boxes between which little but a comma, "and" or "or" stands, in order."""
    boxes: list[_Box] = []  # filled from the last box back
    for box in reversed(_complete_boxes(response)):
        if boxes:
            next_box = boxes[-1]
            if box.end > next_box.start:
                continue  # it stands inside that box, and is part of its content
            between = response[box.end + 1 : next_box.start]
            is_near = len(between) <= MAX_CHARS_BETWEEN_BOXES
            are_one_answer = is_near and _TEXT_BETWEEN_BOXES_PATTERN.fullmatch(between)
            # The row ends here. One box over the limit shows that there are too many.
            if not are_one_answer or len(boxes) > MAX_ADJACENT_BOXES:
                break
        boxes.append(box)
    boxes.reverse()
    return boxes


def last_answer(response: str) -> str | None:
    r"""Return the answer of a response whose prompt asked for `<answer> </answer>`.

    The last complete block decides:

    - With a box in the block or behind it, the answer is the content of the last such box, since
      that is what the model gives as its answer. `<answer>\boxed{5}</answer>` gives `5`, and
      `<answer>5</answer> so \boxed{6}` gives `6`.
    - Without such a box the answer is the content of the block. A box before the block does not
      count: `\boxed{4}? no <answer>5</answer>` gives `5`.
    - Without a block the answer is that of `last_boxed`, or None.
    """
    block = answer_block(response)
    boxed = last_boxed(response if block is None else block)
    return block if boxed is None else boxed


def answer_block(response: str) -> str | None:
    r"""Return the content of the last complete `<answer>` block behind the thinking of a response.

    None without a block. Where a box stands in the block or behind it, all that follows the opening
    tag is returned: `<answer>5</answer> so \boxed{6}` gives `5</answer> so \boxed{6}`.
    """
    response = text_after_thinking(response)[-MAX_CHARS:]
    opening, closing = ANSWER_TAGS
    last_closing = max(0, response.rfind(closing))  # 0 without a closing tag: no block before it
    last_opening = response.rfind(opening, 0, last_closing)
    if last_opening < 0:
        return None
    from_block_on = response[last_opening + len(opening) :]
    if last_boxed(from_block_on) is not None:
        return from_block_on
    content = from_block_on[: from_block_on.find(closing)]
    return content.strip(_SPACE_CHARACTERS)


def completion_text(completion: Completion | None) -> str:
    """Return the text of a completion, or of the last message of a prompt.

    A completion is a string, or messages whose content is a string or a list of parts. The parts
    that are not text, such as images, are left out.
    """
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text") or "" for part in content or [])


def response_text(completion: Completion, thinking_opened: bool = False) -> str:
    """Return the text of a completion with its complete block of thinking.

    Two kinds of completions lack a part of the block, and both become `<think>2 + 3</think>5`:

    - a message from which the tokenizer has parsed the reasoning: the content `5` with the
      `reasoning_content` `2 + 3`
    - `2 + 3</think>5` behind a prompt that ends in the opening tag (`thinking_opened`)
    """
    text = completion_text(completion)
    opening, closing = THINK_TAGS
    reasoning = None
    if completion and not isinstance(completion, str):
        reasoning = completion[-1].get("reasoning_content")
    if isinstance(reasoning, str) and reasoning:
        return f"{opening}{reasoning}{closing}{text}"
    if thinking_opened and not text.lstrip().startswith(opening):
        return f"{opening}{text}"
    return text


def response_texts(
    completions: Sequence[Any], thinking_opened: Sequence[bool] | None = None
) -> list[str]:
    """Return `response_text` of each completion.

    `thinking_opened` says for each completion whether its prompt opens the block of thinking; None:
    no prompt does.
    """
    if thinking_opened is None:
        thinking_opened = [False] * len(completions)
    return [
        response_text(completion, is_opened)
        for completion, is_opened in zip(completions, thinking_opened, strict=True)
    ]


def has_equation_before_box(text: str) -> bool:
    r"""Return whether a response shows more than a bare answer.

    It does if an equals sign stands before the last box, or anywhere if there is no box:
    `2 + 3 = \boxed{5}` shows its working, and `\boxed{x = 5}` does not.
    """
    before_box, box_command, _ = text.rpartition("\\boxed")
    return "=" in (before_box if box_command else text)


def _text_after_block(text: str, tags: tuple[str, str]) -> str | None:
    """Return the stripped text behind the block of tags that `text` begins with.

    `<think>2 + 3</think> 5` gives `5`. `tags` are the opening and the closing tag. None where the
    text does not begin with such a block, and where the block is blank or has a tag of thinking or
    answer in it.
    """
    opening, closing = tags
    if not text.startswith(opening):
        return None
    content, closing_tag, text_behind = text.removeprefix(opening).partition(closing)
    if not closing_tag or is_blank(content) or _has_tag(content):
        return None
    return text_behind.strip()


def _has_tag(text: str) -> bool:
    """Return whether a tag of thinking or answer occurs in a text."""
    return any(tag in text for tag in (*THINK_TAGS, *ANSWER_TAGS))


def think_format_reward(
    completions: Sequence[Any] = (),
    thinking_opened: Sequence[bool] | None = None,
    **columns: Any,
) -> list[float]:
    """Return 1.0 for a single block of thinking before an answer, else 0.0.

    Neither the block nor the text behind it may be blank. `thinking_opened` says whether the prompt
    of each completion has opened the block. It is a reward function with TRL's signature.
    """
    rewards: list[float] = []
    for text in response_texts(completions, thinking_opened):
        # None where the response does not begin with one complete block of thinking.
        answer = _text_after_block(text.strip(), THINK_TAGS)
        is_right = answer is not None and not is_blank(answer) and not _has_tag(answer)
        rewards.append(float(is_right))
    return rewards


def think_answer_format_reward(
    completions: Sequence[Any] = (),
    thinking_opened: Sequence[bool] | None = None,
    **columns: Any,
) -> list[float]:
    """Return 1.0 for a block of thinking and one of answer, else 0.0.

    Nothing may stand around the two blocks, and neither may be blank. `thinking_opened` says
    whether the prompt of each completion has opened the block. It is a reward function in TRL's
    form.
    """
    rewards: list[float] = []
    for text in response_texts(completions, thinking_opened):
        # None without the block; nothing ("") must be left behind the block of the answer.
        after_thinking = _text_after_block(text.strip(), THINK_TAGS)
        after_answer = None
        if after_thinking is not None:
            after_answer = _text_after_block(after_thinking, ANSWER_TAGS)
        rewards.append(float(after_answer == ""))
    return rewards


# ADORA's authors watch such words grow more frequent (arXiv 2602.10019); the list is ours, and
# fixed, so that two runs can be compared. Each word has the pattern by which it is counted; an
# ending such as `-ing` may follow.
_WORDS_WITHOUT_VARIANTS = (
    "wait",
    "verify",
    "reconsider",
    "rethink",
    "alternatively",
    "however",
    "mistake",
    "let me see",
    "hold on",
)
REFLECTIVE_WORD_REGEX = {
    **{word: word for word in _WORDS_WITHOUT_VARIANTS},
    # not the end of `re-check` and `double-check`, which count as themselves
    "check": "(?<!-)(?<!double )check",
    "recheck": "re-?check",
    "double-check": "double[- ]?check",
}
REFLECTIVE_WORD_PATTERN = {
    word: re.compile(rf"(?<!\w){regex}(?:s|ed|ing)?(?!\w)", re.IGNORECASE)
    for word, regex in REFLECTIVE_WORD_REGEX.items()
}
# What a text has to contain, in lower case, so that a word's pattern can match at all. Looking for
# it is some thirty times as fast as the pattern, and most answers contain none of them.
_STEM_BY_REFLECTIVE_WORD = {
    word: "check" if "check" in word else word for word in REFLECTIVE_WORD_REGEX
}
# Four letters match an ASCII one where case is ignored, though they have another lower case.
_ODD_CASED_LETTERS_PATTERN = re.compile("[\u0130\u0131\u017f\u212a]")


def reflective_words(text: str) -> dict[str, int]:
    """Count the occurrences of each reflective word that occurs at all.

    `Wait, I check: no. Wait, I double-checked` gives `{"wait": 2, "check": 1, "double-check": 1}`.
    """
    lower_text = text.lower()
    words = list(REFLECTIVE_WORD_PATTERN)
    # Looking for the stem of each word first spares most searches, which are slow. A stem could be
    # spelled with letters of odd case; then all words are searched for.
    if not _ODD_CASED_LETTERS_PATTERN.search(text):
        words = [word for word in words if _STEM_BY_REFLECTIVE_WORD[word] in lower_text]
    counts = {}
    for word in words:
        count = len(REFLECTIVE_WORD_PATTERN[word].findall(text))
        if count:
            counts[word] = count
    return counts
